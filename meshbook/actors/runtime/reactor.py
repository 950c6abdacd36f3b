"""The reader thread of a process: waits for its sockets, and runs timers and callbacks of other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import selectors
import signal
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable

from meshbook.actors.runtime.futures import NON_BLOCKING_THREADS
from meshbook.clock import monotonic

log = logging.getLogger("meshbook.actors")

OnReady = Callable[[int], None]  # gets `selectors.EVENT_READ` and `EVENT_WRITE`


class Reactor:
    """Runs callbacks on one thread: for ready sockets, after a delay, or soon. They must not block."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_woken)
        self._writers: deque[sockets.socket] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()  # equal times: in order
        self._callbacks: deque[Callable[[], None]] = deque()
        self._is_wake_pending = False  # the thread is going to run `_callbacks`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="meshbook-post", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return self._thread.ident or 0

    def register(self, socket: sockets.socket, on_ready: OnReady) -> None:
        """Call `on_ready` when the socket can be read. Any thread."""
        self._selector.register(socket, selectors.EVENT_READ, on_ready)

    def unregister(self, socket: sockets.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(socket)

    def watch_writable(self, socket: sockets.socket) -> None:
        """Call its `on_ready` also when the socket can be written, until `unwatch_writable`. Any thread."""
        self._writers.append(socket)
        self._wake()

    def unwatch_writable(self, socket: sockets.socket) -> None:
        """Reader thread only."""
        self._set_events(socket, selectors.EVENT_READ)

    def _set_events(self, socket: sockets.socket, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # closed
            self._selector.modify(socket, events, self._selector.get_key(socket).data)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` on the reader thread after `delay_s`."""
        heapq.heappush(self._timers, (monotonic() + delay_s, next(self._timer_numbers), callback))
        self._wake()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the reader thread, in the order of these calls."""
        self._callbacks.append(callback)
        if not self._is_wake_pending:
            self._is_wake_pending = True
            self._wake()
        if self._closed:  # the reader thread has ended
            self._run_callbacks()

    def _wake(self) -> None:
        try:  # noqa: SIM105  (each message to this process itself comes here)
            os.write(self._wake_write, b"x")
        except OSError:
            pass

    def _on_woken(self, events: int) -> None:
        os.read(self._wake_read, 4096)
        while self._writers:
            self._set_events(self._writers.popleft(), selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        NON_BLOCKING_THREADS[threading.get_ident()] = (
            "this thread hears the answers of actors and cannot wait for one; use a callback"
        )
        while not self._closed:
            wait_s = max(0.0, self._timers[0][0] - monotonic()) if self._timers else None
            for key, events in self._selector.select(wait_s):
                try:
                    key.data(events)
                except BaseException:  # includes SystemExit from a user's callback
                    log.exception("a message between actors could not be handled; listening goes on")
            self._run_callbacks()
            while self._timers and self._timers[0][0] <= monotonic():
                _call_logging_errors(heapq.heappop(self._timers)[2])

    def _run_callbacks(self) -> None:
        self._is_wake_pending = False  # first: callbacks added from now on wake the thread again
        for _ in range(len(self._callbacks)):
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # after `stop`, several threads run this concurrently
                return
            _call_logging_errors(callback)

    def stop(self) -> None:
        """End the reader thread. From now on `call_soon` runs callbacks at once."""
        self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        NON_BLOCKING_THREADS.pop(self.thread_id, None)

    def close(self) -> None:
        """Run the remaining callbacks, after `stop`."""
        self._run_callbacks()
        self._selector.close()

    def drop_inherited(self) -> None:
        """In a forked child, which has no reader thread: close the wake-up pipe."""
        self._closed = True
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)


def _call_logging_errors(callback: Callable[[], None]) -> None:
    """Run a callback and log its errors, so that the reader thread continues."""
    try:
        callback()
    except BaseException:
        log.exception("a callback between actors failed; listening goes on")
