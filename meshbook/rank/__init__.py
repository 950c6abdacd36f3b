"""The code of a rank: one process of the mesh, with a main thread for cells and a service thread beside it."""
