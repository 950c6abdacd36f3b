"""Processes that stand still, or get no processor, while a test looks at what others make of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.budget import when


def stop(*pids: int) -> None:
    """Stop processes, and wait until each of their threads stands still: one that is late goes on for a moment."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    when(lambda: all(map(_stands_still, pids)))


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Within the block these processes stand still."""
    try:
        stop(*pids)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def starved(*pids: int) -> Iterator[None]:
    """Within the block these processes get a twentieth of one core, whose remainder goes to one that has precedence.

    This thread has the other cores.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is no other core to look from")
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(rival.pid, {min(cores)})
        os.sched_setaffinity(0, cores - {min(cores)})
        try:
            os.sched_setscheduler(rival.pid, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            pytest.skip("a process with precedence takes CAP_SYS_NICE")
        _schedule(pids, {min(cores)}, os.SCHED_IDLE)
        yield
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)
        _schedule(pids, cores, os.SCHED_OTHER)


def _schedule(pids: tuple[int, ...], cores: set[int], policy: int) -> None:
    for pid in pids:
        for task in Path("/proc").glob(f"{pid}/task/*"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def _stands_still(pid: int) -> bool:
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)
