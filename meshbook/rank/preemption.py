"""Preemption on a rank: SIGTERM is passed on to the supervisor, and cells ask whether they are to end.

All ranks of a cell must come to the same answer in the same step, or those that go on wait in a collective for those
that have left. So the answer is agreed on: each rank counts how often its cell has asked. When the supervisor wants the
cell to end, it queries every rank's count, and from then on a rank waits where it asks again, until the supervisor has
named the count from which on the answer is yes: one more than the largest. No rank can have passed that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from meshbook.errors import UsageError
from meshbook.ids import CallId


def preempted() -> bool:
    """Return whether this cell is to end, because a process of the mesh has received SIGTERM.

        for batch in loader:
            train_step(batch)
            if meshbook.preempted():
                break

    Every rank of the cell calls this equally often, once per step: all get True in the same step, and again in every
    later one. What `mesh.on_preemption` names is saved when the cell has ended. It costs a microsecond or
    less, and is no collective. While the ranks agree on the step it waits for a few milliseconds.

    Raises:
        UsageError: this process is no rank.
    """
    if _installed is None:
        raise UsageError(
            "meshbook.preempted runs on ranks, and this code runs on the controller; call it in a cell that runs on "
            "the mesh"
        )
    return _installed.ask()


class PreemptionPoint:
    """Whether the running call is preempted, and since which of its questions. Main thread and service thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._call: str | None = None
        self._num_asked = 0  # by this call
        self._undecided: str | None = None  # the call about which the supervisor has asked
        self._decided: tuple[str, int] | None = None  # a call, and from which question on it is preempted
        self.reason = ""  # "rank 2 received SIGTERM"

    # ---- the main thread

    def begin(self, call: CallId) -> None:
        with self._lock:
            self._call, self._num_asked = call, 0

    def ask(self) -> bool:
        """Count a question of the running call, and return the answer. Waits for a decision that is under way."""
        with self._lock:
            self._num_asked += 1
            while self._undecided is not None and self._undecided == self._call:
                self._changed.wait()
            return self._decided is not None and self._decided[0] == self._call and self._num_asked >= self._decided[1]

    # ---- the service thread

    def query(self, call: CallId) -> dict[str, int]:
        """Return how often a call has asked; from now on it waits where it asks. It may not have begun yet."""
        with self._lock:
            self._undecided = call
            return {"asked": self._num_asked if call == self._call else 0}

    def decide(self, call: CallId, at: int | None, reason: str) -> None:
        with self._lock:
            if at is not None:
                self._decided, self.reason = (call, at), reason
            if self._undecided == call:
                self._undecided = None
            self._changed.notify_all()


# Global, because a process is one rank for its lifetime, and `meshbook.preempted` is a function of the process.
_installed: PreemptionPoint | None = None


def install(point: PreemptionPoint | None) -> None:
    """Have `meshbook.preempted` ask this; None: this process is no rank."""
    global _installed
    _installed = point


class TerminationSignal:
    """SIGTERM of this process: it does not end the process, but makes `fd` readable.

    User code that installs a handler of its own replaces this one. A child that user code forks is ended by SIGTERM,
    as any process is. It is blocked during a fork: Python forgets a signal that comes to a child before its first line.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._forking = threading.local()  # `mask`: the signals that were blocked in this thread before its fork

    def install(self) -> None:
        """Main thread only; once."""
        signal.signal(signal.SIGTERM, self._on_signal)
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._forked)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"x")

    def _block(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _forked(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock()
