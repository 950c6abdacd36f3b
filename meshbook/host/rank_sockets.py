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
from meshbook.wire.linked_sockets import LinkedRouter
from meshbook.wire.loop import Loop
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
        self._authenticated: set[tuple[bool, bytes]] = set()  # (is it the work socket, peer) that have shown the token
        self._identities: dict[int, bytes] = {}  # of each rank's present process
        self._rejections = RateLimitedLog(log)
        self.addresses = f"ipc://{folder}/h{host}-work.sock", f"ipc://{folder}/h{host}-service.sock"
        self._work = self._bind(context, self.addresses[0], is_work=True)
        self._service = self._bind(context, self.addresses[1], is_work=False)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, is_work: bool) -> LinkedRouter:
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.bind(address)
        return LinkedRouter(
            self._loop,
            socket,
            lambda peer, body: self._on_message(is_work, peer, codec.rank_reports, [codec.PROTOCOL, body]),
            lambda peer, frames: self._on_message(is_work, peer, codec.rank_hellos, frames),
            on_broken=lambda peer: log.warning("the connection of %r has broken; what it is to get is kept", peer),
        )

    def expect(self, rank: int, incarnation: int) -> None:
        """Accept a new process of a rank, and none of its former ones any more."""
        self.forget(rank)
        peer = self._identities[rank] = spawn.rank_identity(rank, incarnation)
        for router in (self._work, self._service):
            router.expect_peer(peer)

    def forget(self, rank: int) -> None:
        """Accept and send nothing more of a rank's process, which has exited."""
        former = self._identities.pop(rank, b"")
        for router in (self._work, self._service):
            router.remove_peer(former)
            self._authenticated.discard((router is self._work, former))

    def send_work(self, rank: int, body: bytes) -> None:
        """Send to a rank's main thread. Dropped if the rank never connected; so is the other."""
        self._work.send(self._identities.get(rank, b""), body)

    def send_service(self, rank: int, body: bytes) -> None:
        self._service.send(self._identities.get(rank, b""), body)

    def drain(self, num_ranks: int) -> None:
        """Handle the reports of a dead rank that are still in the sockets, before its exit is reported.

        Messages of other ranks are interleaved with them and keep arriving: the number of rounds is bounded by the most
        messages that each rank can have sent.
        """
        for router in (self._work, self._service):
            for _ in range(_MAX_LAST_MESSAGES * num_ranks):
                try:
                    if not router.receive_pending():
                        break
                except Exception:  # the exit must be reported in any case
                    log.exception("a rank's report could not be handled")

    def reopen(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        for router in (self._work, self._service):
            router.reopen(context)

    def close(self) -> None:
        for router in (self._work, self._service):
            router.close()

    def _on_message(self, is_work: bool, peer: bytes, decoder: codec.Decoder[Any], frames: list[bytes]) -> None:
        try:
            message = decoder.decode(frames)
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
            if (is_work, peer) in self._authenticated:
                return  # it has connected again
            self._authenticated.add((is_work, peer))
            (self._work if is_work else self._service).open_peer(peer)
        self._on_report(message, is_work)
