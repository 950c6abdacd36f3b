"""Snapshots of ranks in, findings out: who waits for whom, at which line, and what to do about it. Pure."""
