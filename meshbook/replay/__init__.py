"""Runs a recorded cell of one rank again, in one process: see `meshbook replay`."""
