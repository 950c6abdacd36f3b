"""Remote tensors and modules: metadata in this process, storage and computation on the ranks."""
