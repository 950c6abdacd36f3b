"""What processes with actors on different machines send each other: to whom it goes, and who hears of an end. Pure.

Such a process is a rank or a client, and has said which node it is. All that two of them say to each other goes by way
of the supervisor, which also knows when one has ended, and says so to those that have spoken with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.supervisor.clients import Client
from meshbook.supervisor.effects import Effect, SendToClient
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages
from meshbook.wire.messages import RelayedBytes

_NOT_HERE = "is on another machine, and is neither a rank of this mesh nor a client of it"


class ActorRelay:
    """The nodes of a mesh on several machines.

    Attributes:
        command_handlers, report_handlers: by type of message, as `MeshState` calls them.
    """

    def __init__(self, ranks: RankTable) -> None:
        self._ranks = ranks
        self._rank_of: dict[str, tuple[int, int]] = {}  # node -> rank, pid
        self._clients_of: dict[str, list[str]] = {}  # node -> clients: a process may have attached several times
        self._why_ended: BoundedDict[str, str] = BoundedDict()  # node -> of those that were here
        self._partners: dict[str, set[str]] = {}  # node -> nodes that have sent to it, or got something of it
        self.command_handlers: dict[type, Callable[[Client, Any, bytes, float], list[Effect]]] = {
            messages.ActorsOpened: self._client_opened,
            messages.RelayBytes: self._from_client,
        }
        self.report_handlers: dict[type, Callable[[int, Any, float], list[Effect]]] = {
            messages.ActorsOpened: self._rank_opened,
            messages.BytesRelayed: self._from_rank,
        }

    def ranks_exited(self, exited: Iterable[messages.RankExited]) -> list[Effect]:
        """Handle the ends of processes, also of those that were asked to end."""
        effects: list[Effect] = []
        for one in exited if self._rank_of else ():
            ended = [node for node, place in self._rank_of.items() if place == (one.rank, one.pid)]
            for node in ended:
                del self._rank_of[node]
                effects += self._ended(node, one.description_with_reason)
        return effects

    def client_left(self, client: str) -> list[Effect]:
        effects: list[Effect] = []
        for node, clients in list(self._clients_of.items()):
            if client in clients:
                clients.remove(client)
                if not clients:
                    del self._clients_of[node]
                    effects += self._ended(node, "has left the mesh, or has ended")
        return effects

    def _client_opened(self, client: Client, command: messages.ActorsOpened, body: bytes, now: float) -> list[Effect]:
        self._clients_of.setdefault(command.node, []).append(client.id)
        return []

    def _rank_opened(self, host: int, report: messages.ActorsOpened, now: float) -> list[Effect]:
        self._rank_of[report.node] = report.rank, report.pid
        return []

    def _from_client(self, client: Client, command: messages.RelayBytes, body: bytes, now: float) -> list[Effect]:
        is_its_own = client.id in self._clients_of.get(command.piece.source, ())
        return self._pass_on(command.piece) if is_its_own else []

    def _from_rank(self, host: int, report: messages.BytesRelayed, now: float) -> list[Effect]:
        rank, _ = self._rank_of.get(report.piece.source, (-1, 0))  # none: it has ended since
        return self._pass_on(report.piece) if rank == report.rank else []

    def _pass_on(self, piece: RelayedBytes) -> list[Effect]:
        effects = self._send(piece)
        if not effects:
            ended = self._why_ended.get(piece.target, _NOT_HERE)
            return self._send(RelayedBytes(piece.target, piece.source, "", ended=ended))
        if piece.target not in self._partners.get(piece.source, ()):
            self._partners.setdefault(piece.source, set()).add(piece.target)
            self._partners.setdefault(piece.target, set()).add(piece.source)
        return effects

    def _send(self, piece: RelayedBytes) -> list[Effect]:
        """Return the effect that brings a piece to its target; [] if there is no such process."""
        if (place := self._rank_of.get(piece.target)) is not None:
            return [self._ranks.send((place[0],), messages.RelayBytes(piece, ranks=(place[0],)))]
        if clients := self._clients_of.get(piece.target):
            return [SendToClient(clients[-1], messages.BytesRelayed(piece))]
        return []

    def _ended(self, node: str, why: str) -> list[Effect]:
        self._why_ended[node] = why
        effects: list[Effect] = []
        for partner in sorted(self._partners.pop(node, ())):
            self._partners.get(partner, set()).discard(node)
            effects += self._send(RelayedBytes(node, partner, "", ended=why))
        return effects
