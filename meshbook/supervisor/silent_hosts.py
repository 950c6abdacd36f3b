"""What clients learn of a host that does not answer and does not count as lost yet. Pure.

Its machine may be overloaded, paused (the move of a virtual machine) or cut off for a moment, and comes back with all
that its ranks hold. Those who wait for it learn of it at once, and a Stop does not wait for it.
"""

from __future__ import annotations

from meshbook.ids import name_ranks
from meshbook.supervisor.call_table import ActiveCall, CallTable
from meshbook.supervisor.effects import Effect, SendToClient
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages


class SilentHosts:
    """Tells of hosts that do not answer, and of those that answer again."""

    def __init__(self, ranks: RankTable, calls: CallTable, machines: MachineTable) -> None:
        self._ranks, self._calls, self._machines = ranks, calls, machines

    def fell_silent(self, host: int, silent_s: float, lost_after_s: float) -> list[Effect]:
        """Tell those whose calls wait for a host; a call that was stopped is not waited for on it."""
        effects: list[Effect] = []
        for call in self._waiting_for(host):
            if call.stopping_ranks:
                effects += self.stop_unanswered(call.id)
            else:
                ranks = name_ranks(self._on_host(call, host))
                consequence = f"{ranks} count as lost" if ranks.startswith("ranks") else f"{ranks} counts as lost"
                text = (
                    f"{self._machines.who(host)} has not answered for {silent_s:.0f} s (overloaded, paused, hung or "
                    f"cut off); {consequence} if it does not within {lost_after_s:.0f} s"
                )
                effects.append(_notice(call, text))
        return effects

    def answered(self, host: int, silent_s: float) -> list[Effect]:
        """Tell those whose calls wait for a host that it answers again."""
        text = f"{self._machines.who(host)} answers again, after {silent_s:.0f} s; nothing is lost"
        return [_notice(call, text) for call in self._waiting_for(host)]

    def stop_unanswered(self, call_id: str) -> list[Effect]:
        """Name the ranks of silent hosts to the client of a call that was stopped: it does not wait for them."""
        call, watch = self._calls.get(call_id), self._machines.watch
        if call is None or watch is None:
            return []
        effects: list[Effect] = []
        for host in sorted(call.waiting_hosts):
            ranks = tuple(rank for rank in self._on_host(call, host) if rank in call.stopping_ranks)
            if ranks and (silent_s := watch.silent_s(host)):
                reason = f"{self._machines.who(host)} has not answered for {silent_s:.0f} s"
                effects += self._calls.ranks_stuck(messages.RanksStuck(call=call.id, ranks=ranks, reason=reason))
        return effects

    def _waiting_for(self, host: int) -> list[ActiveCall]:
        return [call for call in self._calls if call.runs_user_code and call.client and host in call.waiting_hosts]

    def _on_host(self, call: ActiveCall, host: int) -> tuple[int, ...]:
        return tuple(rank for rank in call.remaining_ranks() if self._ranks.host_of(rank) == host)


def _notice(call: ActiveCall, text: str) -> SendToClient:
    item = messages.RankDisplay(ranks=call.ranks, item=messages.Notice(text))
    return SendToClient(call.client, messages.CallOutput(call=call.id, items=(item,)))
