"""The daemon that owns a mesh: its state (pure), and the loop that does I/O around it."""
