"""Stops the main thread in the debugger where it is, while it runs a cell or waits.

The service thread takes the request and sends the main thread a signal. Its handler opens the debugger if user code
waits there, in `time.sleep` for example, or in a collective. Within a library it has the thread stop at the next line
of user code; if none comes soon, it opens the debugger all the same, where no lock is held that the debugger needs.
Signals are handled between two instructions of the interpreter: a thread in C code stops when that returns.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Final

from meshbook.clock import monotonic, sleep
from meshbook.diagnose.source_files import library_of
from meshbook.ids import CallId
from meshbook.rank.call_state import CallState
from meshbook.rank.cells.debugger import CellTitle, describe_place, innermost_user_frame
from meshbook.rank.cells.no_terminal import TerminalReplacement
from meshbook.rank.cells.user_input import InputRequester
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.wire.interrupt_points import PostponedInterrupt
from meshbook.wire.messages import DebuggerPlace, LeaveDebugger, StopInDebugger

# The signal that wakes the main thread. Nothing else uses it.
_STOP_SIGNAL: Final = signal.SIGRTMAX - 5
# Seconds until the handler is called again, and for how long lines of user code are waited for.
_RETRY_S: Final = 0.01
# ... and between signals as long as the request stands, whatever became of the former ones.
_REPEAT_S: Final = 0.5
_LINES_S: Final = 0.1
# ... and until a call has begun that is queued here: it may have been taken out of the queue.
_BEGINS_S: Final = 30.0
# Where a rank waits for a collective: no lock is held there.
_WAIT_FUNCTION: Final = "_wait_slice_by_slice"


class StopRequests:
    """The requests of clients that this rank stops in the debugger."""

    def __init__(
        self,
        state: CallState,
        gate: InterruptGate,
        terminal: TerminalReplacement,
        user_input: InputRequester,
        ring: CollectiveRing,
        cell_title: CellTitle,
    ) -> None:
        self._state, self._gate, self._terminal, self._user_input = state, gate, terminal, user_input
        self._ring, self._cell_title = ring, cell_title
        self._main_thread = threading.main_thread().ident or 0
        self._pid = os.getpid()
        self._requested_at: float | None = None  # when the main thread was asked to stop; None: it was not, or it has
        self._seeks_line = False  # it stops at the next line of user code
        self._postponed = PostponedInterrupt(ends_calls=True)
        self._is_stopped = False  # the handler has opened the debugger
        gate.also_handle(_STOP_SIGNAL, self._on_signal)
        user_input.on_debugger_stop = self._stopped

    # ---- the service thread

    def request(self, command: StopInDebugger) -> DebuggerPlace:
        """Have the main thread stop in the debugger, if it runs this call or will."""
        has_begun = self._state.has_begun(command.target)
        if has_begun and self._state.running_call_id != command.target:
            return DebuggerPlace(problem="has ended its part of it")
        if has_begun and self._user_input.is_waiting:
            return DebuggerPlace(problem="waits for somebody to type already")
        trace = sys.modules.get("debugpy")
        if trace is not None and trace.is_client_connected():
            return DebuggerPlace(problem="is in the hands of a debugger at its debugpy port")
        place = self._where() if has_begun else DebuggerPlace(inside="what it runs before it")
        self._user_input.debugged_call = command.target
        self._requested_at, self._seeks_line = monotonic(), False
        self._postponed.clear()
        self._send_signal()
        with contextlib.suppress(RuntimeError):  # no memory for a thread
            _thread.start_new_thread(self._repeat, (self._requested_at, command.target))
        return place

    def _where(self) -> DebuggerPlace:
        frame = innermost_user_frame(sys._current_frames().get(self._main_thread))
        place = "" if frame is None else describe_place(frame, frame.f_lineno, self._cell_title)
        running = [one for one in self._ring.snapshot() if one.t_end is None]
        inside = f"{running[-1].op} #{running[-1].group_seq}" if running else ""
        return DebuggerPlace(place=place, inside=inside)

    def leave(self, command: LeaveDebugger) -> None:
        """Forget a request, and who gives the commands."""
        if self._user_input.debugged_call == command.target:
            self._user_input.debugged_call = self._requested_at = None

    def _repeat(self, requested_at: float, call: CallId) -> None:
        """Send the signal again: Python does not see one that comes just before it waits for a lock, until the next."""
        sleep(_REPEAT_S)
        while self._requested_at == requested_at:
            if not self._state.has_begun(call) and monotonic() - requested_at > _BEGINS_S:
                self._requested_at = None
                return
            self._send_signal()
            sleep(_REPEAT_S)

    def _send_signal(self) -> None:
        if signal.getsignal(_STOP_SIGNAL) == self._on_signal:  # its default action ends the process
            signal.pthread_kill(self._main_thread, _STOP_SIGNAL)

    # ---- the main thread

    def _stopped(self) -> None:
        """The debugger asks for a command, however it was entered."""
        self._requested_at = None

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._requested_at is None or self._is_stopped or os.getpid() != self._pid:
            return
        call = self._user_input.debugged_call
        if self._state.running_call_id != call:
            if call is None or self._state.has_begun(call):
                self._requested_at = None
            return
        user_frame = innermost_user_frame(frame) if self._gate.is_armed else None
        is_late = monotonic() - self._requested_at > _LINES_S
        if frame is not None and user_frame is not None and self._can_stop(frame, user_frame, is_late):
            self._requested_at = None
            self._is_stopped = True
            try:
                self._terminal.stop_now(frame, user_frame)
            finally:
                self._is_stopped = False
            return
        if self._gate.is_armed and not self._seeks_line:
            self._seeks_line = True
            self._terminal.stop_at_next_line(frame, lambda: self._requested_at is not None)
        if user_frame is not None or not self._gate.is_armed:  # else an event loop runs: the next line is all there is
            with contextlib.suppress(RuntimeError):  # no memory for a thread
                _thread.start_new_thread(self._retry_soon, ())

    def _retry_soon(self) -> None:
        sleep(_RETRY_S)
        if self._requested_at is not None:
            self._send_signal()

    def _can_stop(self, frame: FrameType, user_frame: FrameType, is_late: bool) -> bool:
        """Whether the debugger can be opened where a thread with this innermost frame is.

        Args:
            is_late: in a library too, because no line of user code came.
        """
        is_in_collective = frame.f_code.co_name == _WAIT_FUNCTION and library_of(frame.f_code.co_filename) == "meshbook"
        if frame is user_frame or is_in_collective:
            return True
        if not is_late or self._postponed.try_again(frame):
            return False
        inner: Any = frame
        while inner is not user_frame:  # Meshbook's output and sockets, which the debugger needs
            if library_of(inner.f_code.co_filename) == "meshbook":
                return False
            inner = inner.f_back
        return True
