"""gloo's `monitored_barrier`, whose timeout does not count the time of open prompts.

gloo takes a timeout when the barrier begins. So the first member, which names those that are missing, waits for all in
the store before it begins gloo's; the others have gloo wait for it, and `timeouts` ends that.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from meshbook.rank.process_groups.backends import A_YEAR
from meshbook.rank.process_groups.group_health import GroupHealth
from meshbook.rank.process_groups.ring import Collective

# Seconds between looks into the store. A wait there could not be ended by an abort of the groups.
_POLL_S = 0.05
# For gloo to find out who is missing: those that are not have come to it.
_NAMING = timedelta(seconds=1)


def run_barrier(
    health: GroupHealth, record: Collective, store: Store, inner: Any, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Run the barrier. Blocks.

    Args:
        inner: the real group.

    Raises:
        RuntimeError: members have not come in time; the first member names them.
    """
    keys = [f"monitored_barrier/{record.group_seq}/{rank}" for rank in range(inner.size())]
    store.set(keys[inner.rank()], "")
    if inner.rank() != 0:
        record.timeout_s = timeout.total_seconds()
        inner.monitored_barrier(A_YEAR, wait_all_ranks)
        return
    have_come = _wait_for_all(health, store, keys, timeout)
    health.raise_if_aborted(record)
    inner.monitored_barrier(timeout if have_come else _NAMING, wait_all_ranks)


def _wait_for_all(health: GroupHealth, store: Store, keys: list[str], timeout: timedelta) -> bool:
    """Wait until all keys are set; return whether they are, in time, and the groups were not aborted meanwhile."""
    deadline, pause = health.clock() + timeout.total_seconds(), threading.Event()
    while not store.check(keys):
        if health.failure is not None or health.clock() >= deadline:
            return False
        pause.wait(_POLL_S)
    return True
