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
from meshbook.wire.stop_timing import SIGINT_DEBOUNCE_S

# What wakes the main thread when it was told by name: nobody else's, so that it is never taken for a SIGINT. None where
# the system has no such signals; a main thread that has begun its work is then stopped by SIGINT alone.
_CALL_SIGNAL: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None


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
        self.call_id: str | None = None
        self.num_raised = 0
        self.num_missed = 0
        self._armed = False
        self._is_sigint_pending = False
        self._depth = 0
        self._raised_at = float("-inf")
        self._requested_call: str | None = None  # the call that `stop` was told last
        self._interrupted_call: str | None = None  # the call in which a KeyboardInterrupt was raised last
        self._previous_sigint_handler: Any = None
        self._previous_call_handler: Any = None
        self._installed = False

    def install(self) -> None:
        """Handle SIGINT from here on. Main thread only."""
        self._previous_sigint_handler = signal.signal(signal.SIGINT, self._on_sigint)
        if _CALL_SIGNAL is not None:
            self._previous_call_handler = signal.signal(_CALL_SIGNAL, self._on_call_signal)
        self._installed = True

    def uninstall(self) -> None:
        """Put back what handled SIGINT before."""
        signal.signal(signal.SIGINT, self._previous_sigint_handler)
        if _CALL_SIGNAL is not None:
            signal.signal(_CALL_SIGNAL, self._previous_call_handler)
        self._installed = False

    @property
    def is_armed(self) -> bool:
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
                if not self._handles_call_signal():
                    signal.signal(_CALL_SIGNAL, self._on_call_signal)  # type: ignore[arg-type]
        self._depth += 1

    def end(self) -> None:
        """It is over; a SIGINT that it did not get to see is forgotten."""
        self._armed = False
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            if self._is_sigint_pending:
                self._is_sigint_pending = False
                self.num_missed += 1

    def reset(self) -> None:
        """No call is under way any more, however the last one ended."""
        self._armed = False
        self.call_id = None
        if self._depth:
            self._depth = 1
            self.end()

    def interrupt_call(self, call_id: str) -> None:
        """End the call of this name, whether it has begun or not, and no other. From any thread.

        A call that a SIGINT has ended already, or that caught its KeyboardInterrupt and goes on, is not ended again.
        """
        self._requested_call = call_id
        if self._installed and _CALL_SIGNAL is not None and self.call_id == call_id and self._handles_call_signal():
            signal.pthread_kill(threading.main_thread().ident or 0, _CALL_SIGNAL)

    def _handles_call_signal(self) -> bool:
        """Whether the signal's handler is ours, or there is none: the default one would end the process."""
        return _CALL_SIGNAL is None or signal.getsignal(_CALL_SIGNAL) == self._on_call_signal

    def arm(self) -> None:
        """User code follows.

        Raises:
            KeyboardInterrupt: a SIGINT came since `begin`, or this call was told to stop.
        """
        self._armed = True
        if self._is_sigint_pending or self._is_interrupt_requested():
            self._is_sigint_pending = False
            self._raise_interrupt()

    def disarm(self) -> None:
        """User code is over. Call it in a `finally:`, and once more where its exception is caught: a SIGINT may come
        between the two."""
        self._armed = False

    @contextlib.contextmanager
    def defer_interrupts(self) -> Iterator[None]:
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
        if self._interrupted_call == self.call_id and monotonic() - self._raised_at < SIGINT_DEBOUNCE_S:
            self.num_missed += 1
        elif self._armed:
            self._raise_interrupt()
        elif self._depth and threading.current_thread() is threading.main_thread():
            self._is_sigint_pending = True
        else:
            self.num_missed += 1

    def _on_call_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed and self._is_interrupt_requested():
            self._raise_interrupt()

    def _is_interrupt_requested(self) -> bool:
        return self.call_id is not None and self._requested_call == self.call_id != self._interrupted_call

    def _raise_interrupt(self) -> None:
        self.num_raised += 1
        self._interrupted_call = self.call_id
        self._raised_at = monotonic()
        raise KeyboardInterrupt
