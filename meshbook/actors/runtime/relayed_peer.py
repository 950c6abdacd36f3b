"""A process with actors on another machine: what the two send each other goes in pieces, over what carries those.

That is a mesh's supervisor, whose other messages get their turn between the pieces, or a connection between the two
processes (`direct_links`). No more is on its way than the receiver takes: it gives credit for what it has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from meshbook.actors.runtime.peer import Connection, Frame, PeerLost
from meshbook.actors.runtime.reactor import Reactor
from meshbook.errors import MeshbookError
from meshbook.wire.messages import NodeAddress, RelayedBytes

_PIECE_BYTES = 512 << 10
_WINDOW_BYTES = 8 << 20  # on the way at most, in each direction of a connection
_CREDIT_BYTES = _WINDOW_BYTES // 4  # that were read before the sender hears of it


class Carrier(Protocol):
    """Carries pieces: a mesh whose supervisor passes them on, or a connection to one process.

    Attributes:
        may_lag: what was sent before a process ended may arrive after the mesh has said that it has.
    """

    may_lag: bool

    def send(self, piece: RelayedBytes) -> None:
        """Send a piece on its way. Any thread; does not block. Raises MeshbookError: this process has left the mesh."""

    def close(self) -> None:
        """The one peer that it carries pieces for is gone; a mesh carries those of many, and stays."""


class MeshCarrier(Carrier, Protocol):
    """A mesh as a carrier. It stays when one peer is gone, for it carries pieces of others, too."""

    may_lag: bool = False

    def close(self) -> None:
        return

    def reaches(self, node: str) -> bool:
        """Whether this process of another machine is known to belong to the mesh."""


class RelayedPeer(Connection):
    """The other end of a connection to another machine; used as a `Peer` is."""

    is_local = False

    def __init__(
        self, carrier: Carrier, own_node: str, node: str, stream: str, address: NodeAddress | None, reactor: Reactor
    ) -> None:
        super().__init__(address, reactor)
        self.carrier, self.node, self.stream = carrier, node, stream
        self._own_node = own_node
        self._credit = _WINDOW_BYTES
        self._num_bytes_read = 0  # that the other side has not heard of

    def send(self, data: Frame) -> None:
        """Send a frame. Any thread; frames of one thread arrive in order.

        Raises:
            PeerLost: the connection is closed.
        """
        with self._lock:
            if self.lost_reason is not None:
                raise PeerLost(self.lost_reason)
            self._queue(memoryview(data))
            self._send_backlog()
            self._wait_for_room()

    def receive(self, piece: RelayedBytes) -> Iterator[memoryview]:
        """Return the bodies of frames that are complete with a piece. Reader thread only.

        Raises:
            ProtocolError: a frame exceeds the maximum size.
        """
        if piece.credit:
            with self._lock:
                self._credit += piece.credit
                self._send_backlog()
                self._drained.notify_all()
        self._num_bytes_read += len(piece.data)
        if self._num_bytes_read >= _CREDIT_BYTES:
            num_bytes, self._num_bytes_read = self._num_bytes_read, 0
            self._send_piece(b"", credit=num_bytes)
        return self._frames.split(piece.data) if piece.data else iter(())

    def close(self, reason: str) -> None:
        super().close(reason)
        self.carrier.close()

    def cut_off(self) -> None:
        """Have the other side know that nothing more of it is taken."""
        with contextlib.suppress(MeshbookError):
            self.carrier.send(RelayedBytes(self._own_node, self.node, self.stream, ended=""))

    def drop_inherited(self, reason: str) -> None:
        """After a fork, in the child: the connection is the parent's."""
        self.lost_reason = reason

    def _send_backlog(self) -> None:
        """Send what there is credit for, small frames together. The caller holds the lock."""
        while self._backlog and self._credit > 0:
            room, parts = min(_PIECE_BYTES, self._credit), []
            while self._backlog and room:
                part = self._backlog[0][:room]
                rest = self._backlog[0][len(part) :]
                if rest:
                    self._backlog[0] = rest
                else:
                    self._backlog.popleft()
                room -= len(part)
                parts.append(part)
            data = b"".join(parts)
            self._backlog_bytes -= len(data)
            self._credit -= len(data)
            self._send_piece(data)

    def _send_piece(self, data: bytes, *, credit: int = 0) -> None:
        try:
            self.carrier.send(RelayedBytes(self._own_node, self.node, self.stream, data, credit))
        except MeshbookError as error:
            raise PeerLost(str(error)) from error
