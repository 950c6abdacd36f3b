"""Diagnosis: from snapshots of ranks to findings, and from stacks to one tree. Pure; shared by all that show it.

`findings.explain` says why a mesh does not get on, `tree.merge` folds all stacks into one. Neither knows how snapshots
are taken.
"""
