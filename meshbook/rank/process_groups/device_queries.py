"""Queries of a device's driver, run such that they freeze neither their caller nor the process.

A query takes the driver's lock, which another thread may hold for as long as the device is stuck (`cudaMalloc` behind
a collective that hangs); and torch's functions keep the GIL meanwhile. So queries run on a thread of their own, after a
first one that keeps no GIL has been answered, and their caller waits for a moment at most.

Does not depend on torch: `cuda` says how CUDA is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# Seconds that a caller waits for the answers. A query takes microseconds, unless the driver's lock is held.
_TIMEOUT_S = 0.1


class DeviceQueries:
    """Runs queries on a thread of its own.

    Args:
        prepare: run once on that thread, before anything else.
        wait_for_driver: returns when the driver has answered. Releases the GIL while it waits.
    """

    def __init__(self, prepare: Callable[[], None], wait_for_driver: Callable[[], None]) -> None:
        self._prepare, self._wait_for_driver = prepare, wait_for_driver
        self._lock = threading.Lock()  # held by a caller while it waits
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answered.set()
        self._queries: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def run(self, queries: Callable[[], None]) -> None:
        """Run `queries`; return when that is done, or when the driver does not answer. Any thread."""
        with self._lock:
            if not self._answered.wait(_TIMEOUT_S):
                return  # the driver has not answered the last time yet
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="meshbook-device", daemon=True)
                self._thread.start()
            self._queries = queries
            self._answered.clear()
            self._asked.set()
            self._answered.wait(_TIMEOUT_S)

    def _serve(self) -> None:
        self._prepare()
        while True:
            self._asked.wait()
            self._asked.clear()
            try:
                self._wait_for_driver()
                self._queries()
            finally:
                self._queries = lambda: None  # it refers to collectives
                self._answered.set()
