"""The actor transport of a process: one listening socket, one reader thread, one table of open calls.

A caller writes to the other process's socket on its own thread; to one on another machine it sends in
pieces (`other_machines`). The reader thread receives messages and runs no user
code: it puts a call into its actor's mailbox and passes a reply to its handler. A closed connection means that the
process has exited: every open call to it fails immediately. Everything that changes an open call (a reply, a lost
process, a message of this process to itself) runs sequentially on the reader thread.

Notebook and ranks use the same code. `local_transport()` returns this process's own, created on first use.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hmac
import logging
import os
import secrets
import selectors
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from meshbook.actors.runtime import unix_sockets
from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.actors.runtime.exit_reasons import ExitReasons
from meshbook.actors.runtime.other_machines import OtherMachines
from meshbook.actors.runtime.payloads import PICKLED_NONE, PayloadCodec
from meshbook.actors.runtime.peer import Frame, Loopback, Peer, PeerLost, encode_frame, encode_large_frame
from meshbook.actors.runtime.reactor import Reactor
from meshbook.actors.runtime.relayed_peer import RelayedPeer
from meshbook.actors.runtime.reply_handlers import ReplyHandlers
from meshbook.errors import ProtocolError
from meshbook.wire import codec, messages
from meshbook.wire.messages import NodeAddress
from meshbook.wire.regions import machine_id
from meshbook.wire.stop_timing import STOP_SIGNAL

log = logging.getLogger("meshbook.actors")

_encoder = msgspec.msgpack.Encoder()
_encode = _encoder.encode
_decode = msgspec.msgpack.Decoder(messages.PeerMessage).decode

_IDLE_SEGMENT_S = 30.0  # after which unread shared memory is returned to the system
_SWEEP_INTERVAL_S = 0.5  # between checks for released segments, while there are any


def encode(message: messages.ActorMessage) -> Frame:
    """Encode a message as a frame: the same bytes go to every process of a mesh."""
    if getattr(message, "payload", None) is None:
        return encode_frame(_encode(message))
    return encode_large_frame(lambda frame, at: _encoder.encode_into(message, frame, at))


def unblock_signals() -> None:
    """Set this thread's signal mask so that user code may run on it.

    Threads inherit the blocked signals of their creator, and so do processes: the child of a thread that blocks SIGCHLD
    would never be notified that its own children exit. Only what interrupts stays blocked: the main thread handles it.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT, STOP_SIGNAL})


class Transport:
    """This process's connections to other processes with actors."""

    def __init__(self) -> None:
        self.address = NodeAddress(secrets.token_hex(8), secrets.token_hex(16), os.getpid(), machine_id())
        self.payloads = PayloadCodec()
        self.replies = ReplyHandlers()
        self.exit_reasons = ExitReasons()
        # `registry.local_registry` adds more when there are actors.
        self.message_handlers: dict[type, Callable[[Any, Any], None]] = {
            messages.PeerHello: self._greeted,
            messages.ActorReply: self._reply_received,
            messages.ActorFailure: self._reply_received,
            messages.PortMessage: self._reply_received,
            messages.PrepareShutdown: self._exit_requested,
            messages.ShutdownNotice: self._exit_announced,
            messages.ReleaseSegments: lambda peer, word: self.payloads.release(peer, word.segments),
        }
        self.peer_lost_callbacks: list[Callable[[Any, str], None]] = []
        self._peers: dict[str, Any] = {self.address.node: Loopback(self.address, self._dispatch_own)}
        self._lost_nodes: deque[str] = deque()  # lost nodes of `_peers`, retained so that later senders get the reason
        self._connections: set[Any] = set()
        self._connect_lock = threading.Lock()
        self._listener = unix_sockets.listen(self.address.node)
        self._closed = False
        self._is_sweeping = False
        self.payloads.on_segments_used = self._start_sweeping
        self.reactor = Reactor()
        self.machines = OtherMachines(self)
        self.reactor.register(self._listener, self._accept)

    # ---- sending

    def peer(self, address: NodeAddress) -> Any:
        """Return the connection to a process; made on first use.

        Raises:
            PeerLost: the process has exited.
        """
        found = self._peers.get(address.node)
        if found is not None and found.lost_reason is None:
            return found
        with self._connect_lock:
            found = self._peers.get(address.node)
            if found is not None:
                if found.lost_reason is None:
                    return found
                raise PeerLost(found.lost_reason)
            peer = self._open_connection(address)
            try:
                peer.send(encode(messages.PeerHello(codec.PROTOCOL.decode(), address.key, self.address)))
            except PeerLost as error:
                reason = f"its process (pid {address.pid}) has ended"
                peer.close(reason)
                self.machines.forget(peer)
                raise PeerLost(reason) from error
            self.add_connection(peer)
            self._peers[address.node] = peer  # last: other threads may send from now on, after the PeerHello
            return peer

    def connect_again(self, nodes: Iterable[str]) -> None:
        """These processes run: forget that connections to them have ended."""
        with self._connect_lock:
            for node in nodes:
                if node in self._peers and self._peers[node].lost_reason is not None:
                    del self._peers[node]
                    self.exit_reasons.forget(node)

    def _open_connection(self, address: NodeAddress) -> Peer | RelayedPeer:
        if (peer := self.machines.connect(address)) is not None:
            return peer
        try:
            return Peer(unix_sockets.connect(address.node), address, self.reactor)
        except OSError as error:
            is_elsewhere = address.machine != self.address.machine
            what = "is on another machine, and no mesh of this process has it" if is_elsewhere else "has ended"
            raise PeerLost(f"its process (pid {address.pid}) {what}") from error

    def add_connection(self, peer: Peer | RelayedPeer) -> None:
        """Handle what a peer sends from now on."""
        self._connections.add(peer)
        if isinstance(peer, Peer):
            self.reactor.register(peer.socket, functools.partial(self._on_peer_ready, peer))

    def report_lost_peer(self, handler_id: int, peer: Any, reason: str) -> None:
        """Report that a message to `peer` could not be sent. Any thread; the handler runs on the reader thread."""
        self.reactor.call_soon(lambda: self.replies.on_peer_lost(peer, reason, handler_id))

    def reply(self, peer: Any, message: messages.ActorMessage) -> None:
        """Send a message packed for `peer` alone; if the peer is lost, release its shared memory."""
        try:
            peer.send(encode(message))
        except PeerLost:
            self.payloads.pool.remove_reader(peer.id)

    # ---- receiving, on the reader thread

    def _accept(self, events: int) -> None:
        try:
            socket, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the listener stays readable, and this thread would spin
                log.warning("another process of the mesh cannot be heard: %s; it is tried again every second", error)
                self.reactor.unregister(self._listener)
                self.reactor.call_later(1.0, lambda: self.reactor.register(self._listener, self._accept))
            return
        if unix_sockets.is_same_user(socket):
            self.add_connection(Peer(socket, None, self.reactor))
        else:
            socket.close()

    def _on_peer_ready(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE and peer.flush():
            self.reactor.unwatch_writable(peer.socket)
        if not events & selectors.EVENT_READ:
            return
        self.handle_bodies(peer, peer.read)

    def handle_bodies(self, peer: Peer | RelayedPeer, read: Callable[[], Iterator[memoryview] | None]) -> None:
        """Handle the bodies of frames that `read` returns, or the end of the connection."""
        try:
            bodies = read()
            if bodies is None:
                self.peer_disconnected(peer)
                return
            for body in bodies:
                try:
                    self._dispatch(peer, body)
                except (ProtocolError, msgspec.MsgspecError):
                    raise
                except BaseException:  # the next messages belong to other calls
                    log.exception("a message between actors could not be handled; listening goes on")
        except (ProtocolError, msgspec.MsgspecError) as error:
            log.warning("process %s was cut off: %s", peer.address and peer.address.pid, error)
            peer.cut_off()
            self.peer_disconnected(peer)
        except PeerLost:  # the mesh that relays was left
            self.peer_disconnected(peer)

    def _dispatch(self, peer: Any, body: memoryview) -> None:
        message = _decode(body)
        if peer.address is None and type(message) is not messages.PeerHello:
            raise ProtocolError("it spoke before it showed the key of this process")
        handler = self.message_handlers.get(type(message))
        if handler is not None:
            try:  # noqa: SIM105  (`suppress` costs more than the rest of this function)
                handler(peer, message)
            except PeerLost:
                pass  # the requester has exited without waiting for the reply

    def _dispatch_own(self, peer: Any, body: memoryview) -> None:
        self.reactor.call_soon(lambda: self._dispatch(peer, body))

    def _greeted(self, peer: Peer, greeting: messages.PeerHello) -> None:
        if greeting.protocol != codec.PROTOCOL.decode():
            raise ProtocolError(codec.describe_version_mismatch(greeting.protocol.encode()))
        if not hmac.compare_digest(greeting.key.encode(), self.address.key.encode()):
            raise ProtocolError("it does not know the key of this process")
        peer.address = greeting.address
        with self._connect_lock:
            self._peers.setdefault(greeting.address.node, peer)

    def _reply_received(self, peer: Any, reply: Any) -> None:
        handler_id = reply.port if type(reply) is messages.PortMessage else reply.call
        if not self.replies.on_reply(handler_id, peer, reply):  # the caller no longer waits
            self.payloads.discard(peer, reply)

    def _exit_requested(self, peer: Any, request: messages.PrepareShutdown) -> None:
        self.announce_exit(request.reason)
        peer.send(encode(messages.ActorReply(request.call, PICKLED_NONE)))

    def _exit_announced(self, peer: Any, announcement: messages.ShutdownNotice) -> None:
        peer.announced_exit = peer.announced_exit or announcement.reason

    def peer_disconnected(self, peer: Peer | RelayedPeer) -> None:
        self._connections.discard(peer)
        self.machines.forget(peer)
        pid = peer.address.pid if peer.address is not None else 0
        why = f"was stopped: {peer.announced_exit}" if peer.announced_exit is not None else "has ended"
        peer.close(f"its process (pid {pid}) {why}")
        self.payloads.forget_peer(peer)
        if peer.address is not None:
            self._record_lost_node(peer.address.node)
        self.replies.on_peer_lost(peer, peer.lost_reason or "")
        for callback in list(self.peer_lost_callbacks):
            callback(peer, peer.lost_reason or "")

    def _record_lost_node(self, node: str) -> None:
        self._lost_nodes.append(node)
        while len(self._lost_nodes) > BoundedDict.LIMIT:
            oldest = self._peers.get(self._lost_nodes.popleft())
            if oldest is not None and oldest.lost_reason is not None:
                del self._peers[oldest.address.node]

    # ---- shared memory

    def release_segments(self) -> None:
        """Notify owners of segments that this process no longer uses."""
        for peer, segments in self.payloads.drain_released():
            with contextlib.suppress(PeerLost):
                peer.send(encode(messages.ReleaseSegments(segments)))

    def _start_sweeping(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            self.reactor.call_later(_SWEEP_INTERVAL_S, self._sweep_segments)

    def _sweep_segments(self) -> None:
        self.release_segments()
        self.payloads.pool.trim(_IDLE_SEGMENT_S)
        self._is_sweeping = self.payloads.has_segments
        if self._is_sweeping:
            self.reactor.call_later(_SWEEP_INTERVAL_S, self._sweep_segments)

    # ---- shutdown

    def announce_exit(self, reason: str) -> None:
        """Notify all peers that the exit of this process, which follows, is not a failure."""
        announcement = encode(messages.ShutdownNotice(reason))
        for peer in list(self._connections):
            with contextlib.suppress(PeerLost):
                peer.send(announcement)

    def drop_inherited(self) -> None:
        """After a fork, in the child: close inherited sockets, because the child is not a known peer."""
        self._closed = True
        self._peers[self.address.node].lost_reason = "this is another process"
        for peer in self._connections:
            peer.drop_inherited("this is another process")
        self._listener.close()
        self.reactor.drop_inherited()

    def close(self) -> None:
        """Leave: other processes see this one as exited, and open calls fail."""
        if self._closed or self.address.pid != os.getpid():
            return
        self.announce_exit("its program has ended")
        self._closed = True
        self.reactor.stop()
        self._peers[self.address.node].lost_reason = "this process has left"
        self.reactor.close()
        for peer in list(self._connections):
            peer.close("this process has left")
        self._listener.close()
        self.payloads.close()
        unix_sockets.unlink(self.address.node)


def _drop_inherited() -> None:
    """In a forked child: close inherited sockets, because an open copy would hide the parent's exit from its peers."""
    if _local_transport is not None:
        _local_transport.drop_inherited()


os.register_at_fork(after_in_child=_drop_inherited)


_lock = threading.Lock()
_local_transport: Transport | None = None


def local_transport() -> Transport:
    """Return this process's transport. One per process, because actor references that arrive in messages need it."""
    global _local_transport
    if _local_transport is None or _local_transport.address.pid != os.getpid():
        with _lock:
            if _local_transport is None or _local_transport.address.pid != os.getpid():
                _local_transport = Transport()
                atexit.register(_local_transport.close)
    return _local_transport


def has_local_transport() -> bool:
    """Whether this process has created its transport."""
    return _local_transport is not None and _local_transport.address.pid == os.getpid()
