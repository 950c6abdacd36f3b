"""For how long the threads of a process waited for a processor: from outside, one without looks like one that hangs.

Linux counts that for each thread (`/proc/<pid>/task/<tid>/schedstat`), time without a share of a cgroup's quota
included, but adds a wait only when it is over. So one that lasts is seen by two looks: the thread could run at both,
and did not run in between. Where the system does not count it, nothing is known, and nothing is said.

Pure; `procfs` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# A thread that keeps the GIL and has run for this many seconds computes; Python code lets others have the GIL after
# 0.005 s of running.
_COMPUTES_S = 0.02


class ThreadTimes(NamedTuple):
    """One thread's counters since its start."""

    is_runnable: bool  # it runs or waits for a processor (R)
    ticks: int  # of processor time: exact where `ran_ns` is added up at ticks only
    ran_ns: int
    waited_ns: int  # for a processor, in waits that are over
    num_slices: int  # how often it got a processor


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The counters of a process's threads at one moment."""

    at: float
    threads: dict[int, ThreadTimes]


def starved_s(looks: Sequence[RunTimes], gil_holder: int | None = None) -> float:
    """Return for how many seconds between these looks some thread waited for a processor.

    Args:
        looks: at one process, in their order.
        gil_holder: the thread that keeps the GIL. Its own waits do not count if it computes all the same.
    """
    if len(looks) < 2:
        return 0.0
    return max((_waited_s(looks, thread, thread == gil_holder) for thread in looks[-1].threads), default=0.0)


def _waited_s(looks: Sequence[RunTimes], thread: int, is_holder: bool) -> float:
    waited_s = ran_s = 0.0
    for first, second in pairwise(looks):
        before, now = first.threads.get(thread), second.threads.get(thread)
        if before is None or now is None:
            continue
        ran_s += (now.ran_ns - before.ran_ns) * 1e-9
        has_not_run = (before.ticks, before.ran_ns, before.num_slices) == (now.ticks, now.ran_ns, now.num_slices)
        if before.is_runnable and now.is_runnable and has_not_run:
            waited_s += second.at - first.at
        else:  # a wait that is over may have begun before the first look
            waited_s += min(second.at - first.at, (now.waited_ns - before.waited_ns) * 1e-9)
    return 0.0 if is_holder and ran_s >= _COMPUTES_S else waited_s
