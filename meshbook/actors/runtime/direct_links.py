"""Connections of a rank's actors to ranks on other machines: TCP with CURVE, from process to process.

Each rank of a mesh on several machines listens on the address by which other machines reach it, and dials others. A
connection that breaks is made again, and nothing is lost with it; that a process has ended, the mesh says.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket as sockets
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import msgspec
import zmq

from meshbook.actors.runtime.relayed_peer import Carrier
from meshbook.errors import MeshbookError, NotAttached, ProtocolError
from meshbook.wire import codec, keys
from meshbook.wire.linked_sockets import LinkedDealer, LinkedRouter
from meshbook.wire.loop import Loop
from meshbook.wire.messages import LinkHello, NodeAddress, RelayedBytes
from meshbook.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger("meshbook.actors")

OnPiece = Callable[[Carrier, RelayedBytes], None]

_TRY_TIMEOUT_S: Final = 1.0  # for a first connection to a machine; then the mesh's supervisor relays
_LINGER_MS: Final = 500
_MAX_LINKS: Final = 1 << 15  # zmq's own limit is 1,023
_encode = msgspec.msgpack.Encoder().encode
_decode_piece = msgspec.msgpack.Decoder(RelayedBytes).decode
_decode_hello = msgspec.msgpack.Decoder(LinkHello).decode


class DirectLinks:
    """This process's connections, and the thread that has their sockets.

    Attributes:
        endpoint: where it listens, "tcp://10.0.0.7:41234".
        server_key: its public CURVE key.
    """

    def __init__(self, host: str, node: str, key: str, on_piece: OnPiece) -> None:
        """Listen.

        Args:
            host: the address of this machine that others reach.
            node, key: of this process's address.
            on_piece: called with what arrives, on the thread of the sockets.

        Raises:
            StartError: it cannot listen there.
        """
        self.node, self._key, self.on_piece = node, key, on_piece
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, _MAX_LINKS)
        self.loop = Loop()
        socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        key_pair = keys.new_curve_keys()
        try:
            self.endpoint = keys.bind_encrypted(socket, host, key_pair)
        except MeshbookError:
            socket.close()
            self.context.term()
            raise
        self.server_key = key_pair[0].decode()
        self.router = LinkedRouter(self.loop, socket, self._on_message, self._on_hello)
        self._accepted: dict[bytes, _AcceptedLink] = {}
        self._can_reach: dict[str, bool] = {}  # by host
        self._rejections = RateLimitedLog(log)
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self.loop.watch_fd(self._wake_read, self._run_actions)
        self._thread = threading.Thread(target=self.loop.run, name="meshbook-links", daemon=True)
        self._thread.start()

    def dial(self, address: NodeAddress) -> Carrier | None:
        """Return a connection to a process; None: its machine cannot be reached. Blocks, for a second at most."""
        if not address.endpoint:
            return None
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        if host not in self._can_reach:
            self._can_reach[host] = _can_connect(host, int(port))
        return _DialedLink(self, address) if self._can_reach[host] else None

    def submit(self, action: Callable[[], None]) -> None:
        """Run an action on the thread of the sockets, after those before it. Any thread."""
        self._actions.put(action)
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Close all connections. Blocks until what was sent is on its way, for a second at most."""
        self.submit(self.loop.stop)
        self._thread.join(2 * _LINGER_MS / 1000)
        if not self._thread.is_alive():
            self.router.close(linger_ms=_LINGER_MS)
            self.context.destroy(linger=_LINGER_MS)

    def forget(self, identity: bytes) -> None:
        """Close an accepted connection. Thread of the sockets."""
        self._accepted.pop(identity, None)
        self.router.remove_peer(identity)

    def _run_actions(self) -> None:
        os.read(self._wake_read, 4096)
        while not self._actions.empty():
            try:
                self._actions.get()()
            except Exception:  # the next ones belong to other connections
                log.exception("a connection between machines failed; the others go on")

    def _on_hello(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            codec.check_version(frames)
            hello = _decode_hello(frames[-1])
        except (MeshbookError, msgspec.MsgspecError) as error:
            self._rejections.warning("a connection of %r was refused: %s", identity[:16], error)
            return
        if not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            self._rejections.warning("a connection of %r was refused: it does not know this process's key", hello.node)
        elif identity not in self._accepted:  # else it has connected again
            self._accepted[identity] = _AcceptedLink(self, identity, hello.node)
            self.router.open_peer(identity)

    def _on_message(self, identity: bytes, body: bytes) -> None:
        if (link := self._accepted.get(identity)) is not None:
            self.receive(link, link.node, body)

    def receive(self, link: Carrier, node: str, body: bytes) -> None:
        piece = _decode_piece(body)
        if piece.source != node:
            raise ProtocolError(f"process {node} speaks for {piece.source}")
        self.on_piece(link, piece)


class _AcceptedLink:
    """A connection that another process has opened."""

    may_lag = True

    def __init__(self, links: DirectLinks, identity: bytes, node: str) -> None:
        self._links, self._identity, self.node = links, identity, node

    def send(self, piece: RelayedBytes) -> None:
        body = _encode(piece)
        self._links.submit(lambda: self._links.router.send(self._identity, body))

    def close(self) -> None:
        self._links.submit(lambda: self._links.forget(self._identity))


class _DialedLink:
    """A connection that this process opens."""

    may_lag = True

    def __init__(self, links: DirectLinks, address: NodeAddress) -> None:
        self._links, self._address = links, address
        self._dealer: LinkedDealer | None = None
        self._is_closed = False
        links.submit(self._open)

    def send(self, piece: RelayedBytes) -> None:
        if self._is_closed:
            raise NotAttached("this connection is closed")
        body = _encode(piece)
        self._links.submit(lambda: self._send(body))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._links.submit(self._close)

    def _open(self) -> None:
        links, address = self._links, self._address
        identity = f"{links.node}.{secrets.token_hex(4)}".encode()
        try:
            self._dealer = LinkedDealer(links.context, address.endpoint, identity, server_key=address.server_key)
        except zmq.ZMQError as error:  # no descriptor is left
            ended = f"on another machine cannot be connected to: {error.strerror}"
            links.on_piece(self, RelayedBytes(address.node, links.node, "", ended=ended))
            return
        self._dealer.introduce(_encode(LinkHello(links.node, address.key)))
        links.loop.watch_socket(self._dealer.socket, self._on_frames)

    def _send(self, body: bytes) -> None:
        if self._dealer is not None:
            self._dealer.send(body)

    def _on_frames(self, frames: list[bytes]) -> None:
        if self._dealer is not None and (body := self._dealer.accept(frames)) is not None:
            self._links.receive(self, self._address.node, body)

    def _close(self) -> None:
        if self._dealer is not None:
            self._links.loop.unwatch(self._dealer.socket)
            self._dealer.close(linger_ms=_LINGER_MS)
            self._dealer = None


def _can_connect(host: str, port: int) -> bool:
    try:
        sockets.create_connection((host, port), timeout=_TRY_TIMEOUT_S).close()
    except OSError as error:
        log.warning(
            "%s:%d cannot be reached (%s); the mesh's supervisor relays what actors say to it", host, port, error
        )
        return False
    return True
