"""Threads that get no processor, as on a machine that others share: `pytest --starve=0.15` runs tests among them.

At any moment about that part of the threads of all tests on this machine (those of ranks, hosts, supervisors, kernels)
has the scheduler's idle policy, for 0.1 to 1.6 s each, beside one busy process per processor. A thread stands still
wherever it is then, so what happens in one order on a quiet machine happens in others. Needs Linux, and to be root: a
thread leaves the idle policy again by a right that others lack.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.leaks import MARKER, ancestry

INTERVAL_S = 0.1
DURATIONS_S = (0.1, 0.2, 0.4, 0.8, 1.6)
MEAN_S = sum(DURATIONS_S) / len(DURATIONS_S)


@contextmanager
def starve(fraction: float, seed: int) -> Iterator[None]:
    """Within the block, about this part of the threads of all tests on this machine get no processor."""
    command = [sys.executable, "-m", "tests.starvation", str(fraction), str(seed)]
    environment = {**os.environ, MARKER: "none"}  # it ends after the look for what a run has left
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


class Starvation:
    """The threads that are starved now, and until when."""

    def __init__(self, fraction: float, seed: int) -> None:
        self._rate = fraction * INTERVAL_S / MEAN_S
        self._random = random.Random(seed)
        self._until: dict[int, float] = {}

    def step(self, now: float) -> None:
        for thread in _threads_of_tests():
            with suppress(OSError):  # it has ended
                if (until := self._until.get(thread)) is not None:
                    if until < now:
                        del self._until[thread]
                        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                elif os.sched_getscheduler(thread) == os.SCHED_IDLE:  # it was begun by one that was starved
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                elif self._random.random() < self._rate:
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                    self._until[thread] = now + self._random.choice(DURATIONS_S)

    def end(self) -> None:
        self._until.clear()
        self._rate = 0.0
        self.step(time.monotonic())


def _threads_of_tests() -> Iterator[int]:
    """Of every process with a run's marker, and of those that have none because they run the tests."""
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended, or is no process
            pid = int(process.name)
            above = set(ancestry(pid))
            if os.getpid() in above:
                continue
            if os.getppid() in above or f"{MARKER}=".encode() in (process / "environ").read_bytes():
                yield from (int(thread) for thread in os.listdir(process / "task"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Starve threads of tests until standard input ends.")
    parser.add_argument("fraction", type=float)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    starvation = Starvation(options.fraction, options.seed)
    busy = [
        subprocess.Popen(["nice", "-n", "8", sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
            starvation.step(time.monotonic())
    finally:
        for process in busy:
            process.kill()
            process.wait()
        starvation.end()


if __name__ == "__main__":
    main()
