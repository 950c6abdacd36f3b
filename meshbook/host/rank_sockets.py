"""The two sockets that reach a host's ranks, "work" for their main threads and "service" for their service threads."""

from __future__ import annotations

import hmac
import logging
from collections import deque
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
# Seconds between attempts to send to a rank whose connection has broken: it connects again after 0.1 s, zmq's default.
_RESEND_S = 0.05


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
        # messages for ranks whose connection has broken, in order, until they have connected again
        self._unsent: dict[tuple[zmq.Socket[bytes], bytes], deque[bytes]] = {}
        self._rejections = RateLimitedLog(log)
        self.addresses = f"ipc://{folder}/h{host}-work.sock", f"ipc://{folder}/h{host}-service.sock"
        self._work, self._service = (self._bind(context, address) for address in self.addresses)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to a broken connection is dropped silently
        socket.bind(address)
        self._loop.watch_socket(socket, lambda frames: self._on_message(socket, frames))
        return socket

    def expect(self, rank: int, incarnation: int) -> None:
        """Accept a new process of a rank, and none of its former ones any more."""
        self.forget(rank)
        self._identities[rank] = spawn.rank_identity(rank, incarnation)

    def forget(self, rank: int) -> None:
        """Accept and send nothing more of a rank's process, which has exited."""
        former = self._identities.pop(rank, b"")
        for socket in (self._work, self._service):
            self._authenticated.discard((socket, former))
            self._unsent.pop((socket, former), None)

    def send_work(self, rank: int, body: bytes) -> None:
        self._send(self._work, rank, body)

    def send_service(self, rank: int, body: bytes) -> None:
        self._send(self._service, rank, body)

    def _send(self, socket: zmq.Socket[bytes], rank: int, body: bytes) -> None:
        """Send to a rank; keep it for later if its connection has broken. Drop it if the rank never connected."""
        peer = self._identities.get(rank)
        if peer is None:
            return
        if waiting := self._unsent.get((socket, peer)):
            waiting.append(body)
        elif not _try_send(socket, peer, body) and (socket, peer) in self._authenticated:
            log.warning("the connection of rank %s has broken; what it is to get waits until it has connected", rank)
            self._unsent[socket, peer] = deque([body])
            self._loop.call_later(_RESEND_S, lambda: self._send_waiting(socket, peer))

    def _send_waiting(self, socket: zmq.Socket[bytes], peer: bytes) -> None:
        waiting = self._unsent.get((socket, peer))
        while waiting and _try_send(socket, peer, waiting[0]):
            waiting.popleft()
        if waiting:
            self._loop.call_later(_RESEND_S, lambda: self._send_waiting(socket, peer))
        else:
            self._unsent.pop((socket, peer), None)

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
        self._unsent.clear()
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


def _try_send(socket: zmq.Socket[bytes], peer: bytes, body: bytes) -> bool:
    """Send a message; return False if the peer is not connected."""
    try:
        send_frames(socket, (peer, codec.PROTOCOL, body))
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True
