"""SIGINT on a rank: KeyboardInterrupt in user code, and nowhere else.

A rank inherits "ignore SIGINT" from the processes that started it, and a KeyboardInterrupt between two lines of
Meshbook's own would leave it in pieces. So a handler of our own is always there, and raises only while it is armed.
A SIGINT does not say what it is to stop, though, and one that comes before the work begins is lost; so a Stop is also
told by the name of the call it means (`stop`). Knows nothing of cells or messages.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from meshbook.clock import monotonic
from meshbook.wire.stop import SAME_STOP_S

# What wakes the main thread when it was told by name: nobody else's, so that it is never taken for a SIGINT. None where
# the system has no such signals; a main thread that has begun its work is then stopped by SIGINT alone.
_TOLD_BY_NAME: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None


class InterruptGate:
    """Decides what a SIGINT does.

    Inside `begin` .. `end` (one call on the main thread) but not armed, a SIGINT is kept and raised at the next `arm`:
    Stop pressed while the cell is still being compiled is not lost. Outside it is counted and forgotten, because what
    it was meant for is over.

    Attributes:
        name: of the call on the main thread, as `stop` names it; None between calls.
        raised: how many SIGINTs became a KeyboardInterrupt.
        missed: how many came when there was nothing to interrupt, or told the same Stop twice.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raised = 0
        self.missed = 0
        self._armed = False
        self._pending = False
        self._depth = 0
        self._raised_at = float("-inf")
        self._stop: str | None = None  # the call that `stop` was told last
        self._stopped: str | None = None  # the call in which a KeyboardInterrupt was raised last
        self._previous: Any = None
        self._previous_by_name: Any = None
        self._installed = False

    def install(self) -> None:
        """Handle SIGINT from here on. Main thread only."""
        self._previous = signal.signal(signal.SIGINT, self._on_sigint)
        if _TOLD_BY_NAME is not None:
            self._previous_by_name = signal.signal(_TOLD_BY_NAME, self._on_told)
        self._installed = True

    def uninstall(self) -> None:
        """Put back what handled SIGINT before."""
        signal.signal(signal.SIGINT, self._previous)
        if _TOLD_BY_NAME is not None:
            signal.signal(_TOLD_BY_NAME, self._previous_by_name)
        self._installed = False

    @property
    def armed(self) -> bool:
        """Whether a SIGINT would raise now."""
        return self._armed

    def begin(self) -> None:
        """A call begins on the main thread. Nests. A Stop that ended the call before it says nothing about this one."""
        if not self._depth:
            self._raised_at = float("-inf")
            if self._installed:
                # User code left its own handlers there, and a rank that cannot be stopped is worse.
                if signal.getsignal(signal.SIGINT) != self._on_sigint:
                    signal.signal(signal.SIGINT, self._on_sigint)
                if not self._hears_its_name():
                    signal.signal(_TOLD_BY_NAME, self._on_told)  # type: ignore[arg-type]
        self._depth += 1

    def end(self) -> None:
        """It is over; a SIGINT that it did not get to see is forgotten."""
        self._armed = False
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            if self._pending:
                self._pending = False
                self.missed += 1

    def rest(self) -> None:
        """No call is under way any more, however the last one ended."""
        self._armed = False
        self.name = None
        if self._depth:
            self._depth = 1
            self.end()

    def stop(self, name: str) -> None:
        """End the call of this name, whether it has begun or not, and no other. From any thread.

        A call that a SIGINT has ended already, or that caught its KeyboardInterrupt and goes on, is not ended again.
        """
        self._stop = name
        if self._installed and _TOLD_BY_NAME is not None and self.name == name and self._hears_its_name():
            signal.pthread_kill(threading.main_thread().ident or 0, _TOLD_BY_NAME)

    def _hears_its_name(self) -> bool:
        """Whether the signal's handler is ours, or there is none: the default one would end the process."""
        return _TOLD_BY_NAME is None or signal.getsignal(_TOLD_BY_NAME) == self._on_told

    def arm(self) -> None:
        """User code follows.

        Raises:
            KeyboardInterrupt: a SIGINT came since `begin`, or this call was told to stop.
        """
        self._armed = True
        if self._pending or self._is_to_stop():
            self._pending = False
            self._raise()

    def disarm(self) -> None:
        """User code is over. Call it in a `finally:`, and once more where its exception is caught: a SIGINT may come
        between the two."""
        self._armed = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lines that must be done whole, such as starting a child and noting its pid. A SIGINT meanwhile is raised at
        their end.

        Raises:
            KeyboardInterrupt: at the end, where user code was interruptible before.
        """
        was_armed, self._armed = self._armed, False
        try:
            yield
        finally:
            if was_armed:
                self.arm()

    def _on_sigint(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopped == self.name and monotonic() - self._raised_at < SAME_STOP_S:
            self.missed += 1
        elif self._armed:
            self._raise()
        elif self._depth and threading.current_thread() is threading.main_thread():
            self._pending = True
        else:
            self.missed += 1

    def _on_told(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed and self._is_to_stop():
            self._raise()

    def _is_to_stop(self) -> bool:
        return self.name is not None and self._stop == self.name != self._stopped

    def _raise(self) -> None:
        self.raised += 1
        self._stopped = self.name
        self._raised_at = monotonic()
        raise KeyboardInterrupt
