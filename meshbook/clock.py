"""Time as an injectable dependency, so that a test can control it.

`monotonic` orders events inside one process; monotonic times of two processes are never compared. `wall` is for
display.

User code shares its process with Meshbook, and may rebind `time.monotonic` and similar functions, for example in tests.
Code that runs on ranks therefore imports these functions from here, where they stay the originals.
"""

from __future__ import annotations

import os
from time import monotonic, perf_counter, process_time, sleep
from time import time as wall
from typing import Protocol

__all__ = [
    "STRETCH",
    "Clock",
    "ManualClock",
    "SystemClock",
    "monotonic",
    "perf_counter",
    "process_time",
    "sleep",
    "wall",
]

# A factor for what depends on how far ranks are apart, for a machine that others share: how long a line waits for other
# ranks to print it too, and how long ranks have after each action of a Stop (`wire.stop_timing`).
STRETCH = float(os.environ.get("MESHBOOK_STRETCH", "1"))


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    """The system clock."""

    def monotonic(self) -> float:
        return monotonic()

    def wall(self) -> float:
        return wall()


class ManualClock:
    """A clock that advances only by `advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
