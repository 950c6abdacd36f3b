"""zmq sockets whose messages are numbered and acknowledged (`wire/link.py`): none is lost when a connection breaks.

The ROUTER end notices that connections have broken and come back, and begins the exchange that sends again what was
lost; the DEALER end answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from meshbook.errors import ProtocolError
from meshbook.wire import codec, keys
from meshbook.wire.link import Link, is_numbered
from meshbook.wire.loop import Loop, Timer, send_frames

# Seconds until an acknowledgement is sent that had nothing to ride on: more than the second between two words of the
# supervisor to a host on another machine, which bring it along.
_ACKNOWLEDGE_AFTER_S = 1.5
# Seconds between attempts to reach a peer whose connection has broken: at first (it connects again after 0.1 s, zmq's
# default), and before the last.
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0


@dataclass
class _Peer:
    """A link, and the identity that what belongs to it is sent to."""

    link: Link
    identity: bytes


class LinkedRouter:
    """A bound ROUTER socket that holds a link with each known peer.

    Attributes:
        endpoint: where it is bound; to be set if it is bound later.
    """

    def __init__(
        self,
        loop: Loop,
        socket: zmq.Socket[bytes],
        on_message: Callable[[bytes, bytes], None],
        on_unnumbered: Callable[[bytes, list[bytes]], None],
        *,
        on_broken: Callable[[bytes], None] = lambda identity: None,
        shorten: Callable[[bytes], bytes] = lambda body: body,
        handover: bool = False,
    ) -> None:
        """
        Args:
            socket: ROUTER, owned by this object from now on.
            on_message: called with the identity and the body of each message of a known peer: in order, and once.
            on_unnumbered: called with the identity and the frames of all else: hellos, strangers, other versions.
            on_broken: called with the identity of a peer that something was to be sent to, and is not connected.
            shorten: returns what a standby of this process is given instead of a body.
            handover: a peer's standby takes its identity, though the end of its connection may not be known here yet.
        """
        self._loop, self.socket = loop, socket
        self._on_message, self._on_unnumbered, self._on_broken = on_message, on_unnumbered, on_broken
        self._handover = handover
        self._shorten = lambda frames: [*frames[:-1], shorten(frames[-1])]
        self._peers: dict[bytes, _Peer] = {}
        self._open: set[bytes] = set()  # identities that have introduced themselves; others' numbers count for nothing
        self._owing: dict[bytes, _Peer] = {}  # peers that are owed an acknowledgement
        self._acknowledge_timer: Timer | None = None
        self._to_sync: dict[bytes, _Peer] = {}  # peers that something may not have reached, or the other way round
        self._sync_timer: Timer | None = None
        self._retry_s = _RETRY_S
        self._num_broken = 0  # connections that have broken, less those that were made since
        self._watch()

    def _watch(self) -> None:
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, self._handover)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to a broken connection is dropped silently
        self._monitor = self.socket.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
        self._loop.watch_socket(self._monitor, self._on_connection_event, logged=False)
        self._loop.watch_socket(self.socket, self._on_frames, shorten=self._shorten)

    def reopen(self, context: zmq.Context[zmq.Socket[bytes]], *, curve_keys: tuple[bytes, bytes] | None = None) -> None:
        """Go on with another socket at the same address, in a process that has taken the place of its owner.

        Args:
            curve_keys: the server's, public and secret.
        """
        self.socket = context.socket(zmq.ROUTER)
        keys.configure_socket(self.socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        if curve_keys is not None:
            keys.listen_encrypted(self.socket, curve_keys)
        self.socket.setsockopt(zmq.IPV6, "[" in self.endpoint)
        self.socket.bind(self.endpoint)
        self._num_broken = 0
        self._watch()
        self._sync_later({peer.identity: peer for peer in self._peers.values()})

    # ---- peers

    def expect_peer(self, identity: bytes) -> None:
        """Ask a peer to introduce itself, should its hello be lost with a connection."""
        self._peers.setdefault(identity, _Peer(Link(), identity))

    def open_peer(self, identity: bytes, *, reply_to: bytes | None = None) -> None:
        """Hold a link with a peer that has introduced itself; does nothing if there is one.

        Args:
            reply_to: the identity that it receives at, if it has two.
        """
        receiver = reply_to or identity
        self._peers[identity] = self._peers.setdefault(receiver, _Peer(Link(), receiver))
        self._open.add(identity)

    def remove_peer(self, identity: bytes) -> None:
        """Forget a peer, with what was not sent to it."""
        for known in (self._peers, self._owing, self._to_sync):
            known.pop(identity, None)
        self._open.discard(identity)

    # ---- sending

    def send(self, identity: bytes, body: bytes) -> None:
        """Send to a known peer, now or when it is connected again. Does nothing for any other."""
        if identity in self._open:
            peer = self._peers[identity]
            frames = (peer.link.number(body), body)
            self._loop.act(lambda: self._send_to(peer, frames))

    def send_unnumbered(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Send to anyone. It is dropped if they are not connected."""
        self._loop.act(lambda: self._try_send(identity, frames))

    def _send_to(self, peer: _Peer, frames: Sequence[bytes]) -> None:
        if not self._try_send(peer.identity, frames) and peer.identity not in self._to_sync:
            self._on_broken(peer.identity)
            self._sync_later({peer.identity: peer})

    def _try_send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """Send a message; return False if the peer is not connected."""
        try:
            send_frames(self.socket, (identity, *frames))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    # ---- receiving

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if len(frames) != 3 or not is_numbered(frames[1]):
            self._on_unnumbered(identity, frames[1:])
            return
        if identity not in self._open:
            if frames[2]:  # else a peer that has just left
                self._on_unnumbered(identity, frames[1:])
            return
        peer = self._peers[identity]
        is_next, replies = peer.link.receive(frames[1], frames[2])
        for reply in replies:
            self._loop.act(lambda reply=reply: self._send_to(peer, reply), logged=False)  # type: ignore[misc]
        if is_next:
            self._owing[peer.identity] = peer
            if self._acknowledge_timer is None:
                self._acknowledge_timer = self._loop.call_later(_ACKNOWLEDGE_AFTER_S, self._acknowledge, logged=False)
            self._on_message(identity, frames[2])

    def receive_pending(self) -> bool:
        """Handle one message if there is one; return whether there was."""
        if not self.socket.poll(0):
            return False
        self._on_frames(self.socket.recv_multipart())
        return True

    def _acknowledge(self) -> None:
        self._acknowledge_timer = None
        owing, self._owing = self._owing, {}
        for peer in owing.values():
            if peer.link.owes_acknowledgement:  # as with all that leaves: not before a standby has what was received
                send = lambda peer=peer: self._send_to(peer, peer.link.acknowledge())  # noqa: E731
                self._loop.act(send, logged=False)

    # ---- connections that have broken

    def _on_connection_event(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
            self._num_broken += 1
        elif self._num_broken or self._to_sync:  # whose connection it was is not known
            self._num_broken = max(0, self._num_broken - 1)
            self._sync_later({peer.identity: peer for peer in self._peers.values()})

    def _sync_later(self, peers: dict[bytes, _Peer]) -> None:
        self._to_sync |= peers
        self._retry_s = _RETRY_S
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        self._wait_to_sync(_RETRY_S)

    def _wait_to_sync(self, delay_s: float) -> None:
        self._sync_timer = self._loop.call_later(
            delay_s, lambda: self._loop.act(self._sync, logged=False), logged=False
        )

    def _sync(self) -> None:
        for identity, peer in list(self._to_sync.items()):
            if self._try_send(identity, peer.link.sync()):
                del self._to_sync[identity]
        self._sync_timer = None
        self._retry_s *= 2
        if self._to_sync and self._retry_s <= _MAX_RETRY_S:  # else the next connection that is made begins it anew
            self._wait_to_sync(self._retry_s)

    def close(self, *, linger_ms: int = 0) -> None:
        self._peers.clear()
        for timer in (self._acknowledge_timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        self._loop.unwatch(self._monitor)
        self._loop.unwatch(self.socket)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class LinkedDealer:
    """A DEALER socket to a `LinkedRouter`. One thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        *,
        server_key: str | None = None,
        act: Callable[..., object] = lambda send, **_: send(),
    ) -> None:
        """
        Args:
            server_key: the router's public CURVE key, if the address is a tcp one.
            act: does what must not be done in a standby of this process (`Loop.act`).
        """
        self._address, self._identity, self._server_key, self._act = address, identity, server_key, act
        self.socket = self._connect(context)
        self._link = Link()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        if self._server_key is not None:
            keys.dial_encrypted(socket, self._server_key)
            socket.setsockopt(zmq.IPV6, "[" in self._address)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.connect(self._address)
        return socket

    def reopen(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Go on with another socket, in a process that has taken the place of its owner, which has introduced itself.

        Both ends then send what the other has not received.
        """
        self.socket = self._connect(context)
        assert self._link.hello is not None
        self._send_frames((codec.PROTOCOL, self._link.hello))
        self._send_frames(self._link.sync())

    def introduce(self, hello: bytes) -> None:
        """Send the first message, which shows the token; it is repeated when the connection has broken."""
        self._link.hello = hello
        self._send_frames((codec.PROTOCOL, hello))

    def send(self, body: bytes) -> None:
        self._send_frames((self._link.number(body), body))

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        self._act(lambda: send_frames(self.socket, frames))

    def receive(self, wait: Callable[[zmq.Socket[bytes]], None] | None = None) -> bytes:
        """Wait for the next message and return its body. A signal handler that raises leaves no message half read.

        Args:
            wait: returns when the socket is readable.
        """
        while True:
            if wait is not None:
                wait(self.socket)
            zmq.zmq_poll([(self.socket, zmq.POLLIN)])
            body = self.accept(self.socket.recv_multipart())
            if body is not None:
                return body

    def accept(self, frames: list[bytes]) -> bytes | None:
        """Return the body of a received message if it is the next one to be handled; else handle the message.

        Raises:
            VersionMismatch: the peer uses another protocol version.
            ProtocolError: the frames are not a numbered message.
        """
        if len(frames) != 2 or not is_numbered(frames[0]):
            codec.check_version(frames)
            raise ProtocolError("a message without a number came where there is a link")
        is_next, replies = self._link.receive(frames[0], frames[1])
        for reply in replies:  # a standby, which has large messages without their data, acknowledges at other times
            self._act(lambda reply=reply: send_frames(self.socket, reply), logged=False)
        return frames[1] if is_next else None

    def acknowledge(self) -> None:
        """Acknowledge what was received, if nothing that was sent since did."""
        if self._link.owes_acknowledgement:
            self._send_frames(self._link.acknowledge())

    def close(self, *, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)
