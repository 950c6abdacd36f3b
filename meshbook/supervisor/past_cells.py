"""Commands of clients about cells that ran, and about cells whose client is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshbook.ids import format_ranks
from meshbook.supervisor.call_table import CallTable
from meshbook.supervisor.clients import Client, Clients
from meshbook.supervisor.effects import Effect, SendToClient
from meshbook.supervisor.history import CellRecord
from meshbook.supervisor.kept_output import KeptOutput
from meshbook.wire import messages


class PastCells:
    """Keeps the output of cells on its way to clients, and answers with it.

    Attributes:
        command_handlers: by type of command, as `MeshState` calls them.
    """

    def __init__(
        self, clients: Clients, calls: CallTable, cells: CellRecord, wall_time: Callable[[float], float]
    ) -> None:
        self._clients, self._calls, self._cells, self._wall_time = clients, calls, cells, wall_time
        self._kept = KeptOutput()
        self.command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.QueryHistory: self._query_history,
            messages.QueryOutput: self._query_output,
            messages.QueryNewOutput: self._query_new_output,
            messages.QueryUnattended: self._query_unattended,
            messages.FollowCall: self._follow_call,
            messages.AcknowledgeCells: self._acknowledge_cells,
        }

    def began(self, command: messages.RunCell, client: str) -> None:
        """Record that a client starts a cell."""
        self._kept.began(command.call, command.execution_count, command.ranks, client)

    def handled(self, client: Client, command: Any, effects: list[Effect], now: float) -> list[Effect]:
        """Record what an agent did, and keep the output of cells in the effects of a client's command. Return them."""
        if client.is_agent and (action := _describe_action(command)):
            self._cells.acted(action, getattr(command, "ranks", ()), client.kind, self._wall_time(now))
        if isinstance(command, messages.FollowCall):
            return effects  # what they contain is kept already
        return self.keep(effects, now)

    def keep(self, effects: list[Effect], now: float) -> list[Effect]:
        """Keep the output and the ends of cells that are sent to clients. Return the effects."""
        for effect in effects:
            if type(effect) is SendToClient:
                message = effect.message
                if type(message) is messages.CallFinished:
                    self._kept.ended(message, now)
                elif type(message) is messages.CallOutput:
                    self._kept.printed(message.call, message.items, now)
        return effects

    def client_left(self, client: str, now: float) -> None:
        self._kept.client_left(client, now)

    # ---- commands

    def _query_history(self, client: Client, command: messages.QueryHistory, body: bytes, now: float) -> list[Effect]:
        history = self._kept.mark(self._cells.history.entries())
        return [SendToClient(client.id, messages.CommandReply(call=command.call, history=history))]

    def _query_output(self, client: Client, command: messages.QueryOutput, body: bytes, now: float) -> list[Effect]:
        kept = self._kept.find(command.number, self._cells.history.entries())
        if not kept:
            known = self._kept.describe_numbers()
            return self._refuse(
                client, command, f"no output of a cell {command.number} is kept; it is of cells: {known}"
            )
        return [SendToClient(client.id, messages.CommandReply(call=command.call, kept=kept))]

    def _query_new_output(
        self, client: Client, command: messages.QueryNewOutput, body: bytes, now: float
    ) -> list[Effect]:
        entries = self._cells.history.entries()
        if command.target is not None and command.target not in self._kept:
            text = f"no cell {command.target} is kept; output is kept of cells: {self._kept.describe_numbers()}"
            return self._refuse(client, command, text, "MeshNameError")
        output = self._kept.new_output(command, entries, self._wall_time)
        return [SendToClient(client.id, messages.CommandReply(call=command.call, output=output))]

    def _query_unattended(
        self, client: Client, command: messages.QueryUnattended, body: bytes, now: float
    ) -> list[Effect]:
        running = tuple(
            msgspec.structs.replace(call, orphaned=call.client not in self._clients)
            for call in self._calls.running_cells(now)
        )
        ended = self._kept.unattended(self._cells.history.entries())
        return [SendToClient(client.id, messages.CommandReply(call=command.call, open_calls=running, history=ended))]

    def _follow_call(self, client: Client, command: messages.FollowCall, body: bytes, now: float) -> list[Effect]:
        """Send an open cell's output and end to this client; if it has ended meanwhile, what it came to."""
        call, finished = self._calls.get(command.call), self._kept.finished(command.call)
        if call is not None and call.client in self._clients:
            return self._refuse(client, command, f"{call.label or 'the cell'} is another client's, which is attached")
        if call is None and finished is None:
            return self._refuse(client, command, "the cell has ended, and its output is not kept")
        if call is not None:
            self._calls.follow(call, client.id)
        items = self._kept.follow(command.call, client.id)
        effects: list[Effect] = []
        if items:
            effects.append(SendToClient(client.id, messages.CallOutput(call=command.call, items=items)))
        if finished is not None:
            effects.append(SendToClient(client.id, finished))
        return effects

    def _acknowledge_cells(
        self, client: Client, command: messages.AcknowledgeCells, body: bytes, now: float
    ) -> list[Effect]:
        self._kept.acknowledge(command.calls)
        return []

    def _refuse(self, client: Client, command: Any, text: str, error: str = "UsageError") -> list[Effect]:
        return [SendToClient(client.id, messages.Refused(call=command.call, error=error, text=text))]


def _describe_action(command: Any) -> str:
    """Return the magic that does what a command does, if it changes a mesh and is no cell; else ""."""
    match command:
        case messages.StartMesh():
            return f"%mesh start --axes {_format_axes(command.spec.axes)}"
        case messages.Interrupt():
            return f"%mesh interrupt {format_ranks(command.ranks)}"
        case messages.KillRanks():
            return f"%mesh kill {format_ranks(command.ranks)}"
        case messages.HealMesh():
            return "%mesh heal"
        case messages.ResizeMesh():
            return f"%mesh resize {_format_axes(command.axes)}"
    return ""


def _format_axes(axes: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())
