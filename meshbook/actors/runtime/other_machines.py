"""Processes with actors on other machines, as a process reaches them: directly, or by way of a mesh that has both.

A mesh on several machines always has a way, which its supervisor is a part of; it also says when a process has ended.
Ranks connect to each other's machines where the network lets them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

from meshbook.actors.runtime.direct_links import DirectLinks
from meshbook.actors.runtime.exit_reasons import ExitReasons
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.reactor import Reactor
from meshbook.actors.runtime.relayed_peer import Carrier, MeshCarrier, RelayedPeer
from meshbook.errors import MeshbookError, StartError
from meshbook.wire.messages import NodeAddress, RelayedBytes

log = logging.getLogger("meshbook.actors")

# Seconds in which what a process has sent directly arrives, after the mesh has said that it has ended.
_LAST_WORDS_S: Final = 0.3


class Connections(Protocol):
    """A process's transport, which handles what peers send."""

    address: NodeAddress
    reactor: Reactor
    exit_reasons: ExitReasons

    def add_connection(self, peer: RelayedPeer) -> None: ...

    def handle_bodies(self, peer: RelayedPeer, read: Callable[[], Iterator[memoryview]]) -> None: ...

    def peer_disconnected(self, peer: RelayedPeer) -> None: ...


class OtherMachines:
    """The connections of a process to those on other machines."""

    def __init__(self, transport: Connections) -> None:
        self._transport = transport
        self._meshes: list[MeshCarrier] = []
        self._links: DirectLinks | None = None
        self._streams: dict[str, RelayedPeer] = {}  # the connections, by name

    def add_mesh(self, mesh: MeshCarrier) -> None:
        """Reach processes by way of a mesh. Any thread."""
        self._meshes.append(mesh)

    def remove_mesh(self, mesh: MeshCarrier, reason: str) -> None:
        """Lose what is reached by way of a mesh, which has ended or was left. Any thread.

        Args:
            reason: what follows "its process".
        """
        if mesh in self._meshes:
            self._meshes.remove(mesh)
        self._transport.reactor.call_soon(lambda: self._end_streams(lambda peer: peer.carrier is mesh, reason))

    def listen_on(self, host: str) -> None:
        """Have others connect to this process, at this address of its machine. Before others know its address."""
        transport = self._transport
        try:
            self._links = DirectLinks(host, transport.address.node, transport.address.key, self.piece_received)
        except StartError as error:
            log.warning("%s; the mesh's supervisor relays what actors on other machines say", error)
            return
        transport.address = msgspec.structs.replace(
            transport.address, endpoint=self._links.endpoint, server_key=self._links.server_key
        )

    def flush(self) -> None:
        """Have what was sent on its way; no more can be sent directly. Blocks, for a second at most."""
        if self._links is not None:
            self._links.close()

    def connect(self, address: NodeAddress) -> RelayedPeer | None:
        """Return a connection to a process; None: it is on this machine, or no mesh is known that may have it.

        Raises:
            PeerLost: the mesh was left.
        """
        own = self._transport.address
        if address.machine == own.machine or not self._meshes:
            return None
        mesh = next((mesh for mesh in self._meshes if mesh.reaches(address.node)), self._meshes[-1])
        link = self._links.dial(address) if self._links is not None else None
        if link is not None:
            try:
                mesh.send(RelayedBytes(own.node, address.node, ""))  # which says, then, when that process has ended
            except MeshbookError as error:
                link.close()
                raise PeerLost(str(error)) from error
        stream = f"{own.node}.{secrets.token_hex(4)}"
        peer = RelayedPeer(link or mesh, own.node, address.node, stream, address, self._transport.reactor)
        self._streams[stream] = peer
        return peer

    def piece_received(self, carrier: Carrier, piece: RelayedBytes) -> None:
        """Take a piece that has come for this process. Any thread, in the order in which they came."""
        self._transport.reactor.call_soon(lambda: self._handle_piece(carrier, piece))

    def forget(self, peer: Any) -> None:
        """A connection has ended, or could not be used. Any thread."""
        if isinstance(peer, RelayedPeer):
            self._streams.pop(peer.stream, None)

    def _handle_piece(self, carrier: Carrier, piece: RelayedBytes) -> None:
        if piece.ended is not None:
            self._handle_end(piece.source, piece.stream, piece.ended)
            return
        if not piece.stream:
            return
        peer = self._streams.get(piece.stream)
        if peer is None or peer.node != piece.source:
            own = self._transport.address.node
            peer = RelayedPeer(carrier, own, piece.source, piece.stream, None, self._transport.reactor)
            self._streams[piece.stream] = peer
            self._transport.add_connection(peer)
        self._transport.handle_bodies(peer, lambda: peer.receive(piece))

    def _handle_end(self, node: str, stream: str, reason: str) -> None:
        def end(may_lag: bool) -> None:
            self._end_streams(
                lambda peer: peer.node == node and stream in ("", peer.stream) and peer.carrier.may_lag <= may_lag,
                reason,
            )

        end(may_lag=bool(stream))
        if not stream:  # the process has ended; what it has said before may be on its way by another way
            self._transport.reactor.call_later(_LAST_WORDS_S, lambda: end(may_lag=True))

    def _end_streams(self, is_meant: Callable[[RelayedPeer], bool], reason: str) -> None:
        for peer in [peer for peer in list(self._streams.values()) if is_meant(peer)]:
            if reason:
                self._transport.exit_reasons.record(peer.node, reason)
            self._transport.peer_disconnected(peer)
