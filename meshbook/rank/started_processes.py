"""The processes that a call has started: a Stop reaches them too, as Ctrl-C in a terminal does.

Otherwise a call that waits for one would not end (`os.system` ignores SIGINT), or would leave it behind. What a process
pool, a DataLoader or torch.compile has started is theirs: it outlives a Stop, and its owner ends it. So does what has a
process group of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Any

from meshbook.clock import monotonic
from meshbook.wire.processes import children_of, identify
from meshbook.wire.stop_timing import SIGINT_DEBOUNCE_S

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StartedProcesses:
    """The processes that the running call has started."""

    def __init__(self) -> None:
        self._call = ("", 0)  # the running call, and its beginning in ticks since boot, as a process's start is counted
        self._interrupted: dict[int, float] = {}  # pid -> when it was sent SIGINT

    def begin_call(self, call_id: str) -> None:
        """Record that a call begins."""
        self._interrupted.clear()
        self._call = (call_id, int(clock_gettime(CLOCK_BOOTTIME) * _TICKS_PER_S))

    def interrupt(self, call_id: str, *, hard: bool) -> None:
        """Send those of this call SIGINT; with `hard`, SIGKILL to those that have been sent one. Any thread."""
        running, begun_ticks = self._call
        if running != call_id:
            return
        now = monotonic()
        for pid in _find_started(os.getpid(), begun_ticks, os.getpgrp(), _pids_with_owners()):
            sent_at = self._interrupted.setdefault(pid, now)
            is_new = sent_at == now
            if not (hard or is_new) and now - sent_at < SIGINT_DEBOUNCE_S:
                continue  # of the same Stop
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if hard and not is_new else signal.SIGINT)


def _find_started(pid: int, since_ticks: int, group: int, excluded: set[int]) -> list[int]:
    """Return the descendants of a process that have started since then and are of its group, but for those of others.

    Args:
        group: the process group.
        excluded: processes that are left out, with all below them.
    """
    found = []
    for child in children_of(pid):
        with contextlib.suppress(ProcessLookupError):
            if child not in excluded and os.getpgid(child) == group and identify(child).started_ticks >= since_ticks:
                found += [child, *_find_started(child, since_ticks, group, excluded)]
    return found


def _pids_with_owners() -> set[int]:
    """Return the pids of processes that a pool or a DataLoader ends."""
    pids: set[int] = set()
    for name in ("multiprocessing.process", "multiprocess.process"):
        children: Any = getattr(sys.modules.get(name), "_children", ())
        pids.update(child.pid for child in list(children) if child.daemon and child.pid)
    threads: Any = getattr(sys.modules.get("concurrent.futures.process"), "_threads_wakeups", ())
    for thread in list(threads):  # of ProcessPoolExecutor, whose workers are no daemons
        pids.update(list(getattr(thread, "processes", None) or ()))
    for pool in list(getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ())):
        pids.update([process.pid] if (process := getattr(pool, "process", None)) is not None else [])
    return pids
