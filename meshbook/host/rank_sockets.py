"""The two sockets that reach a host's ranks, "work" for their main threads and "service" for their service threads."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import zmq

from meshbook.errors import ProtocolError, VersionMismatch
from meshbook.wire import codec, keys, messages, spawn
from meshbook.wire.loop import Loop, send_frames
from meshbook.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger("meshbook.host")

# Messages of one rank that may be in a socket when it exits: it sends output at most 33 times a second.
_MAX_LAST_MESSAGES = 256


class RankSockets:
    """Sends to ranks, and passes on what those send that have shown the token.

    Attributes:
        addresses: of the work and the service socket, to which ranks connect.
    """

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        host: int,
        token: str,
        ranks: Container[int],
        on_report: Callable[[Any, bool], None],
    ) -> None:
        """Bind the sockets.

        Args:
            folder: where they are created; mode 0700.
            ranks: of this host; reports that speak for others are refused.
            on_report: receives a report, and whether it came on the work socket.
        """
        self._loop, self._token, self._ranks, self._on_report = loop, token, ranks, on_report
        # peers of our sockets that have shown the token
        self._authenticated: set[tuple[zmq.Socket[bytes], bytes]] = set()
        self._identities: dict[int, bytes] = {}  # of each rank's present process
        self._rejections = RateLimitedLog(log)
        self.addresses = f"ipc://{folder}/h{host}-work.sock", f"ipc://{folder}/h{host}-service.sock"
        self._work, self._service = (self._bind(context, address) for address in self.addresses)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.bind(address)
        self._loop.watch_socket(socket, lambda frames: self._on_message(socket, frames))
        return socket

    def expect(self, rank: int, incarnation: int) -> None:
        """Accept a new process of a rank, and none of its former ones any more."""
        former = self._identities.get(rank)
        self._authenticated -= {(self._work, former), (self._service, former)}
        self._identities[rank] = spawn.rank_identity(rank, incarnation)

    def send_work(self, rank: int, body: bytes) -> None:
        send_frames(self._work, (self._identities[rank], codec.PROTOCOL, body))

    def send_service(self, rank: int, body: bytes) -> None:
        send_frames(self._service, (self._identities[rank], codec.PROTOCOL, body))

    def drain(self, num_ranks: int) -> None:
        """Handle the reports of a dead rank that are still in the sockets, before its exit is reported.

        Messages of other ranks are interleaved with them and keep arriving: the number of rounds is bounded by the most
        messages that each rank can have sent.
        """
        for socket in (self._work, self._service):
            for _ in range(_MAX_LAST_MESSAGES * num_ranks):
                if not socket.poll(0):
                    break
                frames = socket.recv_multipart()
                try:
                    self._on_message(socket, frames)
                except Exception:  # the exit must be reported in any case
                    log.exception("a report from %r could not be handled", frames[0][:16])

    def close(self) -> None:
        for socket in (self._work, self._service):
            self._loop.unwatch(socket)
            socket.close()

    def _on_message(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        peer = frames[0]
        is_authenticated = (socket, peer) in self._authenticated
        try:
            message = (codec.rank_reports if is_authenticated else codec.rank_hellos).decode(frames[1:])
        except (ProtocolError, VersionMismatch) as error:
            self._rejections.warning("a message from %r was refused: %s", peer[:16], error)
            return
        if message.rank not in self._ranks or peer != self._identities.get(message.rank):
            self._rejections.warning("a report from %r speaks for rank %s, and was refused", peer[:16], message.rank)
            return
        if isinstance(message, messages.RankReady):
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                self._rejections.warning(
                    "a peer without the mesh's token says it is rank %s, and was refused", message.rank
                )
                return
            self._authenticated.add((socket, peer))
        self._on_report(message, socket is self._work)
