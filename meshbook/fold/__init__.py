"""Folding: output, outcomes and failures of many ranks, with equal ones shown once.

Pure: no sockets, no clock, no torch. Used by host, supervisor and controller, each for its own level.
"""

from __future__ import annotations
