"""A mesh on other machines as this program reaches actors there: by way of its supervisor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshbook.actors.runtime.relayed_peer import MeshCarrier
from meshbook.actors.runtime.transport import Transport
from meshbook.wire import messages

if TYPE_CHECKING:
    from meshbook.controller.session import Session


class SessionRelay(MeshCarrier):
    """Passes on what this program and the processes of a mesh on other machines send each other."""

    def __init__(self, session: Session, transport: Transport) -> None:
        self._connection = session.connection
        self._nodes: set[str] = set()
        listeners, machines = session.connection.listeners, transport.machines
        listeners.report_handlers[messages.BytesRelayed] = lambda report: machines.piece_received(self, report.piece)
        listeners.mesh_stopped.append(lambda reason: machines.remove_mesh(self, f"has ended with its mesh: {reason}"))
        listeners.closed.append(lambda: machines.remove_mesh(self, "cannot be reached: this program has left its mesh"))
        session.connection.send(messages.ActorsOpened(transport.address.node, os.getpid()))
        machines.add_mesh(self)

    def add_nodes(self, nodes: set[str]) -> None:
        """Record processes of the mesh."""
        self._nodes |= nodes

    def reaches(self, node: str) -> bool:
        return node in self._nodes

    def send(self, piece: messages.RelayedBytes) -> None:
        self._connection.send(messages.RelayBytes(piece))
