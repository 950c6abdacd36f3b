"""How the code of one thread is ended from another: by a KeyboardInterrupt, and only while it is there to be ended."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from meshbook.actors.runtime import futures

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING = ctypes.py_object()


class _TakenBack(BaseException):
    """In place of an exception that is not to come any more."""


def _take_back(thread: int) -> None:
    """Let what was set for a thread, and has not come there yet, not come."""
    _set_exception(thread, _NOTHING)
    # CPython 3.11 looks for it until some thread has had one, and a thread with a trace function, as debuggers set it,
    # would never get on from looking. So this thread has one.
    try:
        _set_exception(threading.get_ident(), _TakenBack)
        while True:
            pass
    except _TakenBack:
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
        self._struck = False

    def of(self, key: Any) -> Interruptible:
        with self._lock:
            self._key, self._thread = key, threading.get_ident()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing of the user's runs any more. Also for who was interrupted in the middle of this."""
        with self._lock:
            self._thread = 0
            if self._struck:  # perhaps not yet
                self._struck = False
                _take_back(threading.get_ident())

    def interrupt(self, key: Any) -> None:
        with self._lock:
            thread = self._thread
            if not thread or self._key != key:
                return
            # In this order: a thread that does not wait yet meets the exception before it does.
            self._struck = True
            _set_exception(thread, KeyboardInterrupt)
            if futures.stop_waiting(thread, KeyboardInterrupt()):
                _take_back(thread)
