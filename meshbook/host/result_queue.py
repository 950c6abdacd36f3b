"""Passes what threads find to the loop of the host that has started them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from meshbook.wire.loop import Loop


class ResultQueue:
    """Passes results of threads to the loop, in the order of their arrival."""

    def __init__(self, loop: Loop, on_result: Callable[[tuple[str, int, Any]], None]) -> None:
        self._loop, self._on_result = loop, on_result
        self._queue: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._open = True
        loop.watch_fd(self._readable, self._drain, logged=True)

    def put(self, result: tuple[str, int, Any]) -> None:
        """Add a result. Any thread."""
        self._queue.put(result)
        with self._lock, contextlib.suppress(BlockingIOError):  # full: the loop already has enough wake-ups
            if self._open:
                os.write(self._writable, b"x")

    def _drain(self) -> None:
        for result in self._loop.observe(self._take):
            self._on_result(result)

    def _take(self) -> list[tuple[str, int, Any]]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        results = []
        with contextlib.suppress(queue.Empty):
            while True:
                results.append(self._queue.get_nowait())
        return results

    def take_over(self) -> None:
        """Begin anew in a forked process: a thread of the other may have held the lock."""
        self._queue, self._lock = queue.SimpleQueue(), threading.Lock()

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._loop.unwatch(self._readable)
                os.close(self._readable)
                os.close(self._writable)
