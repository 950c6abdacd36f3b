"""When calls are sent to ranks, and what happens at their end: process groups are checked, and re-formed if broken.

A call is deferred while its ranks are not ready for it. See `CallScheduler._must_defer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from meshbook.ids import Ranks, client_of_call
from meshbook.supervisor.call_table import ActiveCall, CallTable, Continuation, Parts, first_failure
from meshbook.supervisor.clients import Client
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, SetTimer
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.position_queries import PositionQueries
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages
from meshbook.wire.messages import Outcome, OutcomeGroup
from meshbook.wire.stop_timing import ABANDON_AFTER_S, HOLD_COMMANDS_S

# Ranks up to which a call's end reports each one's seconds.
_MAX_RANKS_WITH_SECONDS = 64
# Commands that may start collectives.
_USES_GROUPS = (
    messages.RunCell,
    messages.CallFunction,
    messages.RunOps,
    messages.SaveCheckpoint,
    messages.RestoreCheckpoint,
    messages.CompareTensors,
)


class CallScheduler:
    """Starts, defers, stops and concludes the calls of clients.

    Args:
        mesh_changed: returns the effect that reports the mesh's current state to all clients.

    Attributes:
        ends_on_error: ranks that wait in a collective for a rank that has left the call get an error.
        is_held: clients' calls wait, because ranks are being replaced.
        end_listeners: called with each call and its outcomes of a client that has ended.
    """

    def __init__(
        self,
        ranks: RankTable,
        calls: CallTable,
        groups: GroupState,
        cells: CellRecord,
        monitoring: Monitoring,
        mesh_changed: Callable[[], SendToClient],
    ) -> None:
        self._ranks, self._calls, self._groups, self._cells = ranks, calls, groups, cells
        self._monitoring, self._mesh_changed = monitoring, mesh_changed
        self._positions = PositionQueries(ranks, calls, groups)
        self.ends_on_error = True
        self.is_held = False
        self.end_listeners: list[Callable[[ActiveCall, Parts], list[Effect]]] = []

    # ---- sending

    def start(self, client: Client, command: Any, body: bytes, now: float, wall_time: float) -> list[Effect]:
        """Open a client's call, and send it as soon as its ranks are ready for it."""
        is_main_thread = not isinstance(command, messages.QUERIES)
        label = getattr(command, "label", "") or type(command).__name__
        call = self._calls.open(
            command.call,
            command.ranks,
            now,
            self._ended,
            client=client.id,
            label=label,
            is_main_thread=is_main_thread,
            folding=getattr(command, "fold", "numbers"),
        )
        client.has_called = client.has_called or is_main_thread
        call.runs_user_code = isinstance(command, (messages.RunCell, messages.CallFunction, messages.RunOps))
        if isinstance(command, messages.RunCell) and not command.silent:
            whole_mesh = command.ranks == self._ranks.all
            call.history_entry = self._cells.began(command, wall_time, whole_mesh=whole_mesh, by=client.kind)
        send = self._ranks.send(command.ranks, command, body)
        if not is_main_thread:
            return [send]
        if self._must_defer(call, now):
            call.deferred = send
            return []
        forming: list[Effect] = []
        if self._groups.has_failed and isinstance(command, _USES_GROUPS):
            call.deferred = send  # so that it does not count as busy
            self._groups.has_failed = False
            forming = self._reform_groups(now)  # sent before it
        return [*forming, *self._send(call, send, now)]

    def _send(self, call: ActiveCall, send: SendToHosts, now: float) -> list[Effect]:
        call.deferred = None
        waits = isinstance(send.message, messages.RunOps) and send.message.fetch is not None
        users = waits or call.history_entry is not None or isinstance(send.message, messages.CallFunction)
        return [send, *(self._monitoring.call_began(call.id, call.client, call.ranks, now) if users else [])]

    def _must_defer(self, call: ActiveCall, now: float) -> bool:
        """Whether a call must wait, because other ranks are not ready for it.

        That is: some ranks are still in a call that was stopped, or broken process groups have not been re-formed yet.
        All calls wait HOLD_COMMANDS_S for ranks to return from a Stop, and while all have returned and only the report
        of it is in transit. A call to a rank that has not returned waits for that rank. If the groups are broken, a
        call also waits for earlier calls on its ranks, because the groups are re-formed when those have ended.
        """
        if self.is_held:
            return True
        if len(self._calls) == 1:  # only this one, as most often
            return self._positions.is_comparing
        exited = self._ranks.exited
        earlier = list(itertools.takewhile(lambda other: other is not call, self._calls))
        stopped = [other for other in self._calls if other.stopping_ranks]
        is_imminent = any(now < other.stop_deadline or not other.remaining_ranks(exited) for other in stopped)
        unavailable = {rank for other in stopped for rank in other.stopping_ranks - other.done_ranks} - exited.keys()
        unavailable.update(rank for other in earlier if not other.is_sent for rank in other.ranks)
        if self._groups.status == "broken" and not exited and not self._groups.has_failed:
            busy = [other for other in earlier if other.is_main_thread and other.is_sent]
            unavailable.update(rank for other in busy for rank in other.remaining_ranks())
            is_imminent = is_imminent or any(not other.remaining_ranks() for other in busy)
        return is_imminent or self._positions.is_comparing or not unavailable.isdisjoint(call.ranks)

    def send_deferred(self, now: float) -> list[Effect]:
        """Send the deferred calls that no longer need to wait, in their original order."""
        effects: list[Effect] = []
        for call in self._calls:
            if call.deferred is not None and not call.lost and not self._must_defer(call, now):
                effects += self._send(call, call.deferred, now)
        return effects

    def refuse_waiting(self, error: str, text: str) -> list[Effect]:
        """Refuse clients' calls that have not been sent: ranks that they name are no more."""
        return self._refuse([call for call in self._calls if call.client and call.deferred is not None], error, text)

    def refuse_without(self, new_ranks: Ranks) -> list[Effect]:
        """Refuse clients' calls that have not been sent and are for all ranks, but were sent while these were lost."""
        late = [
            call
            for call in self._calls
            if call.deferred is not None
            and getattr(call.deferred.message, "chosen_at", None) is not None
            and not set(new_ranks) <= set(call.ranks)
        ]
        error, what = self._ranks.changes[-1] if late else ("", "")
        return self._refuse(late, error, f"{what}, which this was sent without; nothing was run, run it again")

    def _refuse(self, calls: list[ActiveCall], error: str, text: str) -> list[Effect]:
        for call in calls:
            self._calls.forget(call)
            self._cells.ended(call.history_entry, (OutcomeGroup(call.ranks, Outcome(status="interrupted")),), 0.0)
        return [SendToClient(call.client, messages.Refused(call=call.id, error=error, text=text)) for call in calls]

    # ---- process groups

    def form_groups(self, now: float, on_end: Continuation) -> list[Effect]:
        """Have all ranks form the next generation of the process groups."""
        command = self._groups.begin_forming(self._ranks.all)
        self._calls.open(command.call, command.ranks, now, on_end, label="forming process groups", needs_all=True)
        return [SendToHosts(self._ranks.hosts, command)]

    def _abort_collectives(self, ranks: Ranks, reason: str) -> SendToHosts:
        """Have ranks give up what waits in the groups of this generation, formed already or being formed."""
        abort = messages.AbortCollectives(ranks=ranks, reason=reason, generation=self._groups.generation)
        return self._ranks.send(ranks, abort)

    def busy_cells(self) -> list[ActiveCall]:
        """Return the calls that ranks work on, oldest first."""
        return [call for call in self._calls if call.is_main_thread and call.is_sent]

    @property
    def is_comparing(self) -> bool:
        """Whether ranks' positions are being compared after a call that did not end well."""
        return self._positions.is_comparing

    def run_own_call(self, command: Any, now: float, on_end: Continuation, label: str, **options: bool) -> list[Effect]:
        """Send a command of the supervisor's own to ranks' main threads, or to their service threads.

        Args:
            options: `is_main_thread` and `needs_all` of the call.
        """
        self._calls.open(command.call, command.ranks, now, on_end, label=label, **options)  # type: ignore[arg-type]
        return [self._ranks.send(command.ranks, command)]

    def _reform_groups(self, now: float) -> list[Effect]:
        """Re-form broken process groups once no rank runs anything. A lost rank must be replaced first."""
        busy = any(call.is_main_thread and call.is_sent for call in self._calls)
        is_impossible = bool(self._ranks.exited) or self._calls.is_stopping or self.is_held
        if self._groups.status != "broken" or self._groups.has_failed or busy or is_impossible:
            return []
        return self.form_groups(now, self._groups_reformed)

    def _groups_reformed(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        failure = self._groups.formed(parts, call.failure)
        if not failure:
            return [self._mesh_changed()]
        notice = messages.Notice(
            f"the process groups could not be formed anew: {failure}\nThey are formed "
            "again with the next cell. If that fails too, start a new mesh: %mesh stop, then %mesh start"
        )
        output = messages.CallOutput(call=call.id, items=(messages.RankDisplay(call.ranks, notice),))
        return [self._mesh_changed(), SendToClient(None, output), *self.send_deferred(now)]

    # ---- reports of calls

    def progressed(self, report: messages.CallProgressed, now: float) -> list[Effect]:
        """Record which ranks have finished their part of a call."""
        self._monitoring.ranks_finished(report.call, report.done)
        call = self._calls.get(report.call)
        if call is None:
            return []
        call.done_ranks.update(report.done)
        if report.failure and call.needs_all and not call.failure:
            return self._give_up(call, report.failure)
        return [*(self.send_deferred(now) if call.stopping_ranks else []), *self.query_left(call.id, now)]

    def part_received(self, host: int, report: messages.CallFinished, now: float) -> list[Effect]:
        """Record that a host has finished a call; conclude the call with the last of them."""
        self._ranks.call_ended(report.outcomes)
        effects = self._calls.part_received(host, report, now)
        call = self._calls.get(report.call)
        if call is not None and call.needs_all and not call.failure and (failure := first_failure(report.outcomes)):
            effects += self._give_up(call, failure)
        if call is None or not self.ends_on_error:
            return effects
        ended_well = all(part.outcome.status == "ok" for part in report.outcomes)
        return effects + (
            self._positions.query_left_later(call) if ended_well else self._positions.query_left(call, now)
        )

    def _give_up(self, call: ActiveCall, failure: str) -> list[Effect]:
        """Have the ranks that still run a call which another has failed in give it up: they would wait for that one."""
        call.failure = failure
        remaining = call.remaining_ranks()
        return [self._abort_collectives(remaining, f"{call.label} failed on {failure}")] if remaining else []

    def query_left(self, call_id: str, now: float) -> list[Effect]:
        """Find out which ranks have left a call that still runs on others, unless the user switched that off."""
        call = self._calls.get(call_id)
        return self._positions.query_left(call, now) if call is not None and self.ends_on_error else []

    def stop_is_over(self, call_id: str, now: float) -> list[Effect]:
        """Go on after a Stop: ranks that it has not ended, which caught it, are released from those that left."""
        call = self._calls.get(call_id)
        if call is not None and now >= call.stop_deadline:
            call.is_stopped = False
        return [*self.send_deferred(now), *self.query_left(call_id, now)]

    def _ended(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        """Report a call's end to its client; check the process groups if it did not end well."""
        self._cells.ended(call.history_entry, parts, call.seconds)
        is_broken = self._groups.status == "ready" and any(part.outcome.groups_broken for part in parts)
        notices = self._groups.mark_broken(call.label, call.ranks) if is_broken else ()
        finished = messages.CallFinished(
            call=call.id,
            outcomes=parts,
            seconds=call.seconds,
            rank_seconds=call.rank_seconds if len(call.ranks) <= _MAX_RANKS_WITH_SECONDS else None,
            lost=tuple(call.lost),
            items=call.output.finish(now, *notices),
        )
        self._monitoring.call_ended(call.id)
        follow_ups = [effect for listener in self.end_listeners for effect in listener(call, parts)]
        ended_badly = call.is_sent and (call.is_holding or any(part.outcome.status != "ok" for part in parts))
        if call.is_main_thread and self._groups.status == "ready" and ended_badly:
            following = self._positions.compare(call, now, self.resume)
        else:
            following = self.resume(now)
        return [SendToClient(call.client, finished), *follow_ups, *following]

    def resume(self, now: float) -> list[Effect]:
        """Do what waited for the end of a call, or of a comparison of positions."""
        return [*self._reform_groups(now), *self.send_deferred(now)]

    # ---- Stop and lost ranks

    def interrupt(self, client: str, command: messages.Interrupt, now: float) -> list[Effect]:
        """Stop calls. A deferred call ends at once; commands that follow wait for the ranks of the others."""
        ranks = tuple(rank for rank in command.ranks if rank in self._ranks)
        if not ranks:
            return []
        stop = msgspec.structs.replace(command, ranks=ranks, client=client)
        effects: list[Effect] = [self._ranks.send(ranks, stop)]
        for call in self._calls:
            if not call.is_main_thread or command.target not in (None, call.id) or set(call.ranks).isdisjoint(ranks):
                continue
            if not call.is_sent:
                if command.target is not None or call.client == client:  # without a target: what runs, and one's own
                    skipped = OutcomeGroup(call.ranks, Outcome(status="interrupted"))
                    effects += self._calls.end(call, (skipped,), now)
            elif call.client:
                ends_queued = command.target is not None or client_of_call(call.id) == client
                call.stop(ranks, now + HOLD_COMMANDS_S, ends_queued=ends_queued)
                if self._groups.status == "ready" and not call.is_holding:
                    call.is_holding = True
                    hold = messages.HoldCollectives(ranks=call.ranks, about_call=call.id)
                    effects.append(self._ranks.send(call.ranks, hold))
                effects.append(SetTimer(f"release {call.id}", HOLD_COMMANDS_S))
        return effects

    def rank_lost(self, report: messages.RankExited) -> list[Effect]:
        """Abort what waits for a lost rank, and interrupt the calls that it took part in."""
        effects: list[Effect] = []
        exited = self._ranks.exited
        if living := self._ranks.living:  # idle ranks too: their next collective would wait for the dead one
            reason = f"rank {report.rank} {report.description}"
            effects.append(self._abort_collectives(living, reason))
        for call in self._calls:
            if report.rank not in call.ranks or not call.is_main_thread:
                continue
            call.lost.append(report)
            if not call.is_sent:
                continue
            if survivors := tuple(rank for rank in call.ranks if rank not in exited):
                effects.append(self._ranks.send(survivors, messages.Interrupt(ranks=survivors, target=call.id)))
                effects.append(SetTimer(f"abandon {call.id}", ABANDON_AFTER_S))
        return effects

    def end_unsent(self, now: float) -> list[Effect]:
        """End the calls that lost a rank before they were sent: the survivors would begin what is not waited for."""
        effects: list[Effect] = []
        for call in [call for call in self._calls if call.lost and not call.is_sent]:
            lost = tuple(report.rank for report in call.lost)
            parts = [OutcomeGroup(lost, Outcome(status="lost"))]
            if others := tuple(rank for rank in call.ranks if rank not in lost):
                parts.append(OutcomeGroup(others, Outcome(status="interrupted")))
            effects += self._calls.end(call, tuple(parts), now)
        return effects
