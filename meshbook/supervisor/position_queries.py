"""The supervisor's queries for the ranks' positions in their collectives, and what follows from the replies.

After a call that failed on some rank, all ranks are compared: groups that are out of step must be re-formed. While a
call runs, ranks that have finished it are queried whether they have left its collectives, so that those that wait for
them get an error.
"""

from __future__ import annotations

from collections.abc import Callable

from meshbook.ids import CallId, Ranks
from meshbook.supervisor.call_table import ActiveCall, CallTable, Continuation, Parts
from meshbook.supervisor.desync import collect_positions, find_desynced_groups, has_left
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.supervisor.group_state import GroupState
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages

# Seconds until ranks that have finished a call well are queried, and until those are queried again that may still take
# part in its collectives.
_RECHECK_LEFT_S = 1.0


class PositionQueries:
    """Opens the queries as calls of the supervisor's own, each of which ends within a second."""

    def __init__(self, ranks: RankTable, calls: CallTable, groups: GroupState) -> None:
        self._ranks, self._calls, self._groups = ranks, calls, groups
        self._num_queries = 0
        self._num_comparing = 0

    @property
    def is_comparing(self) -> bool:
        """Whether positions are being compared. A call that starts meanwhile could compute wrong numbers."""
        return self._num_comparing > 0

    def compare(self, call: ActiveCall, now: float, then: Callable[[float], list[Effect]]) -> list[Effect]:
        """Compare all ranks after a call that did not succeed everywhere; call `then` afterwards."""

        def compared(query: ActiveCall, parts: Parts, now: float) -> list[Effect]:
            self._num_comparing -= 1
            return [*self._compared(call, query.ranks, parts), *then(now)]

        self._num_comparing += 1
        return self._query("compare", call.id, self._ranks.all, now, compared)

    def query_left(self, call: ActiveCall, now: float) -> list[Effect]:
        """Query the ranks that finished a call in which others continue: have they certainly left its collectives?"""
        call.is_left_query_due = False
        newly_done = call.done_ranks - call.left_ranks if self._may_leave(call) else ()
        if not newly_done or call.is_stopped or call.is_querying_left:
            return []
        call.is_querying_left = True
        return self._query(
            "left",
            call.id,
            tuple(rank for rank in call.ranks if rank in newly_done),
            now,
            lambda query, parts, now: self._left_ranks_received(call, parts),
        )

    def query_left_later(self, call: ActiveCall) -> list[Effect]:
        """Query them in a while, if others continue then: mostly all ranks end a call at about the same time."""
        if call.is_left_query_due or not self._may_leave(call):
            return []
        call.is_left_query_due = True
        return [SetTimer(f"left {call.id}", _RECHECK_LEFT_S)]

    def _may_leave(self, call: ActiveCall) -> bool:
        """Whether ranks that have finished a call may be missed by others, which continue."""
        has_groups = self._groups.status in ("ready", "broken") and not self._ranks.exited
        return has_groups and call.is_main_thread and len(call.done_ranks) < len(call.ranks)

    def _query(self, kind: str, about: CallId, ranks: Ranks, now: float, on_end: Continuation) -> list[Effect]:
        self._num_queries += 1
        query = self._calls.open(f"{kind}-{self._num_queries}", ranks, now, on_end, label=kind, is_main_thread=False)
        return [self._ranks.send(ranks, messages.QueryPositions(call=query.id, ranks=ranks, about_call=about))]

    def _compared(self, call: ActiveCall, ranks: Ranks, parts: Parts) -> list[Effect]:
        if self._groups.status != "ready":
            return []
        desynced = find_desynced_groups(collect_positions(parts), set(call.ranks))
        resume = messages.ResumeCollectives(
            ranks=ranks,
            about_call=call.id,
            generation=self._groups.generation,
            broken_groups=tuple(desynced),
            reason=next(iter(desynced.values()), ""),
        )
        effects: list[Effect] = [self._ranks.send(ranks, resume)]
        if desynced and (notices := self._groups.mark_broken(call.label, ranks)):
            effects.append(SendToClient(call.client or None, messages.CallOutput(call=call.id, items=notices)))
        return effects

    def _left_ranks_received(self, call: ActiveCall, parts: Parts) -> list[Effect]:
        if self._calls.get(call.id) is not call:
            return []  # it ended meanwhile
        call.is_querying_left = False
        left = tuple(
            position for position in collect_positions(parts).values() if has_left(position) and not call.is_stopped
        )
        call.left_ranks.update(position.rank for position in left)
        effects: list[Effect] = []
        if left and (remaining := call.remaining_ranks(self._ranks.exited)):
            effects.append(
                self._ranks.send(remaining, messages.RanksLeft(call=call.id, ranks=remaining, left_positions=left))
            )
        if call.done_ranks - call.left_ranks:
            effects += self.query_left_later(call)
        return effects
