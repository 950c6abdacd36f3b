"""The open calls of a mesh: who waits for them, which ranks have finished, and what hosts have reported of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from meshbook.fold.lines import FoldMerger
from meshbook.fold.outcomes import merge_parts
from meshbook.ids import CallId, Ranks, name_ranks
from meshbook.supervisor.call_output import CallOutputStream, LateOutput
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, SetTimer
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages
from meshbook.wire.messages import HistoryEntry, Outcome, OutcomeGroup, RankInfo

# Seconds until a call has certainly reached its ranks' host; later host reports take the call into account.
_DELIVERY_S = 0.5
# Seconds that hosts have to report the outcomes of a lost rank's survivors.
_END_CALL_TIMEOUT_S = 0.5

Parts = tuple[OutcomeGroup, ...]
# What follows the end of a call: takes the call, its outcomes and the time.
Continuation = Callable[["ActiveCall", Parts, float], list[Effect]]


# Errors of ranks that waited for another one, which has failed.
_OF_WAITING = ("DistStoreError", "GroupBroken")


@dataclass
class ActiveCall:
    """A command that ranks work on."""

    id: CallId
    client: str  # "": the supervisor itself
    label: str
    ranks: Ranks
    opened_at: float
    is_main_thread: bool
    waiting_hosts: set[int]  # hosts that have not finished
    output: CallOutputStream
    on_end: Continuation
    history_entry: HistoryEntry | None = None
    runs_user_code: bool = False  # a client's cell, function or tensor operations
    parts: list[Parts] = field(default_factory=list)  # of the hosts that have finished
    seconds: float = 0.0
    rank_seconds: dict[int, float] = field(default_factory=dict)
    lost: list[messages.RankExited] = field(default_factory=list)
    done_ranks: set[int] = field(default_factory=set)  # ranks whose part is known to have ended
    left_ranks: set[int] = field(default_factory=set)  # ... and that the others know to have left
    is_querying_left: bool = False  # ranks are being queried whether they have left
    is_left_query_due: bool = False  # ... or will be by a timer
    awaiting_input: dict[int, str] = field(default_factory=dict)  # ranks that wait for input -> the client asked
    debugger: str = ""  # the client that the debugger's commands come from; "": the call's own
    deferred: SendToHosts | None = None  # not sent yet
    stop_deadline: float = 0.0  # after a Stop: when commands no longer wait for its ranks to return
    stopping_ranks: set[int] = field(default_factory=set)  # ranks that were sent a Stop of it
    is_stopped: bool = False  # all ranks that still ran it were sent a Stop, which ends it on each
    is_holding: bool = False  # ranks hold back the collectives that follow it
    needs_all: bool = False  # no rank can complete it if one fails: then the others give up
    failure: str = ""  # of such a call: the first rank that failed, and why

    @property
    def is_sent(self) -> bool:
        return self.deferred is None

    def add_part(self, host: int, parts: Parts) -> None:
        """Record how the call ended on the ranks of a host."""
        self.waiting_hosts.discard(host)
        self.parts.append(parts)
        for part in parts:
            self.done_ranks.update(part.ranks)

    def merged_parts(self) -> Parts:
        """Return how the call ended on all ranks that are known to have finished."""
        return self.parts[0] if len(self.parts) == 1 else merge_parts(self.parts)

    def parts_without_waiting(self) -> Parts:
        """Return how the call ended if nobody waits any longer: ranks without an outcome are lost, or skipped."""
        known = self.merged_parts()
        reported = {rank for part in known for rank in part.ranks}
        lost = tuple(exited.rank for exited in self.lost if exited.rank not in reported)
        skipped = tuple(rank for rank in self.ranks if rank not in reported and rank not in lost)
        found = list(known)
        if lost:
            found.append(OutcomeGroup(lost, Outcome(status="lost")))
        if skipped:
            found.append(OutcomeGroup(skipped, Outcome(status="skipped")))
        return tuple(found)

    def remaining_ranks(self, exited: Collection[int] = ()) -> Ranks:
        """Return the ranks that may still run it."""
        return tuple(rank for rank in self.ranks if rank not in self.done_ranks and rank not in exited)

    def stop(self, ranks: Iterable[int], deadline: float, *, ends_queued: bool = True) -> None:
        """Record that ranks were sent a Stop of it.

        Args:
            ends_queued: also on ranks that have it in their queue; otherwise these will begin it.
        """
        stopping = set(ranks)
        self.is_stopped = self.is_stopped or (ends_queued and set(self.remaining_ranks()) <= stopping)
        self.stop_deadline = deadline
        self.stopping_ranks |= stopping & set(self.ranks)


class CallTable:
    """All open calls, in the order in which they were opened.

    Attributes:
        is_stopping: the mesh shuts down, so lost ranks are expected.
    """

    def __init__(self, ranks: RankTable, monitoring: Monitoring) -> None:
        self._ranks, self._monitoring = ranks, monitoring
        self._calls: dict[str, ActiveCall] = {}
        self._late_output = LateOutput()
        self.is_stopping = False

    def __iter__(self) -> Iterator[ActiveCall]:
        return iter(tuple(self._calls.values()))

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def get(self, call_id: str) -> ActiveCall | None:
        return self._calls.get(call_id)

    def open(
        self,
        call_id: str,
        ranks: Ranks,
        now: float,
        on_end: Continuation,
        *,
        client: str = "",
        label: str = "",
        is_main_thread: bool = True,
        needs_all: bool = False,
        folding: messages.Folding = "numbers",
    ) -> ActiveCall:
        """Open a call; `on_end` is called when it has ended on every rank, or is abandoned."""
        hosts = self._ranks.by_host(ranks)
        new_merger = None
        if len(self._ranks.hosts) > 1:
            new_merger = partial(FoldMerger, hosts, mergeable=True, folding=folding)
        output = CallOutputStream(call_id, client, new_merger, self._monitoring.call_printed)
        call = self._calls[call_id] = ActiveCall(
            CallId(call_id), client, label, ranks, now, is_main_thread, set(hosts), output, on_end, needs_all=needs_all
        )
        return call

    def end(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        """Close a call and continue with what follows it."""
        if self.is_stopping and any(part.outcome.status == "lost" for part in parts):
            # MeshStopped reports the reason to clients that wait; this sends the last output of the ranks.
            last = call.output.finish(now)
            return [SendToClient(call.client, messages.CallOutput(call=call.id, items=last))] if last else []
        del self._calls[call.id]
        return call.on_end(call, parts, now)

    def forget(self, call: ActiveCall) -> None:
        """Close a call that no rank has been sent."""
        del self._calls[call.id]

    # ---- reports

    def output_received(self, host: int, report: messages.CallOutput, now: float) -> list[Effect]:
        call = self._calls.get(report.call)
        if call is None:  # output after the end of its call, from a thread that the cell left behind
            return self._late_output.add(report.call, report.items, now)
        return call.output.add(host, report.items, now)

    def part_received(self, host: int, report: messages.CallFinished, now: float) -> list[Effect]:
        """Record that a call has ended on the ranks of a host."""
        call = self._calls.get(report.call)
        if call is None:
            return []
        call.seconds = max(call.seconds, report.seconds)
        call.rank_seconds.update(report.rank_seconds or {})
        call.output.host_done(host, report.items, now)
        return self._add_part(call, host, report.outcomes, now)

    def ranks_stuck(self, report: messages.RanksStuck) -> list[Effect]:
        """Report ranks that have not returned after a Stop to the call's client."""
        call = self._calls.get(report.call)
        return [SendToClient(call.client, report)] if call is not None and call.client else []

    def host_lost(self, host: int, reason: str, now: float) -> list[Effect]:
        """End the host's part of every call as lost."""
        effects: list[Effect] = []
        for call in [call for call in self if host in call.waiting_hosts]:
            lost = tuple(rank for rank in call.ranks if rank in self._ranks and self._ranks.host_of(rank) == host)
            error = messages.RankError(ename="RankLost", evalue=f"{name_ranks(lost)}: the host {reason}", traceback=())
            effects += self._add_part(call, host, (OutcomeGroup(lost, Outcome(status="lost", error=error)),), now)
        return effects

    def _add_part(self, call: ActiveCall, host: int, parts: Parts, now: float) -> list[Effect]:
        call.add_part(host, parts)
        for part in parts:
            self._monitoring.ranks_finished(call.id, part.ranks)
        if call.waiting_hosts:
            return call.output.host_finished(now)
        return self.end(call, call.merged_parts(), now)

    def timer_fired(self, kind: str, call_id: str, now: float) -> list[Effect]:
        """Handle a timer of this class; of one of a call that has ended since nothing remains to be done."""
        if kind == "late":
            return self._late_output.timer_fired(now)
        call = self._calls.get(call_id)
        if call is None:
            return []
        match kind:
            case "flush":
                return call.output.timer_fired(now)
            case "abandon":
                end_call = messages.EndCall(call=call.id)
                concluded = SetTimer(f"concluded {call.id}", _END_CALL_TIMEOUT_S)
                return [SendToHosts(tuple(sorted(call.waiting_hosts)), end_call), concluded]
            case "concluded":
                return self.end(call, call.parts_without_waiting(), now)
        return []

    # ---- clients

    def follow(self, call: ActiveCall, client: str) -> None:
        """Send what follows of a call, and its end, to another client."""
        call.client = client
        call.output.redirect(client)
        self._monitoring.call_followed(call.id, client)

    # ---- queries

    def ranks_awaiting_input(self) -> Ranks:
        """Return the ranks that wait for a reply to input()."""
        return tuple(rank for call in self._calls.values() for rank in call.awaiting_input)

    def running_cells(self, now: float) -> tuple[messages.OpenCall, ...]:
        """Return the running cells, oldest first."""
        return self._describe(now, lambda call: call.is_main_thread and call.history_entry is not None)

    def running_user_code(self, now: float) -> tuple[messages.OpenCall, ...]:
        """Return the running cells and functions of clients, oldest first."""
        return self._describe(now, lambda call: call.runs_user_code and call.is_sent)

    def _describe(self, now: float, is_wanted: Callable[[ActiveCall], bool]) -> tuple[messages.OpenCall, ...]:
        return tuple(
            messages.OpenCall(
                call=call.id,
                label=call.label,
                ranks=call.ranks,
                client=call.client,
                seconds=now - call.opened_at,
                number=None if call.history_entry is None else call.history_entry.number,
            )
            for call in self._calls.values()
            if is_wanted(call)
        )

    def rank_infos(self) -> tuple[RankInfo, ...]:
        """Return the ranks as last reported by hosts (at most a second old), but busy or idle by their open calls.

        A rank that its host reports as idle, well after the call was sent, has finished its part, perhaps by an
        exception.
        """
        call_by_rank = {rank: call for call in self._calls.values() if call.is_main_thread for rank in call.ranks}
        found = []
        for rank in self._ranks.all:
            info, call = self._ranks.info(rank), call_by_rank.get(rank)
            if (
                info.state == "idle"
                and call is not None
                and self._ranks.reported_at(rank) < call.opened_at + _DELIVERY_S
            ):
                info = msgspec.structs.replace(info, state="busy", call=call.id, cell=call.label)
            elif info.state == "busy" and call is None:
                info = msgspec.structs.replace(info, state="idle", call=None, cell=None, line=None)
            found.append(info)
        return tuple(found)


def first_failure(parts: Parts) -> str:
    """Return how the first rank failed; "" if none did. Ranks that waited for another one in vain come last."""
    failures = [part for part in parts if part.outcome.status != "ok"]
    if not failures:
        return ""
    waited = [part.outcome.error is not None and part.outcome.error.ename in _OF_WAITING for part in failures]
    failed = failures[waited.index(False) if False in waited else 0]
    error = failed.outcome.error
    what = f"{error.ename}: {error.evalue}" if error is not None else failed.outcome.status
    return f"{name_ranks(failed.ranks)}: {what}"
