"""Remote tensors and modules: metadata here, storage and arithmetic on the ranks."""
