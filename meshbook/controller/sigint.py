"""Deferred SIGINT handling on the main thread of the user's process.

Python raises KeyboardInterrupt between any two lines. `SigintLatch` is for a wait, where a SIGINT interrupts what is
waited for; `defer_sigint` is for lines that must complete, and raises at their end.
"""

from __future__ import annotations

import contextlib
import signal
import threading

# The C functions behind `signal`'s, whose conversion of handlers to an enum is many times slower.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable, Iterator
from typing import Any


class defer_sigint:
    """Defer a SIGINT to the end of this block. Nests.

    A wait for ranks inside (`SigintLatch`) still receives SIGINT. On other threads, and if SIGINT is ignored, nothing
    changes. Takes 1 us. Lines inside must not wait for anything else.

    Raises:
        KeyboardInterrupt: at the end.
    """

    __slots__ = ("_pending", "_previous_handler")

    def __init__(self) -> None:
        self._pending = False
        self._previous_handler: Any = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN_THREAD_ID:
            handler = _get_handler(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), defer_sigint):
                self._previous_handler = handler
                _set_handler(signal.SIGINT, self._on_sigint)

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            _set_handler(signal.SIGINT, self._previous_handler)
            if self._pending:
                self._previous_handler(signal.SIGINT, None)

    def _on_sigint(self, number: int, frame: Any) -> None:
        self._pending = True

    @property
    def original_handler(self) -> Any:
        """The SIGINT handler outside this block."""
        return _unwrap_handler(self._previous_handler)


_MAIN_THREAD_ID = threading.main_thread().ident


def _unwrap_handler(handler: Any) -> Any:
    owner = getattr(handler, "__self__", None)
    return owner.original_handler if isinstance(owner, (defer_sigint, SigintLatch)) else handler


class SigintLatch:
    """In this block, record a SIGINT that would raise KeyboardInterrupt on the main thread, instead of raising.

    A second one raises, as outside the block, if the first has not been popped: the main thread's current operation
    does not end. On other threads, and if SIGINT is ignored, nothing changes.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        """Create the latch.

        Args:
            wake: called from the signal handler; must not block.
        """
        self._wake = wake
        self._pending = False
        self._previous_handler: Any = None  # the handler outside this block
        self.original_handler: Any = None  # the handler outside all such blocks

    def __enter__(self) -> SigintLatch:
        handler = signal.getsignal(signal.SIGINT)
        if threading.get_ident() == _MAIN_THREAD_ID and callable(handler):
            self.original_handler = _unwrap_handler(handler)
            self._previous_handler = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)

    def pop(self) -> bool:
        """Return whether a SIGINT arrived since the last call, and clear it."""
        pending, self._pending = self._pending, False
        return pending

    @contextlib.contextmanager
    def handler_restored(self) -> Iterator[None]:
        """Let SIGINT raise in this block, as outside: for operations that nothing else can end, such as a prompt."""
        if self._previous_handler is None:
            yield
            return
        signal.signal(signal.SIGINT, self.original_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, number: int, frame: Any) -> None:
        try:
            self.original_handler(number, frame)
        except KeyboardInterrupt:
            if self._pending:
                raise
            self._pending = True
            self._wake()
