"""Diagnosis: `findings` from snapshots of ranks, and one tree of all stacks. Pure; shared by all user interfaces.

`findings.explain` says why a mesh makes no progress, `stack_tree.merge` folds all stacks into one tree. Neither knows
how snapshots are taken.
"""
