"""Requests of ranks for what a user types: whose they are, and what becomes of them when nobody is left to type.

input() is asked of the client of the call. So is the debugger, unless another client has asked ranks to stop in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.supervisor.call_table import ActiveCall, CallTable, Parts
from meshbook.supervisor.clients import Client, Clients
from meshbook.supervisor.effects import Effect, SendToClient
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages


class InputRequests:
    """Passes requests for input to clients, and their replies to ranks.

    Attributes:
        command_handlers: by type of command, as `MeshState` calls them.
    """

    def __init__(
        self,
        ranks: RankTable,
        calls: CallTable,
        clients: Clients,
        start_call: Callable[[Client, Any, bytes, float], list[Effect]],
    ) -> None:
        """
        Args:
            start_call: sends a query of a client to ranks.
        """
        self._ranks, self._calls, self._clients, self._start_call = ranks, calls, clients, start_call
        self._is_prompt_open = False
        self.command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.InputReply: self._reply,
            messages.StopInDebugger: self._stop_in_debugger,
            messages.LeaveDebugger: self._leave_debugger,
        }

    def requested(self, host: int, report: messages.InputRequest, now: float) -> list[Effect]:
        """Forward a rank's request; without a client that can reply, the rank gets EOFError."""
        call = self._calls.get(report.call)
        client = "" if call is None else (report.stop is not None and call.debugger) or call.client
        if call is None or client not in self._clients:
            return [self._decline(report.call, report.rank)] if report.rank in self._ranks else []
        call.awaiting_input[report.rank] = client
        return [SendToClient(client, report), *self._report_prompts()]

    def client_left(self, client: str) -> list[Effect]:
        """Reply to requests that nobody can reply to any more. The client's calls continue."""
        effects: list[Effect] = []
        for call in self._calls:
            effects += self._decline_all(call, client)
            if call.debugger == client:
                effects += self._leave(call)
        return effects + self._report_prompts()

    def call_ended(self, call: ActiveCall, parts: Parts) -> list[Effect]:
        """Tell the client whose debugger a call had that it has ended."""
        ended = messages.DebuggedCallEnded(call.id, tuple(call.lost))
        return [*([SendToClient(call.debugger, ended)] if call.debugger else []), *self._report_prompts()]

    def _reply(self, client: Client, command: messages.InputReply, body: bytes, now: float) -> list[Effect]:
        call = self._calls.get(command.target)
        if call is not None:
            call.awaiting_input.pop(command.rank, None)
        replied = [self._ranks.send((command.rank,), command, body)] if command.rank in self._ranks else []
        return [*replied, *self._report_prompts()]

    def _stop_in_debugger(
        self, client: Client, command: messages.StopInDebugger, body: bytes, now: float
    ) -> list[Effect]:
        call = self._calls.get(command.target)
        if call is None or not call.is_sent or not set(command.ranks) <= set(call.ranks):
            text = "what ran there has ended, so that nothing can be stopped in the debugger"
            return [SendToClient(client.id, messages.Refused(call=command.call, error="UsageError", text=text))]
        effects = self._start_call(client, command, body, now)
        if command.call in self._calls:  # not refused
            call.debugger = client.id
        return effects

    def _leave_debugger(self, client: Client, command: messages.LeaveDebugger, body: bytes, now: float) -> list[Effect]:
        call = self._calls.get(command.target)
        if call is None or call.debugger != client.id:
            return []
        return [*self._decline_all(call, client.id), *self._leave(call), *self._report_prompts()]

    def _leave(self, call: ActiveCall) -> list[Effect]:
        call.debugger = ""
        living = tuple(rank for rank in call.ranks if rank in self._ranks.living)
        return [self._ranks.send(living, messages.LeaveDebugger(living, call.id))] if living else []

    def _decline_all(self, call: ActiveCall, client: str) -> list[Effect]:
        waiting = sorted(rank for rank, asked in call.awaiting_input.items() if asked == client)
        for rank in waiting:
            del call.awaiting_input[rank]
        return [self._decline(call.id, rank) for rank in waiting]

    def _decline(self, call: str, rank: int) -> Effect:
        reply = messages.InputReply(target=call, rank=rank, text=None)  # type: ignore[arg-type]
        return self._ranks.send((rank,), reply)

    def _report_prompts(self) -> list[Effect]:
        """Tell ranks when the first prompt is open, and when the last one is answered."""
        is_open = bool(self._calls.ranks_awaiting_input())
        if is_open == self._is_prompt_open:
            return []
        self._is_prompt_open, living = is_open, self._ranks.living
        return [self._ranks.send(living, messages.PromptsOpen(living, is_open))] if living else []
