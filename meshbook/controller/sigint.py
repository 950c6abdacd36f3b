"""SIGINT on the main thread of the process that the user works in: noted, and looked at where nothing is lost by it.

Python raises KeyboardInterrupt between any two lines. `SigintLatch` is for a wait, where a press is a Stop of what is
waited for; `defer_sigint` for lines that must be done whole, at whose end it is raised.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# The functions of C behind those of `signal`, which make an enum of what handled the signal: many times as slow.
try:
    from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
    from _signal import signal as _set_handler
except ImportError:  # another Python than CPython
    from signal import getsignal as _get_handler
    from signal import signal as _set_handler


class defer_sigint:
    """In this block, a SIGINT is noted, and does at its end what it would have done. Nests; a wait for ranks inside
    (`SigintLatch`) hears of presses all the same. On other threads, and where SIGINT is ignored, nothing is changed.

    Takes 1 us. Lines inside must not wait for anything else.

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
        """What a SIGINT would do without this block."""
        return _unwrap_handler(self._previous_handler)


_MAIN_THREAD_ID = threading.main_thread().ident


def _unwrap_handler(handler: Any) -> Any:
    owner = getattr(handler, "__self__", None)
    return owner.original_handler if isinstance(owner, (defer_sigint, SigintLatch)) else handler


class SigintLatch:
    """In this block, a SIGINT that would raise KeyboardInterrupt on the main thread is noted instead.

    A second one raises, as before the block, while the first has not been looked at: what the main thread is at does
    not end. On other threads, and where SIGINT is ignored, nothing is changed.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        """
        Args:
            wake: called from the signal handler; must not block.
        """
        self._wake = wake
        self._pending = False
        self._previous_handler: Any = None  # what handled SIGINT
        self.original_handler: Any = None  # ... without blocks like this one around it

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
        """Whether a SIGINT has come since this was last asked."""
        pending, self._pending = self._pending, False
        return pending

    @contextlib.contextmanager
    def handler_restored(self) -> Iterator[None]:
        """In here, SIGINT raises as it did before: for what nothing else can end, such as a question to the user."""
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
