"""What a client learns of its cell that waits for another client's: ranks run one command at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from meshbook.ids import name_ranks
from meshbook.supervisor.call_table import ActiveCall, CallTable
from meshbook.supervisor.clients import Clients
from meshbook.supervisor.effects import Effect, SendToClient, SetTimer
from meshbook.wire import messages

# Seconds for which a cell waits without a word: one that soon begins needs none.
_SILENT_S = 1.0


class WaitingCells:
    """Says of a cell, once, which other client's cell it waits for."""

    def __init__(self, calls: CallTable, clients: Clients, wall_time: Callable[[float], float]) -> None:
        self._calls, self._clients, self._wall_time = calls, clients, wall_time

    def began(self, call_id: str) -> list[Effect]:
        """Handle a call that was opened; the timer's name is "waiting" and the call's id."""
        return [SetTimer(f"waiting {call_id}", _SILENT_S)] if self._calls_before(call_id) else []

    def timer_fired(self, call_id: str) -> list[Effect]:
        call, before = self._calls.get(call_id), self._calls_before(call_id)
        if call is None or not before:
            return []
        first = before[0]
        ranks = tuple(rank for rank in first.remaining_ranks() if rank in call.ranks)
        label = first.label if first.history_entry is not None else "a call"
        others = f", and for {len(before) - 1} more behind it" if len(before) > 1 else ""
        text = (
            f"{call.label} waits for {label} of {self._clients.name(first.client)}, which runs on {name_ranks(ranks)} "
            f"since {datetime.fromtimestamp(self._wall_time(first.opened_at)):%H:%M:%S}{others}"
        )
        item = messages.RankDisplay(ranks=call.ranks, item=messages.Notice(text))
        return [SendToClient(call.client, messages.CallOutput(call=call.id, items=(item,)))]

    def _calls_before(self, call_id: str) -> list[ActiveCall]:
        """Return the calls of other clients that ranks of a cell run first, in their order; none if it is no cell."""
        call = self._calls.get(call_id)
        if call is None or call.history_entry is None:
            return []
        before: list[ActiveCall] = []
        for other in self._calls:
            if other is call:
                break
            if other.is_main_thread and other.client not in ("", call.client):
                before += [other] if set(other.remaining_ranks()) & set(call.ranks) else []
        return before
