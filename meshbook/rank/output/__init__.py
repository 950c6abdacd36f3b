"""The output of a rank: captured from Python's streams and from file descriptors, in order, bounded and paced."""
