"""Keeps of a cell on one rank what one process needs to run it again: `meshbook.replay` does that."""
