"""Whether a Stop must abort the collectives of a device: not while they come to their end one after the other.

A thread that waits for the device (`.item()`) gets its KeyboardInterrupt when the device has done what was enqueued
before. That may be seconds of healthy work, and to abort a collective in it costs new communicators for all groups.

Does not depend on torch or on groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from meshbook.clock import monotonic
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.wire.stop_timing import ABORT_AFTER_S, DEVICE_STUCK_S, STUCK_AFTER_S

_POLL_S = 0.1


def wait_until_stuck(ring: CollectiveRing, is_over: Callable[[], bool]) -> bool:
    """Return True once the oldest collective under way has not ended for DEVICE_STUCK_S. Blocks, until STUCK_AFTER_S.

    Args:
        is_over: whether the answer does not matter any more, because the call has ended.

    Returns:
        False: the call has ended, or goes on without being stuck in a collective.
    """
    deadline = monotonic() + STUCK_AFTER_S - ABORT_AFTER_S
    pause, oldest, since = threading.Event(), 0, monotonic()
    while not is_over():
        running, now = ring.running(), monotonic()
        seq = running[0].seq if running else 0
        if seq != oldest:
            oldest, since = seq, now
        elif seq and now - since >= DEVICE_STUCK_S:
            return True
        if now > deadline:
            return False
        pause.wait(_POLL_S)
    return False
