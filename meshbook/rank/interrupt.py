"""SIGINT on a rank: KeyboardInterrupt in user code, and nowhere else.

A rank inherits "ignore SIGINT" from the processes that started it, in a Ray cluster "block SIGINT" too, and a
KeyboardInterrupt between two lines of Meshbook would leave an inconsistent state. So Meshbook's own handler is
installed at the beginning of each call, and raises only while it is armed. The host's signal is STOP_SIGNAL, which
nobody else handles: its handler decides once for each Stop, also where user code handles SIGINT itself. Then that gets
one SIGINT. However, a signal does not identify its target, and one that arrives before the work begins is lost. So an
interrupt is also sent with the id of its call (`interrupt_call`). Does not depend on cells or messages.

Nor does it raise inside the few functions that must complete, such as `Condition.__enter__` and the start of a child
(`wire/interrupt_points`). Then a short-lived thread sends a signal to have the handler called again, until they are
over.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from meshbook.clock import monotonic, sleep
from meshbook.wire.interrupt_points import PostponedInterrupt
from meshbook.wire.started_processes import StartedProcesses
from meshbook.wire.stop_timing import SIGINT_DEBOUNCE_S, STOP_SIGNAL

# The signal that wakes the main thread for `interrupt_call`. Nothing else uses it, so it is never taken for a SIGINT.
_CALL_SIGNAL = signal.SIGRTMAX - 3
# The signal with which a postponed interrupt is tried again, and after how many seconds: such functions take less.
_RETRY_SIGNAL = signal.SIGRTMAX - 4
_RETRY_S = 0.001


class InterruptGate:
    """Decides what a SIGINT does.

    Between `begin` and `end` (one call on the main thread), an unarmed gate stores a SIGINT and raises it at the next
    `arm`: an interrupt while the cell is still being compiled is not lost. Outside of a call a SIGINT is only counted,
    because its target has ended.

    Attributes:
        call_id: of the call on the main thread, as passed to `begin_call`; None between calls.
        num_raised: how many interrupts became a KeyboardInterrupt.
        num_missed: how many arrived when nothing could be interrupted, or repeated the same interrupt.
    """

    def __init__(self) -> None:
        self.call_id: str | None = None
        self._started = StartedProcesses()
        self.num_raised = 0
        self.num_missed = 0
        self._armed = False
        self._is_sigint_pending = False
        self._depth = 0
        self._raised_at = float("-inf")
        self._requested_call: str | None = None  # the last argument of `interrupt_call`
        self._interrupted_call: str | None = None  # the last call in which a KeyboardInterrupt was raised
        self._postponed = PostponedInterrupt(ends_calls=True)
        self._is_deciding = False
        self._pid = 0  # of the process that it is installed in; a child of it may have inherited this gate
        self._handlers: dict[int, Any] = {
            signal.SIGINT: self._on_sigint,
            STOP_SIGNAL: self._on_sigint,
            _CALL_SIGNAL: self._on_call_signal,
            _RETRY_SIGNAL: self._on_retry,
        }
        self._previous_handlers: dict[int, Any] = {}  # while it is installed

    @property
    def is_armed(self) -> bool:
        """Whether the main thread runs user code."""
        return self._armed

    def also_handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        """Handle another signal as well, as long as the gate is installed. Main thread only."""
        self._handlers[number] = handler
        if self._previous_handlers:
            self._previous_handlers[number] = signal.signal(number, handler)

    def install(self) -> None:
        """Handle SIGINT from now on, also where whoever started this process had blocked it. Main thread only."""
        self._pid = os.getpid()
        self._previous_handlers = {number: signal.signal(number, handler) for number, handler in self._handlers.items()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)

    def uninstall(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def begin(self) -> None:
        """Mark the beginning of a call on the main thread. Nests.

        An interrupt of the previous call does not affect this one.
        """
        if not self._depth:
            self._raised_at = float("-inf")
            self._postponed.clear()
            if self._previous_handlers:
                # A handler of user code is for its call, as in Jupyter: a rank must remain interruptible.
                for number, handler in self._handlers.items():
                    if signal.getsignal(number) != handler:
                        signal.signal(number, handler)
        self._depth += 1

    def end(self) -> None:
        """Mark the end of a call; discard a SIGINT that is still pending."""
        self._armed = False
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            if self._is_sigint_pending:
                self._is_sigint_pending = False
                self.num_missed += 1

    def reset(self) -> None:
        """Mark that no call is running, however the last one ended."""
        self._armed = False
        self.call_id = None
        if self._depth:
            self._depth = 1
            self.end()

    def begin_call(self, call_id: str) -> None:
        """Record that the main thread has received a call. The last one may not have come to its `end`."""
        self.reset()  # an interrupt at its very end has left it open
        self.call_id = call_id
        self._started.begin_call(call_id)

    def interrupt_call(self, call_id: str, *, hard: bool = False) -> None:
        """Interrupt the call with this id, whether it has begun or not, and no other. Any thread.

        A call that a SIGINT has already ended, or that caught its KeyboardInterrupt and continues, is not interrupted
        again. What it has started is.

        Args:
            hard: kill the processes that it has started and that were interrupted before.
        """
        self._requested_call = call_id
        if self._previous_handlers and self.call_id == call_id and self._handles_call_signal():
            signal.pthread_kill(threading.main_thread().ident or 0, _CALL_SIGNAL)
        self._started.interrupt(call_id, hard=hard)

    def _handles_call_signal(self) -> bool:
        """Whether the call signal has the gate's handler: its default action ends the process."""
        return signal.getsignal(_CALL_SIGNAL) == self._on_call_signal

    def arm(self) -> None:
        """Arm the gate: user code follows.

        Raises:
            KeyboardInterrupt: a SIGINT arrived since `begin`, or an interrupt of this call was requested.
        """
        self._armed = True
        if self._is_sigint_pending or self._is_interrupt_requested():
            self._is_sigint_pending = False
            self._raise_interrupt()

    def raise_postponed(self) -> None:
        """Raise an interrupt that is still to be tried again. Call it after user code, while the gate is armed.

        Raises:
            KeyboardInterrupt: there is one.
        """
        if self._postponed.is_pending:
            self._raise_interrupt()

    def disarm(self) -> None:
        """Disarm the gate after user code.

        Call it in a `finally:`, and once more where the exception is caught: a SIGINT may arrive between the two.
        """
        self._armed = False

    @contextlib.contextmanager
    def defer_interrupts(self) -> Iterator[None]:
        """Defer interrupts in lines that must run to completion, such as starting a child and storing its pid.

        A SIGINT meanwhile is raised at the end of the block.

        Raises:
            KeyboardInterrupt: at the end, if the gate was armed before.
        """
        was_armed, self._armed = self._armed, False
        try:
            yield
        finally:
            if was_armed:
                self.arm()

    def _on_sigint(self, _number: int, frame: FrameType | None) -> None:
        if self._interrupted_call == self.call_id and _running_clock() - self._raised_at < SIGINT_DEBOUNCE_S:
            self.num_missed += 1
        else:
            self._interrupt_at(frame)

    def _on_retry(self, _number: int, frame: FrameType | None) -> None:
        if self._postponed.is_pending:
            self._interrupt_at(frame)

    def _interrupt_at(self, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or keep it for a moment at which it can be raised."""
        if self._armed:
            self._raise_at(frame)
        elif self._depth and threading.current_thread() is threading.main_thread():
            self._is_sigint_pending = True
        else:
            self.num_missed += 1

    def _on_call_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._armed and self._is_interrupt_requested():
            self._raise_at(frame)

    def _is_interrupt_requested(self) -> bool:
        return self.call_id is not None and self._requested_call == self.call_id != self._interrupted_call

    def _raise_at(self, frame: FrameType | None) -> None:
        if self._is_deciding:  # a signal during this handler, which decides
            return
        while frame is not None and frame.f_globals is globals():
            frame = frame.f_back  # the frame below the handler that was interrupted
        self._is_deciding = True
        try:
            is_postponed = not self._is_users() and os.getpid() == self._pid and self._postponed.try_again(frame)
        finally:
            self._is_deciding = False
        if is_postponed:
            # Not `threading`'s: the main thread may hold its locks here. Without memory for a thread, the host's next
            # SIGINT tries again.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._retry_soon, ())
        else:
            self._raise_interrupt()

    def _is_users(self) -> bool:
        """Whether user code handles SIGINT in this call."""
        return bool(self._previous_handlers) and signal.getsignal(signal.SIGINT) != self._on_sigint

    def _retry_soon(self) -> None:
        sleep(_RETRY_S)
        if self._postponed.is_pending and signal.getsignal(_RETRY_SIGNAL) == self._on_retry:
            signal.pthread_kill(threading.main_thread().ident or 0, _RETRY_SIGNAL)

    def _raise_interrupt(self) -> None:
        self._postponed.clear()
        self._interrupted_call = self.call_id
        self._raised_at = _running_clock()
        if self._is_users():
            signal.raise_signal(signal.SIGINT)  # its handler is called here, and may raise
            return
        self.num_raised += 1
        raise KeyboardInterrupt


def _running_clock() -> float:
    """The clock, but for the time in which this thread could run and got no processor.

    A signal that is sent meanwhile is handled after that, later than it came.
    """
    waited_ns = 0
    with contextlib.suppress(OSError, ValueError, IndexError):  # a system that does not count it
        fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            waited_ns = int(os.read(fd, 100).split()[1])
        finally:
            os.close(fd)
    return monotonic() - waited_ns * 1e-9
