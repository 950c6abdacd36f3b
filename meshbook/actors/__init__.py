"""Actors as their callers see them: meshes of processes and actors, endpoints, futures, ports."""
