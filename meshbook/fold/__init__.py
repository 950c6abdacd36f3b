"""Many ranks speaking with one voice: their output, outcomes and failures, folded.

Pure: no sockets, no clock, no torch. Host, supervisor and controller all use it, each on what it was given.
"""

from __future__ import annotations
