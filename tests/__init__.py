"""Meshbook's tests: the same tree as `meshbook/`, with what holds the house together at the top."""
