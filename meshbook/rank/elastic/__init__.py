"""Loops of steps that survive the loss of a rank: `mesh.elastic`."""
