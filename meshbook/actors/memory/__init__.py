"""Tensors' memory, as `meshbook.actors.buffer` shares it with other processes and copies it."""
