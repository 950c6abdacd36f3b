"""Interrupt the code of one thread from another, by a KeyboardInterrupt that is raised only inside a marked section."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

from meshbook.actors.runtime import futures
from meshbook.wire.interrupt_points import PostponedInterrupt
from meshbook.wire.started_processes import StartedProcesses

_set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NO_EXCEPTION = ctypes.py_object()


INTERRUPTED_BEFORE_START = "it was interrupted before it began"
# Seconds until an interrupt is tried again that found its thread where it cannot be interrupted.
_RETRY_S: Final = 0.005


class _PlaceholderException(BaseException):
    """Replaces an exception that must no longer be raised."""


def _cancel_async_exception(thread: int) -> None:
    """Cancel an exception that was set for a thread and has not been raised yet."""
    _set_async_exception(thread, _NO_EXCEPTION)
    # CPython 3.11 checks for async exceptions until some thread has raised one, and a thread with a trace function,
    # such as a debugger's, would never leave that check. So this thread raises one.
    try:
        _set_async_exception(threading.get_ident(), _PlaceholderException)
        while True:
            pass
    except _PlaceholderException:
        pass


class Interruptible:
    """Marks user code as interruptible: `with self.section(key):` on its thread, `interrupt(key)` on another.

    `interrupt` raises a KeyboardInterrupt in the section: at once if the code waits in a Future's `get()`, otherwise
    when the thread next runs Python: a `time.sleep` or a long C call finishes first. Not inside the functions that must
    complete (`wire/interrupt_points`): then it is tried again. Processes that the section has started get a signal.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        """call_later: calls a function after so many seconds, on any thread."""
        self._call_later = call_later
        self._lock = threading.Lock()
        self.marked: set[Any] = set()  # keys whose code is to be interrupted, also if it has not begun
        self._key: Any = None
        self._thread = 0
        self._is_exception_set = False
        self._postponed: PostponedInterrupt | None = None  # of this section
        self._started = StartedProcesses()

    def check(self, key: Any) -> None:
        """Raise KeyboardInterrupt if `key` was marked before it began."""
        if key in self.marked:
            raise KeyboardInterrupt(INTERRUPTED_BEFORE_START)

    def section(self, key: Any) -> Interruptible:
        with self._lock:
            self._key, self._thread, self._postponed = key, threading.get_ident(), None
            self._started.begin_call(key, thread=threading.get_native_id())
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end_section()

    def end_section(self) -> None:
        """End the section and cancel a pending exception. Call it again if an exception interrupted it."""
        with self._lock:
            self._thread = 0
            if self._is_exception_set:  # set, but possibly not raised yet
                self._is_exception_set = False
                _cancel_async_exception(threading.get_ident())

    def raise_postponed(self) -> None:
        """Raise an interrupt that is still to be tried again. Call it after user code, in the section or just after it.

        Raises:
            KeyboardInterrupt: there is one.
        """
        if self._postponed is not None and self._postponed.is_pending:
            self._postponed = None
            raise KeyboardInterrupt

    def interrupt(self, key: Any) -> None:
        """Interrupt the section of this key, if the thread is in it. Does not wait."""
        self._interrupt(key, PostponedInterrupt(ends_calls=False))
        # After that, so that the exception is there when the wait for them ends.
        with self._lock:
            if self._thread and self._key == key:
                self._started.interrupt(key, hard=False)

    def _interrupt(self, key: Any, postponed: PostponedInterrupt) -> None:
        with self._lock:
            thread = self._thread
            if not thread or self._key != key:
                return
            self._postponed = postponed
            if postponed.try_again(sys._current_frames().get(thread)):
                self._call_later(_RETRY_S, lambda: self._interrupt(key, postponed))
                return
            # In this order: a thread that is not waiting yet gets the exception before it starts to wait.
            self._is_exception_set = True
            _set_async_exception(thread, KeyboardInterrupt)
            if futures.raise_in_waiter(thread, KeyboardInterrupt()):
                _cancel_async_exception(thread)

    @types.coroutine
    def await_in_sections(self, key: Any, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Await `work` so that each of its steps is a section."""
        step, sent_value = work.send, None
        while True:
            try:
                with self.section(key):
                    awaited = step(sent_value)
            except StopIteration as end:
                return end.value
            step = work.send
            try:
                sent_value = yield awaited
            except BaseException as error:
                step, sent_value = work.throw, error
