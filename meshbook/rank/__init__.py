"""What runs inside a rank: one process of the mesh, its main thread for cells and a service thread beside it."""
