"""What users' objects hold: which kinds there are, how each is read, compared and loaded into the object like it.

Elastic loops, loops on remote tensors, heals and checkpoints stand on it.
"""
