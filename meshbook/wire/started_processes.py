"""The processes that a call has started, a cell or an actor's endpoint: a Stop reaches them too, as Ctrl-C does.

Otherwise a call that waits for one would not end (`os.system` ignores SIGINT), or would leave it behind. What a process
pool, a DataLoader or torch.compile has started is theirs: it outlives a Stop, and its owner ends it. So does what has a
process group of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Hashable, Iterable
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Any

from meshbook.clock import monotonic
from meshbook.wire.processes import children_of, identify
from meshbook.wire.stop_timing import SIGINT_DEBOUNCE_S, STUCK_AFTER_S

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StartedProcesses:
    """The processes that the running call has started."""

    def __init__(self) -> None:
        # The running call, its beginning in ticks since boot, as a process's start is counted, and its thread.
        self._call: tuple[Hashable, int, int | None] = ("", 0, None)
        self._interrupted: dict[int, float] = {}  # pid -> when it was sent SIGINT

    def begin_call(self, call_id: Hashable, *, thread: int | None = None) -> None:
        """Record that a call begins.

        Args:
            thread: native id of the thread whose children are the call's; None: those of all threads.
        """
        self._interrupted.clear()
        self._call = (call_id, int(clock_gettime(CLOCK_BOOTTIME) * _TICKS_PER_S), thread)

    def interrupt(self, call_id: Hashable, *, hard: bool) -> None:
        """Send those of this call SIGINT, or SIGTERM where SIGINT is blocked. Any thread.

        Args:
            hard: send SIGKILL to those that have been sent one. So are those sent one so long ago that a Stop would be
                a second one, as for endpoints, whose interrupts do not say which they are.
        """
        running, begun_ticks, thread = self._call
        if running != call_id:
            return
        now = monotonic()
        children = children_of(os.getpid(), thread)
        for pid in _find_started(children, begun_ticks, os.getpgrp(), _pids_with_owners()):
            sent_at = self._interrupted.setdefault(pid, now)
            is_new = sent_at == now
            kill = hard or now - sent_at > STUCK_AFTER_S
            if not (kill or is_new) and now - sent_at < SIGINT_DEBOUNCE_S:
                continue  # of the same Stop
            with contextlib.suppress(ProcessLookupError, PermissionError):
                soft = signal.SIGTERM if _blocks_sigint(pid) else signal.SIGINT
                os.kill(pid, signal.SIGKILL if kill and not is_new else soft)


def _blocks_sigint(pid: int) -> bool:
    """Whether a process blocks SIGINT, as one that an actor's thread has started does: it has the thread's mask."""
    with contextlib.suppress(OSError):
        blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return blocked is not None and bool(int(blocked[1], 16) >> (signal.SIGINT - 1) & 1)
    return False


def _find_started(children: Iterable[int], since_ticks: int, group: int, excluded: set[int]) -> list[int]:
    """Return these and their descendants that have started since then and are of a group, but for those of others.

    Args:
        group: the process group.
        excluded: processes that are left out, with all below them.
    """
    found = []
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            if child not in excluded and os.getpgid(child) == group and identify(child).started_ticks >= since_ticks:
                found += [child, *_find_started(children_of(child), since_ticks, group, excluded)]
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
