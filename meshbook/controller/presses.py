"""SIGINT while a call is waited for: noted, and looked at between two reports, so that none is lost in its middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


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
        self._before: Any = None

    def __enter__(self) -> Presses:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
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
        signal.signal(signal.SIGINT, self._before)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, number: int, frame: Any) -> None:
        try:
            self._before(number, frame)
        except KeyboardInterrupt:
            if self._noted:
                raise
            self._noted = True
            self._wake()
