"""Measurements of what Meshbook promises: `python -m benchmarks [NAME ...] [--quick]`, or `make bench`.

Every benchmark measures its yardstick (a plain kernel, a bare socket, a memory copy, a rival) in the same run, in turns
with Meshbook, so that a busy machine slows both. None is a test: a promise that does not hold is said, not failed.
"""
