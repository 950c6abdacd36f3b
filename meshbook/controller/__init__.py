"""The user's side of a mesh: connections, handles, futures, values."""
