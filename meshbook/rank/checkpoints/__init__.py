"""Checkpoints as a rank saves and restores them, in torch's DCP format."""
