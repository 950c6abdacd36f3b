"""marimo notebooks: what a page shows, the meshes that its cells start, and cells that run on the ranks."""
