"""One machine's part of a mesh: starts its ranks, forwards commands to them, folds their reports."""
