"""How the code of one thread is ended from another: by a KeyboardInterrupt, and only while it is there to be ended."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from meshbook.actors.runtime import futures

_set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NO_EXCEPTION = ctypes.py_object()


class _PlaceholderException(BaseException):
    """In place of an exception that is not to come any more."""


def _cancel_async_exception(thread: int) -> None:
    """Let what was set for a thread, and has not come there yet, not come."""
    _set_async_exception(thread, _NO_EXCEPTION)
    # CPython 3.11 looks for it until some thread has had one, and a thread with a trace function, as debuggers set it,
    # would never get on from looking. So this thread has one.
    try:
        _set_async_exception(threading.get_ident(), _PlaceholderException)
        while True:
            pass
    except _PlaceholderException:
        pass


class Interruptible:
    """`with self.of(key):` user code runs on this thread; `interrupt(key)` on another raises KeyboardInterrupt in it.

    It comes at once where the code waits in a Future's `get()`, and else when the thread next runs Python: a
    `time.sleep` or a long call into C ends first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: Any = None
        self._thread = 0
        self._is_exception_set = False

    def section(self, key: Any) -> Interruptible:
        with self._lock:
            self._key, self._thread = key, threading.get_ident()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end_section()

    def end_section(self) -> None:
        """Nothing of the user's runs any more. Also for who was interrupted in the middle of this."""
        with self._lock:
            self._thread = 0
            if self._is_exception_set:  # perhaps not yet
                self._is_exception_set = False
                _cancel_async_exception(threading.get_ident())

    def interrupt(self, key: Any) -> None:
        with self._lock:
            thread = self._thread
            if not thread or self._key != key:
                return
            # In this order: a thread that does not wait yet meets the exception before it does.
            self._is_exception_set = True
            _set_async_exception(thread, KeyboardInterrupt)
            if futures.raise_in_waiter(thread, KeyboardInterrupt()):
                _cancel_async_exception(thread)
