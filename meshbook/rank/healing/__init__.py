"""What makes a new process of a rank like the one before it: cells that are replayed, and state that others hold."""
