"""The notebook's side: the Meshbook kernel, its magics, and their building blocks."""
