"""The asyncio event loop of a rank's cells: one for all of them, so that tasks live on from cell to cell."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any


class CellEventLoop:
    """Runs the coroutines of cells on the main thread.

    Attributes:
        awaited_coroutine: the coroutine that the loop runs; None when it runs none.
    """

    def __init__(self) -> None:
        self.awaited_coroutine: Coroutine[Any, Any, Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def exists(self) -> bool:
        """Whether the event loop has been created: the first coroutine does that."""
        return self._loop is not None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine until it is done.

        A SIGINT ends it at once: the awaited operation is cancelled, and its `finally:` blocks run.
        """
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        loop = self._loop
        task = loop.create_task(coroutine)
        outer_coroutine, self.awaited_coroutine = self.awaited_coroutine, coroutine
        try:
            with _wake_on_signals(loop):
                return _run_until_done(loop, task)
        except KeyboardInterrupt:
            if task.done():  # it was computing, and raised the exception itself
                if not task.cancelled():
                    task.exception()  # retrieved, so that asyncio does not report it as never retrieved
                raise
            task.cancel()
            where: TracebackType | None = None
            try:
                _run_until_done(loop, task)
            except asyncio.CancelledError as cancelled:
                where = cancelled.__traceback__  # contains the line that awaited
            raise KeyboardInterrupt().with_traceback(where) from None
        finally:
            self.awaited_coroutine = outer_coroutine

    @property
    def has_work(self) -> bool:
        """Whether cells have left tasks or callbacks behind."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        has_callbacks = any(getattr(loop, name, None) for name in ("_scheduled", "_ready"))
        return has_callbacks or bool(asyncio.all_tasks(loop))

    def run_until_readable(self, fd: int, is_readable: Callable[[], bool]) -> None:
        """Run what cells have left behind.

        Args:
            fd: readable when `is_readable` may have changed.
        """
        assert self._loop is not None
        loop, stop = self._loop, _StopLoop(self._loop)

        def look() -> None:
            if is_readable():
                stop()

        loop.add_reader(fd, look)
        try:
            loop.call_soon(look)
            with _wake_on_signals(loop):
                loop.run_forever()
        finally:
            stop.is_current = False
            loop.remove_reader(fd)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
            asyncio.set_event_loop(None)


class _StopLoop:
    """Stops an event loop, but for a later run of it: an interrupt may leave its callback in the loop's queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.is_current = loop, True

    def __call__(self, *_: object) -> None:
        if self.is_current:
            self._loop.stop()


def _run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Any:
    """Run an event loop until a task is done, and return its result."""
    stop = _StopLoop(loop)
    task.add_done_callback(stop)
    try:
        while not task.done():
            loop.run_forever()
    finally:
        stop.is_current = False
        task.remove_done_callback(stop)
    return task.result()


@contextlib.contextmanager
def _wake_on_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Have a signal that arrives just before the loop sleeps wake it, instead of waiting for its next timer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    readable, writable = socket.socketpair()
    with readable, writable:
        readable.setblocking(False)
        writable.setblocking(False)
        before = -1
        try:  # a SIGINT may arrive at any of these lines
            before = signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
            loop.add_reader(readable, readable.recv, 4096)
            yield
        finally:
            try:
                loop.remove_reader(readable)
            finally:
                signal.set_wakeup_fd(before)
