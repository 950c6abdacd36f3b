"""Time as a thing one is given, so that a test can hold it still.

`monotonic` orders events inside one process; nothing compares monotonic times of two processes. `wall` is for people.

User code shares its process with Meshbook, and may rebind `time.monotonic` and the like, to test with for example. What
runs on ranks therefore takes these functions from here, where they stay as they were.
"""

from __future__ import annotations

from time import monotonic, perf_counter, process_time, sleep
from time import time as wall
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock", "monotonic", "perf_counter", "process_time", "sleep", "wall"]


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        return monotonic()

    def wall(self) -> float:
        return wall()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
