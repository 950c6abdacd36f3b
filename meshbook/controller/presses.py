"""SIGINT on the main thread of the process that the user works in: noted, and looked at where nothing is lost by it.

Python raises KeyboardInterrupt between any two lines. `Presses` is for a wait, where a press is a Stop of what is
waited for; `uninterrupted` for lines that must be done whole, at whose end it is raised.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# The functions of C behind those of `signal`, which make an enum of what handled the signal: many times as slow.
try:
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
    from _signal import signal as _set_handler
except ImportError:  # another Python than CPython
    from signal import getsignal as _handler_of
    from signal import signal as _set_handler


class uninterrupted:
    """In this block, a SIGINT is noted, and does at its end what it would have done. Nests; a wait for ranks inside
    (`Presses`) hears of presses all the same. On other threads, and where SIGINT is ignored, nothing is changed.

    Takes 1 us. Lines inside must not wait for anything else.

    Raises:
        KeyboardInterrupt: at the end.
    """

    __slots__ = ("_before", "_noted")

    def __init__(self) -> None:
        self._noted = False
        self._before: Any = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            now = _handler_of(signal.SIGINT)
            if callable(now) and not isinstance(getattr(now, "__self__", None), uninterrupted):
                self._before = now
                _set_handler(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _set_handler(signal.SIGINT, self._before)
            if self._noted:
                self._before(signal.SIGINT, None)

    def _note(self, number: int, frame: Any) -> None:
        self._noted = True

    @property
    def does(self) -> Any:
        """What a SIGINT would do without this block."""
        return _without_blocks(self._before)


_MAIN = threading.main_thread().ident


def _without_blocks(handler: Any) -> Any:
    owner = getattr(handler, "__self__", None)
    return owner.does if isinstance(owner, (uninterrupted, Presses)) else handler


class Presses:
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
        self._noted = False
        self._before: Any = None  # what handled SIGINT
        self.does: Any = None  # ... without blocks like this one around it

    def __enter__(self) -> Presses:
        now = signal.getsignal(signal.SIGINT)
        if threading.get_ident() == _MAIN and callable(now):
            self.does = _without_blocks(now)
            self._before = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def take(self) -> bool:
        """Whether a SIGINT has come since this was last asked."""
        noted, self._noted = self._noted, False
        return noted

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """In here, SIGINT raises as it did before: for what nothing else can end, such as a question to the user."""
        if self._before is None:
            yield
            return
        signal.signal(signal.SIGINT, self.does)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, number: int, frame: Any) -> None:
        try:
            self.does(number, frame)
        except KeyboardInterrupt:
            if self._noted:
                raise
            self._noted = True
            self._wake()
