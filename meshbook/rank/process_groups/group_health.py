"""Whether a process group can be used, and how its collectives wait and end.

A group, its operations in flight and their futures share one `GroupHealth`; so none of them needs to know the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from meshbook.clock import monotonic
from meshbook.errors import CollectiveAborted
from meshbook.ids import name_ranks
from meshbook.rank.process_groups.backends import A_YEAR
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.failures import GroupBroken, GroupFailure, is_transport_error
from meshbook.rank.process_groups.ring import Collective, CollectiveRing, GroupLabel, one_line_error
from meshbook.wire.stop_timing import ASK_REASON_AFTER_S, WAIT_SLICE_S

NO_TIMEOUT = timedelta(0)  # torch's value for "no timeout"

_WAIT_SLICE = timedelta(seconds=WAIT_SLICE_S)

# Seconds that a collective waits to learn whether ranks are in step after a call that failed. The supervisor queries
# the ranks, for a second at most, as soon as the call has ended on all of them.
_HOLD_TIMEOUT_S = 5.0


class Observer(Protocol):
    """Receives each collective with its tensors, for example to record a run for replay."""

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        """Called before it starts. What this raises, the caller of the collective gets."""

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        """Called after it succeeded. Its outputs, in `arguments`, are filled (on CUDA: for users of the stream).

        Of a receive from any rank, the last of the arguments is whose it was, as a rank in the group.
        """

    def failed(self, collective: Collective, error: BaseException) -> None:
        """Called after it failed, or was interrupted, with what its caller gets."""


class PendingFuture(Protocol):
    """A future of a collective, which C++ may wait for."""

    def poll(self) -> None:
        """Complete it if its operation has ended unnoticed."""

    def fail(self, error: BaseException) -> None:
        """Complete it with an error, unless it is complete."""


class GroupHealth:
    """Whether one group can be used, and what is in flight in it.

    Attributes:
        label: its name and the global ranks of its members, for the ring.
        ring: where its collectives are recorded.
        observers: receivers of each collective.
        failure: why the group cannot be used now; None while it can. Set by any thread that breaks the group.
        hold_event: the event that a collective waits for before it starts; None for no wait.
        connection_version: incremented with each new set of connections; results from older ones do not apply.
        clock: the seconds that count for timeouts.
        exits: asks whether a rank has ended, when a collective has failed; None where nobody can be asked.
        peer_waits: the sends and receives that threads wait for on gloo, by seq.
    """

    def __init__(self, label: GroupLabel, ring: CollectiveRing, observers: Sequence[Observer]) -> None:
        self.label = label
        self.ring = ring
        self.observers = observers
        self.failure: GroupFailure | None = None
        self.hold_event: threading.Event | None = None
        self.connection_version = 0
        self.clock: Callable[[], float] = monotonic
        self.exits: ExitQuestions | None = None
        self.peer_waits: dict[int, Collective] = {}
        self._lock = threading.Lock()
        self._failed_event = threading.Event()  # set when the group is broken
        self._pending_futures: dict[int, PendingFuture] = {}  # handed out and incomplete, by seq of their collective

    # ---- failing

    def reset(self) -> None:
        """Clear a former failure: the group has other connections, or none."""
        with self._lock:
            self.connection_version += 1
            self.failure = None
            self._failed_event.clear()

    def invalidate(self, failure: GroupFailure, *, version: int | None = None) -> None:
        """Refuse new collectives, and fail the futures that C++ waits for. Any thread; does not block.

        Args:
            version: of the connections that failed: newer ones are left alone. None: those of now.
        """
        with self._lock:
            if version is not None and version != self.connection_version:
                return
            self.failure = failure
            futures = list(self._pending_futures.values())
        self._failed_event.set()
        for future in futures:
            future.fail(failure.error_to_raise() or GroupBroken(failure.reason))

    def wait_until_allowed(self, op: str) -> None:
        """Return when a collective may start, which may take a moment.

        Raises:
            CollectiveAborted: the group was broken because a member has left the running call.
            GroupBroken: the group is unusable, or whether it is usable is not known in time.
        """
        hold_event = self.hold_event
        if (
            hold_event is not None
            and self.failure is None
            and not hold_event.wait(_HOLD_TIMEOUT_S)
            and self.failure is None
        ):
            raise GroupBroken(
                f"{op} cannot run: the call before this one did not end well on this rank, and is not over on other "
                "ranks, so that nobody knows yet whether their collectives would match. Wait for it, or stop it"
            )
        failure = self.failure
        if failure is None:
            return
        if isinstance(failure.error, CollectiveAborted):
            raise failure.error_to_raise() or failure.error
        if failure.for_good:
            raise GroupBroken(f"{op} cannot run on the process group of {self.label.ranks_text}: {failure.reason}")
        raise GroupBroken(
            f"{op} cannot run: the process group of {name_ranks(self.label.ranks)} is broken "
            f"({failure.reason}). It is formed again before the next cell: run the cell again. "
            "If a rank is gone: %mesh heal"
        )

    def mark_interrupted_start(self, op: str, error: BaseException) -> None:
        """Mark the group out of step: a signal arrived while a collective was recorded.

        That collective may count and has not started.
        """
        if isinstance(error, Exception):
            return
        self.label.is_doubtful = True
        self.failure = self.failure or GroupFailure(f"{op} was interrupted as it began")
        last = self.ring.last
        if last is not None and last.label is self.label:
            self.ring.finish(last, error)

    def finish_failed(
        self, record: Collective, error: BaseException, version: int, work: Any, *, launched: bool
    ) -> BaseException:
        """Record the end of a collective that raised `error`, and return the exception for its caller.

        That is the error that the group was aborted with if it was, else `error` itself. May be called twice for one
        end, when a signal interrupts the first call.

        Args:
            version: the group's connection version when the collective began.
            work: the real operation, if there is one.
            launched: `error` was raised while waiting. Earlier failures most likely come from wrong arguments, but for
                those of a backend's own library, after which its communicator cannot be used.
        """
        failed = isinstance(error, Exception)
        raised: BaseException | None = None
        is_out_of_step = False  # this rank with the others from now on, however the user handles the exception
        if version == self.connection_version:
            is_out_of_step = launched or is_transport_error(error) if failed else not _has_succeeded(work)
            if is_out_of_step and failed:
                self._wait_for_reason()
        with self._lock:
            if version == self.connection_version:
                failure = self.failure
                raised = failure.error_to_raise() if failed and failure is not None else None
                if is_out_of_step and failure is None:
                    how = f"failed: {one_line_error(error)}" if failed else "was interrupted"
                    self.failure = GroupFailure(f"{record.op} #{record.seq} {how}")
            elif failed:  # the group has other connections, perhaps since the wait
                raised = GroupBroken(f"{record.op} was under way when its process group was broken; its result is lost")
        self.ring.finish(record, raised or error)
        for observer in self.observers:
            observer.failed(record, raised or error)
        return raised or error

    def _wait_for_reason(self) -> None:
        """Wait until the group is aborted with the reason why a collective failed, or no rank has ended. Blocks."""
        if not self._failed_event.wait(ASK_REASON_AFTER_S) and self.exits is not None:
            self.exits.wait_until_reported(self._failed_event.is_set)

    def raise_if_aborted(self, record: Collective) -> None:
        """Raise if the group was aborted.

        An aborted NCCL collective returns as if successful, with garbage in its tensors.
        """
        raised = self.failure.error_to_raise() if self.failure is not None else None
        if raised is not None:
            self.ring.finish(record, raised)
            raise raised

    # ---- waiting

    def wait_in_slices(self, work: Any, timeout: timedelta = NO_TIMEOUT) -> None:
        """Wait for a gloo operation such that signals are handled. Blocks.

        Raises:
            RuntimeError: `timeout` expired and the operation continues; or it failed, or the group was aborted.
            BaseException: what a signal handler raised.
        """
        try:
            self._wait_slice_by_slice(work, timeout)
        except KeyboardInterrupt as stop:
            stop.__context__ = None  # the timeout of a slice, an implementation detail
            raise

    def _wait_slice_by_slice(self, work: Any, timeout: timedelta) -> None:
        deadline = self.clock() + timeout.total_seconds() if timeout else float("inf")
        failed = False
        while True:
            slice_start = monotonic()
            remaining_s = deadline - self.clock()
            slice_s = WAIT_SLICE_S if remaining_s > WAIT_SLICE_S else max(remaining_s, 0.001)
            try:
                work.wait(_WAIT_SLICE if remaining_s > WAIT_SLICE_S else timedelta(seconds=slice_s))
                return
            except RuntimeError:
                # The slice expired, or the operation failed. gloo's `is_completed` does not distinguish them: for a
                # reduce_scatter it is always False. But a failed operation raises at once, and does so again.
                is_aborted = self.failure is not None and self.failure.error is not None
                at_once = monotonic() - slice_start < slice_s / 2
                if is_aborted or self.clock() >= deadline or (failed and at_once):
                    raise
                failed = at_once

    def wait_for_peer(self, record: Collective, work: Any, timeout: timedelta = NO_TIMEOUT) -> None:
        """Wait for a send or receive on gloo. Blocks, without slices; a shutdown of its connections ends it.

        Raises:
            RuntimeError: the operation failed, or `timeouts` has ended it, after `timeout` if there is one.
        """
        record.timeout_s = timeout.total_seconds() if timeout else None
        self.peer_waits[record.seq] = record
        try:
            work.wait(A_YEAR)
        finally:
            del self.peer_waits[record.seq]

    # ---- futures

    def add_future(self, record: Collective, future: PendingFuture) -> GroupFailure | None:
        """Have `invalidate` fail this future. Returns why the group is broken already, if it is."""
        with self._lock:
            self._pending_futures[record.seq] = future
            return self.failure

    def forget_future(self, record: Collective) -> None:
        """A future is complete."""
        with self._lock:
            self._pending_futures.pop(record.seq, None)

    def complete_futures(self) -> None:
        """Complete the futures of operations that have ended unnoticed. Any thread; does not block."""
        for future in list(self._pending_futures.values()):
            future.poll()

    # ---- observers

    def notify_begun(self, record: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Pass a collective that begins to the observers. Returns its arguments, for `notify_finished`."""
        arguments = (*args, *kwargs.values())
        for observer in self.observers:
            observer.begun(record, arguments)
        return arguments

    def notify_finished(self, record: Collective, arguments: tuple[Any, ...]) -> None:
        for observer in self.observers:
            observer.finished(record, arguments)


def failure_of(work: Any) -> RuntimeError | None:
    """Return what a completed collective on gloo failed with; None if it succeeded. Does not block. Any thread."""
    try:
        work.wait(_WAIT_SLICE)
    except RuntimeError as error:
        return error
    return None


def _has_succeeded(work: Any) -> bool:
    """Whether the operation has completed without an error. Does not block."""
    return work is not None and work.is_completed() and failure_of(work) is None
