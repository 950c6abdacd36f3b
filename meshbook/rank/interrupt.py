"""SIGINT on a rank: KeyboardInterrupt in user code, and nowhere else.

A rank inherits "ignore SIGINT" from the processes that started it, and a KeyboardInterrupt between two lines of
Meshbook's own would leave it in pieces. So a handler of our own is always there, and raises only while it is armed.
Knows nothing of cells or messages.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

# A second SIGINT this soon after the first is the same Stop told twice (by the front end and by the host, say), and
# would end the user's `finally:` and `except KeyboardInterrupt:` instead of the work.
SAME_STOP_S = 0.5


class InterruptGate:
    """Decides what a SIGINT does.

    Inside `begin` .. `end` (one call on the main thread) but not armed, a SIGINT is kept and raised at the next `arm`:
    Stop pressed while the cell is still being compiled is not lost. Outside it is counted and forgotten, because what
    it was meant for is over.

    Attributes:
        raised: how many SIGINTs became a KeyboardInterrupt.
        missed: how many came when there was nothing to interrupt, or told the same Stop twice.
    """

    def __init__(self) -> None:
        self.raised = 0
        self.missed = 0
        self._armed = False
        self._pending = False
        self._depth = 0
        self._raised_at = float("-inf")
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Handle SIGINT from here on. Main thread only."""
        self._previous = signal.signal(signal.SIGINT, self._on_sigint)
        self._installed = True

    def uninstall(self) -> None:
        """Put back what handled SIGINT before."""
        signal.signal(signal.SIGINT, self._previous)
        self._installed = False

    @property
    def armed(self) -> bool:
        """Whether a SIGINT would raise now."""
        return self._armed

    def begin(self) -> None:
        """A call begins on the main thread. Nests. A Stop that ended the call before it says nothing about this one."""
        if not self._depth:
            self._raised_at = float("-inf")
            if self._installed and signal.getsignal(signal.SIGINT) != self._on_sigint:
                # User code left its own handler there, and a rank that cannot be stopped is worse.
                signal.signal(signal.SIGINT, self._on_sigint)
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

    def arm(self) -> None:
        """User code follows.

        Raises:
            KeyboardInterrupt: a SIGINT came since `begin`.
        """
        self._armed = True
        if self._pending:
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
        if time.monotonic() - self._raised_at < SAME_STOP_S:
            self.missed += 1
        elif self._armed:
            self._raise()
        elif self._depth and threading.current_thread() is threading.main_thread():
            self._pending = True
        else:
            self.missed += 1

    def _raise(self) -> None:
        self.raised += 1
        self._raised_at = time.monotonic()
        raise KeyboardInterrupt
