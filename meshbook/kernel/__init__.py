"""The notebook's side: the Meshbook kernel, its magics, and what both are made of."""
