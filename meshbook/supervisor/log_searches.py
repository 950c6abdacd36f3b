"""What clients ask of the output of ranks and hosts: which hosts search for whom, and which still have to answer. Pure.

Hosts search; their hits are passed on to the client as they come, and folded there. A host that is lost, or was lost
before, ends its part of a search with a sentence that says so: what it has kept cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from meshbook.ids import format_ranks
from meshbook.supervisor.clients import Client
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts
from meshbook.supervisor.machines import MachineTable
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages


@dataclass
class _OpenSearch:
    command: messages.SearchLogs
    client: str
    waiting: set[int]  # hosts


class LogSearches:
    """The open queries and searches of all clients.

    Attributes:
        command_handlers: by type of command, as `MeshState` calls them.
    """

    def __init__(self, ranks: RankTable, machines: MachineTable) -> None:
        self._ranks, self._machines = ranks, machines
        self._queries: dict[str, tuple[str, int]] = {}  # call -> client, host
        self._open: dict[str, _OpenSearch] = {}
        self.command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.QueryLogs: self._query,
            messages.QueryHostLog: self._query_host,
            messages.SearchLogs: self._search,
            messages.EndLogSearch: self._end,
        }

    # ---- commands

    def _query(self, client: Client, command: messages.QueryLogs, body: bytes, now: float) -> list[Effect]:
        if refused := self._refuse_unknown(client, command.call, (command.rank,)):
            return refused
        host = self._ranks.host_of(command.rank)
        if host in self._machines.lost:
            return [SendToClient(client.id, messages.CommandReply(call=command.call, text=self._lost(host)))]
        self._queries[command.call] = client.id, host
        return [SendToHosts((host,), command, body)]

    def _query_host(self, client: Client, command: messages.QueryHostLog, body: bytes, now: float) -> list[Effect]:
        host = self._machines.find(command.host)
        if host is None:
            known = ", ".join(map(self._machines.label, self._ranks.hosts)) or "none yet"
            text = f"there is no host {command.host!r} in this mesh; its hosts: {known}"
            return [SendToClient(client.id, messages.Refused(call=command.call, error="UsageError", text=text))]
        text = self._machines.read_log(host, command.limit_bytes)
        if host in self._machines.lost:
            text += f"{self._machines.who(host)} {self._machines.lost[host]}\n"
        return [SendToClient(client.id, messages.CommandReply(call=command.call, text=text))]

    def _search(self, client: Client, command: messages.SearchLogs, body: bytes, now: float) -> list[Effect]:
        hosts = self._ranks.hosts
        if not hosts:
            text = "the mesh has no ranks yet, so there is nothing to search in"
            return [SendToClient(client.id, messages.Refused(call=command.call, error="NotAttached", text=text))]
        if refused := self._refuse_unknown(client, command.call, command.ranks):
            return refused
        reachable = tuple(host for host in hosts if host not in self._machines.lost)
        self._open[command.call] = _OpenSearch(command, client.id, set(hosts))
        effects: list[Effect] = [SendToHosts(reachable, command, body)] if reachable else []
        for host in hosts:
            if host not in reachable:
                effects += self._ended_by_loss(command.call, host)
        return effects

    def _end(self, client: Client, command: messages.EndLogSearch, body: bytes, now: float) -> list[Effect]:
        search = self._open.get(command.call)
        if search is None or search.client != client.id:
            return []
        return self._close(command.call)

    def client_left(self, client: str) -> list[Effect]:
        """End the searches of a client that is gone."""
        self._queries = {call: query for call, query in self._queries.items() if query[0] != client}
        calls = [call for call, search in self._open.items() if search.client == client]
        return [effect for call in calls for effect in self._close(call)]

    # ---- reports of hosts

    def found(self, host: int, report: messages.LogsFound) -> list[Effect]:
        """Pass on what a host has found."""
        search = self._open.get(report.call)
        if search is None or host not in search.waiting:
            return []
        kept = report.kept
        if kept is not None and len(self._ranks.hosts) > 1:
            kept = msgspec.structs.replace(kept, host=self._machines.who(host))
        problem = f"{self._machines.who(host)}: {report.problem}" if report.problem else ""
        ended = report.ended and self._host_ended(report.call, host)
        return [SendToClient(search.client, msgspec.structs.replace(report, kept=kept, ended=ended, problem=problem))]

    def replied(self, report: messages.CommandReply) -> list[Effect]:
        """Pass on the last output of a rank."""
        query = self._queries.pop(report.call, None)
        return [] if query is None else [SendToClient(query[0], report)]

    def host_lost(self, host: int) -> list[Effect]:
        """Answer for a host that is lost. `MachineTable` knows it."""
        effects: list[Effect] = []
        for call, (client, asked) in list(self._queries.items()):
            if asked == host:
                del self._queries[call]
                effects.append(SendToClient(client, messages.CommandReply(call=call, text=self._lost(host))))  # type: ignore[arg-type]
        for call, search in list(self._open.items()):
            if host in search.waiting:
                effects += self._ended_by_loss(call, host)
        return effects

    # ---- helpers

    def _refuse_unknown(self, client: Client, call: Any, ranks: tuple[int, ...]) -> list[Effect]:
        unknown = [rank for rank in ranks if rank not in self._ranks]
        if not unknown:
            return []
        verb = "is" if len(unknown) == 1 else "are"
        text = f"rank {format_ranks(unknown)} {verb} not in this mesh of ranks {format_ranks(self._ranks.all)}"
        return [SendToClient(client.id, messages.Refused(call=call, error="MeshShapeError", text=text))]

    def _lost(self, host: int) -> str:
        return f"{self._machines.who(host)} {self._machines.lost[host]}: what its ranks printed cannot be read"

    def _ended_by_loss(self, call: str, host: int) -> list[Effect]:
        search = self._open[call]
        ended = self._host_ended(call, host)
        report = messages.LogsFound(search.command.call, ended=ended, problem=self._lost(host))
        return [SendToClient(search.client, report)]

    def _host_ended(self, call: str, host: int) -> bool:
        """Record that a host reports no more; return whether none does."""
        search = self._open[call]
        search.waiting.discard(host)
        if search.waiting:
            return False
        del self._open[call]
        return True

    def _close(self, call: str) -> list[Effect]:
        search = self._open.pop(call)
        hosts = tuple(sorted(search.waiting))
        return [SendToHosts(hosts, messages.EndLogSearch(search.command.call))] if hosts else []
