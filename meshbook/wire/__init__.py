"""The messages between processes, and their transport."""
