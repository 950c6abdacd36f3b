"""Which call this rank runs, how the last one ended, and what both mean for its collectives.

Events in (a call begins, concludes or ends; a Stop, a position check or departed ranks are reported), effects out. No
sockets, clocks or torch, so a test can put the events of two threads into any order. The main thread and the service
thread both report events; a lock makes each event one step.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from meshbook.diagnose.source_files import cell_label
from meshbook.errors import CollectiveAborted
from meshbook.ids import CallId
from meshbook.rank.process_groups import departures
from meshbook.wire.messages import Outcome, RankPosition

T = TypeVar("T")

# Limit of calls with a stored ring position or stored departures: some may be queued behind the running one.
_MAX_REMEMBERED_CALLS = 256


class RunningCall(NamedTuple):
    """The call on the main thread."""

    call: CallId
    label: str
    started_at: float  # monotonic


class FinishedCall(NamedTuple):
    """How the last call ended."""

    call: CallId
    label: str
    outcome: Outcome


class LeftCall(NamedTuple):
    """How a call ended here, for ranks that still wait in its collectives.

    Attributes:
        cause: why they wait in vain for this rank; "" if the call succeeded.
    """

    status: str
    cause: str


class CallEffect(enum.Enum):
    """What the thread that has reported an event does next."""

    HOLD = "have collectives wait until the call has ended on all ranks"
    RESUME = "release the collectives that wait"
    WATCH = "start a thread that compares the collectives in flight with `CallState.watched_departures`"


class CallState:
    """The calls of one rank. Any thread.

    Attributes:
        running: the call on the main thread; None between calls.
        finished: how the previous call ended; None before the first.
        release_error: the error that released this rank from the running call; None if nothing did.
        cell_title: returns "cell 12" for the file of a cell.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self.running: RunningCall | None = None
        self.finished: FinishedCall | None = None
        self.cell_title: Callable[[str], str | None] = cell_label
        self.release_error: CollectiveAborted | None = None
        self._is_concluded = False  # whether the running call will begin no more collectives
        self._holding_call: CallId | None = None  # the call whose end holds the collectives
        self._seq_before: dict[CallId, int] = {}  # recent calls -> seq of the last collective before them
        self._left_calls: dict[CallId, LeftCall] = {}
        self._departures: dict[CallId, dict[int, RankPosition]] = {}  # running or queued calls -> who has left them
        self._has_groups = False
        self._is_watching = False  # a thread compares the departures with the collectives in flight

    @property
    def running_call_id(self) -> CallId | None:
        running = self.running
        return None if running is None else running.call

    # ---- the main thread

    def began(self, call: CallId, label: str, *, now: float, last_seq: int) -> tuple[CallEffect, ...]:
        """
        Args:
            last_seq: of the last collective before it.
        """
        with self._lock:
            self.running = RunningCall(call, label, now)
            self._is_concluded = False
            self.release_error = None
            _store_bounded(self._seq_before, call, last_seq)
            return self._watch_if_needed()

    def groups_forming(self) -> None:
        """Process groups are about to be formed: checks of calls on the former ones are obsolete."""
        with self._lock:
            self._has_groups = True
            self._holding_call = None

    def concluded(self, call: CallId, *, succeeded: bool) -> tuple[CallEffect, ...]:
        """User code of the call has ended. Its output and its report follow."""
        with self._lock:
            self._is_concluded = True
            if succeeded and self._holding_call != call:
                return ()
            self._holding_call = call
            return (CallEffect.HOLD,)

    def transport_failed(self, cause: CollectiveAborted) -> None:
        """A connection of the running call has failed because of departed ranks."""
        with self._lock:
            self.release_error = self.release_error or cause

    def ended(self, call: CallId, label: str, outcome: Outcome) -> None:
        """The call is about to be reported."""
        with self._lock:
            self.finished = FinishedCall(call, label, outcome)
            cause = departures.describe_leave_reason(self._rank, outcome, self.release_error, self.cell_title)
            _store_bounded(self._left_calls, call, LeftCall(outcome.status, cause))
            self.running = None
            self._departures.pop(call, None)

    # ---- the service thread

    def stop_reported(self, about: CallId) -> tuple[CallEffect, ...]:
        """A call is interrupted: hold collectives once it has ended here, until it has ended on all ranks.

        A later call that has already begun is not affected.
        """
        with self._lock:
            running = self.running
            if running is not None and running.call != about:
                return ()
            self._holding_call = about
            return (CallEffect.HOLD,) if running is None or self._is_concluded else ()

    def positions_checked(self, about: CallId) -> tuple[CallEffect, ...]:
        """The call has ended on all ranks, and their positions were compared."""
        with self._lock:
            if self._holding_call != about:
                return ()
            # Its host may have cancelled it before it started here, and still name it: then it holds nothing.
            self._holding_call = None
            return (CallEffect.RESUME,)

    def ranks_left(self, call: CallId, left: Iterable[RankPosition]) -> tuple[CallEffect, ...]:
        """Other ranks have left a call that this rank runs or will run."""
        with self._lock:
            known = _store_bounded(self._departures, call, self._departures.get(call, {}))
            known.update({position.rank: position for position in left})
            return self._watch_if_needed()

    def seq_before(self, call: CallId, default: int) -> int:
        """Return the seq of the last collective before a call; `default` if it has not begun here."""
        return self._seq_before.get(call, default)

    def has_begun(self, call: CallId) -> bool:
        """Return whether a call has begun here. Calls before the last 256 are forgotten."""
        return call in self._seq_before

    def left_call(self, call: CallId) -> LeftCall | None:
        """Return how a call ended here; None: it has not, or is older than the last 256."""
        return self._left_calls.get(call)

    def departed(self, call: CallId) -> tuple[RankPosition, ...]:
        """Return the positions of the ranks that have left this call."""
        with self._lock:
            return tuple(self._departures.get(call, {}).values())

    # ---- the watching thread

    def watched_departures(self) -> tuple[CallId, tuple[RankPosition, ...]] | None:
        """Return the running call and who has left it; None ends the watch."""
        with self._lock:
            running = self.running
            if running is None or running.call not in self._departures:
                self._is_watching = False
                return None
            return running.call, tuple(self._departures[running.call].values())

    def release_from(self, call: CallId, error: CollectiveAborted) -> bool:
        """A collective of this call waits in vain. Return whether to abort the groups: not once the call has ended."""
        with self._lock:
            if self.running is None or self.running.call != call:
                return False
            self.release_error = error
            return True

    def watch_ended(self) -> None:
        """The watching thread has ended for another reason than `watched_departures`, or did not start."""
        with self._lock:
            self._is_watching = False

    def _watch_if_needed(self) -> tuple[CallEffect, ...]:
        if not self._has_groups or self._is_watching or self.running is None:
            return ()
        if self.running.call not in self._departures:
            return ()
        self._is_watching = True
        return (CallEffect.WATCH,)


def _store_bounded(values_by_call: dict[CallId, T], call: CallId, value: T) -> T:
    """Store a value for a call, and drop those of the oldest calls beyond the limit."""
    values_by_call[call] = value
    while len(values_by_call) > _MAX_REMEMBERED_CALLS:
        del values_by_call[next(iter(values_by_call))]
    return value
