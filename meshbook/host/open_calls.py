"""The open calls of a host: who still runs them, what the others came to, and their folded output. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshbook.fold.lines import MAX_AGE_S, LineFolder
from meshbook.fold.outcomes import fold_outcomes
from meshbook.host.instructions import Instructions, SendHeartbeat, SendReport, SetAlarm
from meshbook.ids import Ranks
from meshbook.wire import messages
from meshbook.wire.messages import Outcome

# Seconds that an open call must have lasted before its progress is reported.
PROGRESS_AFTER_S = 0.5
# ... after a rank's part failed, before the supervisor is notified that the others continue: mostly they fail alike.
PROGRESS_AFTER_FAILURE_S = 0.2
# Seconds for a process that is about to end to do so, and for its exit to be reported: its devices are closed first.
_EXITS_TIMEOUT_S = 20.0
FLUSH_INTERVAL_S = 0.05
# Characters that one flush may output; the rest waits, and is truncated with a notice when it grows too large. Twenty
# times a second this is about what a front end can take (1 MB/s).
_MAX_FLUSH_CHARS = 32 << 10
# Ranks up to which a finished call reports each rank's seconds.
_MAX_RANK_SECONDS = 64


@dataclass
class PendingCall:
    """An open call: the ranks that still run it, and the outcomes of the others."""

    call: str
    command: Any
    waiting_ranks: set[int]
    opened_at: float
    folder: LineFolder
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    is_flush_scheduled: bool = False
    num_reported_done: int = 0
    is_report_scheduled: bool = False  # an alarm will report its progress

    def record(self, rank: int, outcome: Outcome) -> None:
        """Record a rank's outcome; the first one counts."""
        if rank in self.waiting_ranks:
            self.waiting_ranks.discard(rank)
            self.outcomes[rank] = outcome
            self.folder.rank_done(rank)

    def first_failure(self) -> str:
        """Return the error of the lowest rank that failed; "" if none did."""
        for rank, outcome in sorted(self.outcomes.items()):
            if outcome.status != "ok" and (error := outcome.error) is not None:
                return f"rank {rank}: {error.ename}: {error.evalue}"
        return ""


# Commands that no rank can complete if one fails.
_TOGETHER = (messages.FormGroups, messages.ShareState, messages.MoveShards)


@dataclass
class OrphanOutput:
    """Output that belongs to no open call, until it has been flushed."""

    call: str
    ranks: Ranks
    folder: LineFolder
    is_flush_scheduled: bool = False


class OpenCalls:
    """Opens calls, folds their output, and finishes each exactly once: when its last rank has an outcome."""

    def __init__(self) -> None:
        self._calls: dict[str, PendingCall] = {}
        self._orphans: dict[str, OrphanOutput] = {}

    def get(self, call: str | None) -> PendingCall | None:
        return None if call is None else self._calls.get(call)

    def of_rank(self, rank: int) -> list[PendingCall]:
        """The calls that wait for a rank."""
        return [pending for pending in self._calls.values() if rank in pending.waiting_ranks]

    def open(self, command: Any, ranks: Ranks, now: float) -> PendingCall:
        pending = PendingCall(
            command.call, command, set(ranks), now, self._folder(ranks, getattr(command, "fold", "numbers"))
        )
        self._calls[command.call] = pending
        return pending

    def await_exits(self, command: messages.CheckExits, ranks: Ranks, ending: Ranks, now: float) -> Instructions:
        """Open a call that ends when no exit of these ranks is yet to be reported.

        Args:
            ending: ranks that have ended or are about to, and whose exit has not been reported.
        """
        pending = self.open(command, ranks, now)
        for rank in set(ranks).difference(ending):
            pending.record(rank, Outcome(status="ok"))
        limit = SetAlarm(_EXITS_TIMEOUT_S, lambda then: self.skip_waiting(command.call, then))
        return [*self.finish_if_complete(pending, now), limit]

    def finish_rank(self, call: str, rank: int, outcome: Outcome, now: float) -> Instructions:
        pending = self._calls.get(call)
        if pending is None:
            return []
        pending.record(rank, outcome)
        return self.finish_if_complete(pending, now)

    def skip_waiting(self, call: str, now: float) -> Instructions:
        """Record "skipped" for the ranks that have not finished a call.

        Used for a query that a rank has not replied to (it keeps the GIL, or is stopped), and for a call that ends
        without them.
        """
        pending = self._calls.get(call)
        if pending is None:
            return []
        for rank in sorted(pending.waiting_ranks):
            pending.record(rank, Outcome(status="skipped"))
        return self.finish_if_complete(pending, now)

    def finish_if_complete(self, pending: PendingCall, now: float) -> Instructions:
        if pending.waiting_ranks or self._calls.get(pending.call) is not pending:
            return []
        del self._calls[pending.call]
        finished = messages.CallFinished(
            call=pending.call,  # type: ignore[arg-type]
            outcomes=fold_outcomes(pending.outcomes.items()),
            seconds=max(pending.seconds.values(), default=0.0),
            rank_seconds=pending.seconds if len(pending.outcomes) <= _MAX_RANK_SECONDS else None,
            items=tuple(pending.folder.flush(now, final=True)),
        )
        if isinstance(pending.command, messages.FormGroups):
            return [SendHeartbeat(), SendReport(finished)]  # the ranks must be visible once the mesh is reported ready
        return [SendReport(finished)]

    # ---- progress

    def failed_on(self, call: str) -> Instructions:
        """Schedule a report of a call's progress after a rank's part of it has failed."""
        pending = self._calls.get(call)
        if pending is None or pending.is_report_scheduled:
            return []
        pending.is_report_scheduled = True
        return [SetAlarm(PROGRESS_AFTER_FAILURE_S, lambda now: self._report_progress(pending))]

    def report_progress(self, now: float) -> Instructions:
        """Report the progress of the calls that have lasted for a while."""
        lasting = [pending for pending in self._calls.values() if now - pending.opened_at > PROGRESS_AFTER_S]
        return [instruction for pending in lasting for instruction in self._report_progress(pending)]

    def _report_progress(self, pending: PendingCall) -> Instructions:
        """Report which ranks have finished, if that has changed."""
        pending.is_report_scheduled = False
        done = len(pending.outcomes)
        if done == pending.num_reported_done or self._calls.get(pending.call) is not pending:
            return []
        pending.num_reported_done = done
        failure = pending.first_failure() if isinstance(pending.command, _TOGETHER) else ""
        ranks = tuple(sorted(pending.outcomes))
        return [SendReport(messages.CallProgressed(pending.call, ranks, failure))]  # type: ignore[arg-type]

    # ---- output

    def feed(
        self, call: str, rank: int, items: tuple[messages.OutputItem, ...], living_ranks: Iterable[int], now: float
    ) -> Instructions:
        """Fold a rank's output.

        Args:
            living_ranks: whose equal lines are waited for, if the call is not open: an actor printed them, or a thread
                of a cell that has ended.
        """
        pending = self._calls.get(call)
        if pending is not None:
            pending.folder.feed(rank, items, now)
            return self._schedule_flush(pending, FLUSH_INTERVAL_S)
        orphan = self._orphans.get(call)
        if orphan is None or rank not in orphan.ranks:
            ranks = tuple(sorted({*living_ranks, rank}))
            orphan = self._orphans[call] = OrphanOutput(call, ranks, self._folder(ranks))
        orphan.folder.feed(rank, items, now)
        return self._schedule_flush(orphan, FLUSH_INTERVAL_S)

    def prompt(self, request: messages.InputRequest, now: float) -> Instructions:
        """Pass on a request for input, after the output that came before it.

        The debugger's prompt waits for other ranks, and their lines may equal this one's: then the output waits too.
        """
        pending = self._calls.get(request.call)
        max_age_s = 0.0 if request.stop is None else MAX_AGE_S
        flush = [] if pending is None else _report_output(request.call, pending.folder.flush(now, max_age_s=max_age_s))
        return [*flush, SendReport(request)]

    def flush_orphans(self, now: float) -> Instructions:
        """Flush all output that belongs to no open call; nothing more will come."""
        orphans, self._orphans = list(self._orphans.values()), {}
        return [
            report for orphan in orphans for report in _report_output(orphan.call, orphan.folder.flush(now, final=True))
        ]

    def _schedule_flush(self, output: PendingCall | OrphanOutput, after_s: float) -> Instructions:
        if output.is_flush_scheduled:
            return []
        output.is_flush_scheduled = True
        flush = self._flush_call if isinstance(output, PendingCall) else self._flush_orphan
        return [SetAlarm(after_s, partial(flush, output))]  # type: ignore[arg-type]

    def _flush_call(self, pending: PendingCall, now: float) -> Instructions:
        if self._calls.get(pending.call) is not pending:
            return []
        pending.is_flush_scheduled = False
        reports = _report_output(pending.call, pending.folder.flush(now, max_chars=_MAX_FLUSH_CHARS))
        deadline = pending.folder.next_deadline()
        if deadline is not None:
            reports += self._schedule_flush(pending, max(FLUSH_INTERVAL_S, deadline - now))
        return reports

    def _flush_orphan(self, orphan: OrphanOutput, now: float) -> Instructions:
        """Flush output that belongs to no open call. It waits for equal lines of other ranks as in a cell."""
        orphan.is_flush_scheduled = False
        items = list(orphan.folder.flush(now, max_chars=_MAX_FLUSH_CHARS))
        deadline = orphan.folder.next_deadline()
        if deadline is not None:
            return _report_output(orphan.call, items) + self._schedule_flush(
                orphan, max(FLUSH_INTERVAL_S, deadline - now)
            )
        items += orphan.folder.flush(now, final=True)
        if self._orphans.get(orphan.call) is orphan:
            del self._orphans[orphan.call]
        return _report_output(orphan.call, items)

    def _folder(self, ranks: Ranks, folding: messages.Folding = "numbers") -> LineFolder:
        return LineFolder(ranks, mergeable=True, folding=folding)


def _report_output(call: str, items: Iterable[messages.FoldedItem]) -> Instructions:
    if found := tuple(items):
        return [SendReport(messages.CallOutput(call=call, items=found))]  # type: ignore[arg-type]
    return []
