"""Remote tensors, the ranks' side: what they hold, and the operations that arrive for it."""
