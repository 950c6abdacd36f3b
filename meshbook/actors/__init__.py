"""The caller's side of actors: meshes of processes and actors, endpoints, futures, ports."""
