"""The daemon that owns a mesh: its memory (pure), and the one loop that does I/O around it."""
