"""One machine's part of a mesh: starts its ranks, passes commands to them, folds what they report."""
