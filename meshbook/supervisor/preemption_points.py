"""Has the ranks of a running cell agree in which step it is preempted; see `rank/preemption.py`. Pure."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.ids import CallId
from meshbook.supervisor.call_table import ActiveCall, Parts
from meshbook.supervisor.effects import Effect, SetTimer
from meshbook.supervisor.rank_table import RankTable
from meshbook.supervisor.scheduler import CallScheduler
from meshbook.wire import messages

# Seconds until ranks are asked again, of which not all have answered.
_ASK_AGAIN_S = 1.0


class PreemptionPoints:
    """The calls whose ranks were asked, of one preemption.

    Args:
        call_id: makes the id of a call of this preemption.
        timer: makes its timers; "ask" calls for `ask_again`.
    """

    def __init__(
        self,
        ranks: RankTable,
        scheduler: CallScheduler,
        call_id: Callable[[str], CallId],
        timer: Callable[[str, float], SetTimer],
    ) -> None:
        self._ranks, self._scheduler, self._call_id, self._timer = ranks, scheduler, call_id, timer
        self.reset()

    def reset(self) -> None:
        self._asked: set[str] = set()
        self._undecided: set[str] = set()  # of these, those of which not all ranks have answered
        self._num_asked = 0

    def ask(self, call: ActiveCall, reason: str, now: float) -> list[Effect]:
        """Ask the ranks of a call, once, how often it has asked whether it is preempted."""
        if call.id in self._asked or not call.runs_user_code:
            return []
        self._asked.add(call.id)
        self._num_asked += 1
        query = messages.QueryPreemptionPoint(
            call=self._call_id(f"ask{self._num_asked}"), ranks=call.ranks, about_call=call.id
        )
        decide = lambda _, parts, now: self._decide(call, reason, parts)  # noqa: E731
        return self._scheduler.run_own_call(query, now, decide, "agreeing on a step", is_main_thread=False)

    def ask_again(self) -> None:
        """Have those asked again that have not all answered."""
        self._asked -= self._undecided
        self._undecided.clear()

    def _decide(self, call: ActiveCall, reason: str, parts: Parts) -> list[Effect]:
        asked = {
            rank: part.outcome.reply["asked"]
            for part in parts
            if part.outcome.status == "ok" and part.outcome.reply is not None
            for rank in part.ranks
        }
        at = max(asked.values()) + 1 if asked.keys() >= set(call.ranks) else None
        point = messages.SetPreemptionPoint(ranks=call.ranks, about_call=call.id, at=at, reason=reason)
        if at is not None:
            return [self._ranks.send(call.ranks, point)]
        self._undecided.add(call.id)  # a rank that keeps the interpreter may have passed any number
        return [self._ranks.send(call.ranks, point), self._timer("ask", _ASK_AGAIN_S)]
