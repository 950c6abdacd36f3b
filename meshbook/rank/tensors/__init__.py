"""Remote tensors on the ranks: their storage, and the operations on them."""
