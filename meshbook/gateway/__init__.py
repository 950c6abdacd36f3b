"""Meshes for agents and for web programs: `meshbook mcp` and `meshbook serve`, on one table of operations."""
