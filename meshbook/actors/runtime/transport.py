"""The actor transport of a process: one listening socket, one reader thread, one table of open calls.

A caller writes to the other process's socket on its own thread. The reader thread receives messages and runs no user
code: it puts a call into its actor's mailbox and passes a reply to its handler. A closed connection means that the
process has exited: every open call to it fails immediately. Everything that changes an open call (a reply, a lost
process, a message of this process to itself) runs sequentially on the reader thread.

Notebook and ranks use the same code. `local_transport()` returns this process's own, created on first use.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import heapq
import hmac
import itertools
import logging
import os
import secrets
import selectors
import signal
import socket as sockets
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.actors.runtime.futures import NON_BLOCKING_THREADS
from meshbook.actors.runtime.payloads import PICKLED_NONE, PayloadCodec
from meshbook.actors.runtime.peer import Loopback, Peer, PeerLost, encode_frame
from meshbook.clock import monotonic
from meshbook.errors import ProtocolError
from meshbook.wire import codec, keys, messages
from meshbook.wire.messages import NodeAddress

log = logging.getLogger("meshbook.actors")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(messages.PeerMessage).decode

_IDLE_SEGMENT_S = 30.0  # after which unread shared memory is returned to the system
_SWEEP_INTERVAL_S = 0.5  # between checks for released segments, while there are any


def encode(message: messages.ActorMessage) -> bytes:
    """Encode a message as a frame: the same bytes go to every process of a mesh."""
    return encode_frame(_encode(message))


class ExitReasons:
    """How processes have exited, which may be reported shortly after their sockets have closed."""

    def __init__(self) -> None:
        self.delay_s = 0.0  # usual delay of a report; 0: there are no reports
        self._reason_by_pid: BoundedDict[int, str] = BoundedDict()
        self._changed = threading.Condition()

    def record(self, pid: int, reason: str) -> None:
        with self._changed:
            self._reason_by_pid[pid] = reason
            self._changed.notify_all()

    def describe(self, address: NodeAddress | None, *, wait: bool) -> str:
        """Return why the process at `address` does not reply. With `wait`, waits up to `delay_s` for a report."""
        if address is None:
            return "its process has ended"
        with self._changed:
            if wait and self.delay_s:
                self._changed.wait_for(lambda: address.pid in self._reason_by_pid, self.delay_s)
            reason = self._reason_by_pid.get(address.pid)
        return f"its process (pid {address.pid}) {reason or 'has ended'}"


def unblock_signals() -> None:
    """Set this thread's signal mask so that user code may run on it.

    Threads inherit the blocked signals of their creator, and so do processes: the child of a thread that blocks SIGCHLD
    would never be notified that its own children exit. Only SIGINT stays blocked: the main thread handles it as the
    interrupt.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})


class ReplyHandler(Protocol):
    """The handler of the replies to one call id or port."""

    def on_reply(self, peer: Any, reply: Any) -> bool:
        """Handle an ActorReply, ActorFailure or PortMessage; return whether it was the last one."""

    def on_peer_lost(self, peer: Any, reason: str) -> bool:
        """Handle the exit of the process behind `peer`; return whether no more replies are expected."""


@runtime_checkable
class CallReplyHandler(ReplyHandler, Protocol):
    """The handler of the replies to a call, as opposed to messages through a port."""

    caller: Any  # (actor id, message key) of the caller; None: code outside any actor

    def awaited_replies(self) -> list[messages.PendingEndpointCall]:
        """Return the actors that have not replied, if a caller waits for them."""


class Transport:
    """This process's connections to other processes with actors."""

    def __init__(self) -> None:
        self.address = NodeAddress(secrets.token_hex(8), secrets.token_hex(16), os.getpid())
        self.payloads = PayloadCodec()
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
        self.on_call_started: Callable[[], None] | None = None  # called for each new call, on the caller's thread
        self.exit_reasons = ExitReasons()
        self._handler_ids = itertools.count(1)
        self._reply_handlers: dict[int, ReplyHandler] = {}
        self._peers: dict[str, Any] = {self.address.node: Loopback(self.address, self._dispatch_own)}
        self._lost_nodes: deque[str] = deque()  # lost nodes of `_peers`, retained so that later senders get the reason
        self._connections: set[Peer] = set()
        self._connect_lock = threading.Lock()
        self._listener = _listen(self.address.node)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._writers: list[Peer] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._callbacks: deque[Callable[[], None]] = deque()
        self._is_wake_pending = False  # the reader thread is going to run `_callbacks`
        self._closed = False
        self._is_sweeping = False
        self.payloads.on_segments_used = self._start_sweeping
        self._thread = threading.Thread(target=self._run, name="meshbook-post", daemon=True)
        self._thread.start()

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
            socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
            try:
                socket.connect(_socket_address(address.node))
                if not _is_same_user(socket):
                    raise ConnectionRefusedError("somebody else has taken its place")
                peer = Peer(socket, address, self._watch_writable, lambda: self._thread.ident or 0)
                peer.send(encode(messages.PeerHello(codec.PROTOCOL.decode(), address.key, self.address)))
            except (OSError, PeerLost) as error:
                socket.close()
                raise PeerLost(f"its process (pid {address.pid}) has ended") from error
            self._connections.add(peer)
            self._selector.register(socket, selectors.EVENT_READ, peer)
            self._peers[address.node] = peer  # last: other threads may send from now on, after the PeerHello
            return peer

    def add_reply_handler(self, handler: ReplyHandler) -> int:
        """Register `handler` for replies; return its id, which serves as call id or port."""
        handler_id = next(self._handler_ids)
        self._reply_handlers[handler_id] = handler
        if self.on_call_started is not None:
            self.on_call_started()
        return handler_id

    def awaited_replies(self) -> list[tuple[Any, list[messages.PendingEndpointCall]]]:
        """Return the open calls that this process waits for, each with its caller. Any thread."""
        found = []
        for handler in list(self._reply_handlers.values()):
            if isinstance(handler, CallReplyHandler) and (replies := handler.awaited_replies()):
                found.append((handler.caller, replies))
        return found

    @property
    def has_open_calls(self) -> bool:
        return bool(self._reply_handlers)

    def remove_reply_handler(self, handler_id: int) -> None:
        self._reply_handlers.pop(handler_id, None)

    def report_lost_peer(self, handler_id: int, peer: Any, reason: str) -> None:
        """Report that a message to `peer` could not be sent. Any thread; the handler runs on the reader thread."""
        self.call_soon(lambda: self._notify_lost_peer(handler_id, peer, reason))

    def _notify_lost_peer(self, handler_id: int, peer: Any, reason: str) -> None:
        handler = self._reply_handlers.get(handler_id)
        if handler is not None and handler.on_peer_lost(peer, reason):
            self._reply_handlers.pop(handler_id, None)

    def reply(self, peer: Any, message: messages.ActorMessage) -> None:
        """Send a message packed for `peer` alone; if the peer is lost, release its shared memory."""
        try:
            peer.send(encode(message))
        except PeerLost:
            self.payloads.pool.remove_reader(peer.id)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` on the reader thread after `delay_s`; it must not block."""
        heapq.heappush(self._timers, (monotonic() + delay_s, next(self._handler_ids), callback))
        self._wake()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the reader thread, in the order of these calls; it must not block."""
        self._callbacks.append(callback)
        if not self._is_wake_pending:
            self._is_wake_pending = True
            self._wake()
        if self._closed:  # the reader thread has ended
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        self._is_wake_pending = False  # first: callbacks added from now on wake the thread again
        for _ in range(len(self._callbacks)):
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # after close, several threads run this concurrently
                return
            _call_logging_errors(callback)

    # ---- the reader thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        NON_BLOCKING_THREADS[threading.get_ident()] = (
            "this thread hears the answers of actors and cannot wait for one; use a callback"
        )
        while not self._closed:
            wait_s = max(0.0, self._timers[0][0] - monotonic()) if self._timers else None
            for key, events in self._selector.select(wait_s):
                try:
                    self._on_socket_ready(key, events)
                except BaseException:  # includes SystemExit from a user's callback
                    log.exception("a message between actors could not be handled; listening goes on")
            self._run_callbacks()
            while self._timers and self._timers[0][0] <= monotonic():
                _call_logging_errors(heapq.heappop(self._timers)[2])

    def _on_socket_ready(self, key: selectors.SelectorKey, events: int) -> None:
        peer = key.data
        if peer is None:
            if key.fileobj is self._listener:
                self._accept()
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                while self._writers:
                    writer = self._writers.pop()
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.modify(writer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, writer)
            return
        if events & selectors.EVENT_WRITE and peer.flush():
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
        if events & selectors.EVENT_READ:
            try:
                bodies = peer.read()
                if bodies is None:
                    self._peer_disconnected(peer)
                    return
                for body in bodies:
                    try:
                        self._dispatch(peer, body)
                    except (ProtocolError, msgspec.MsgspecError):
                        raise
                    except PeerLost:
                        pass  # the requester has exited without waiting for the reply
                    except BaseException:  # the next messages belong to other calls
                        log.exception("a message between actors could not be handled; listening goes on")
            except (ProtocolError, msgspec.MsgspecError) as error:
                log.warning("process %s was cut off: %s", peer.address and peer.address.pid, error)
                self._peer_disconnected(peer)

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the listener stays readable, and this thread would spin
                log.warning("another process of the mesh cannot be heard: %s; it is tried again every second", error)
                self._selector.unregister(self._listener)
                self.call_later(1.0, self._resume_listening)
            return
        if not _is_same_user(socket):
            socket.close()
            return
        peer = Peer(socket, None, self._watch_writable, lambda: self._thread.ident or 0)
        self._connections.add(peer)
        self._selector.register(socket, selectors.EVENT_READ, peer)

    def _resume_listening(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _dispatch(self, peer: Any, body: memoryview) -> None:
        message = _decode(body)
        if peer.address is None and type(message) is not messages.PeerHello:
            raise ProtocolError("it spoke before it showed the key of this process")
        handler = self.message_handlers.get(type(message))
        if handler is not None:
            handler(peer, message)

    def _dispatch_own(self, peer: Any, body: memoryview) -> None:
        self.call_soon(lambda: self._dispatch(peer, body))

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
        handler = self._reply_handlers.get(handler_id)
        if handler is None:  # the caller no longer waits
            self.payloads.discard(peer, reply)
        elif handler.on_reply(peer, reply):
            self._reply_handlers.pop(handler_id, None)

    def announce_exit(self, reason: str) -> None:
        """Notify all peers that the exit of this process, which follows, is not a failure."""
        announcement = encode(messages.ShutdownNotice(reason))
        for peer in list(self._connections):
            with contextlib.suppress(PeerLost):
                peer.send(announcement)

    def _exit_requested(self, peer: Any, request: messages.PrepareShutdown) -> None:
        self.announce_exit(request.reason)
        peer.send(encode(messages.ActorReply(request.call, PICKLED_NONE)))

    def _exit_announced(self, peer: Any, announcement: messages.ShutdownNotice) -> None:
        peer.announced_exit = peer.announced_exit or announcement.reason

    def _peer_disconnected(self, peer: Peer) -> None:
        self._connections.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        pid = peer.address.pid if peer.address is not None else 0
        why = f"was stopped: {peer.announced_exit}" if peer.announced_exit is not None else "has ended"
        peer.close(f"its process (pid {pid}) {why}")
        self.payloads.forget_peer(peer)
        if peer.address is not None:
            self._record_lost_node(peer.address.node)
        for handler_id in list(self._reply_handlers):
            self._notify_lost_peer(handler_id, peer, peer.lost_reason or "")
        for callback in list(self.peer_lost_callbacks):
            callback(peer, peer.lost_reason or "")

    def _record_lost_node(self, node: str) -> None:
        self._lost_nodes.append(node)
        while len(self._lost_nodes) > BoundedDict.LIMIT:
            oldest = self._peers.get(self._lost_nodes.popleft())
            if oldest is not None and oldest.lost_reason is not None:
                del self._peers[oldest.address.node]

    def _watch_writable(self, peer: Peer) -> None:
        self._writers.append(peer)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    # ---- shared memory

    def release_segments(self) -> None:
        """Notify owners of segments that this process no longer uses."""
        for peer, segments in self.payloads.drain_released():
            with contextlib.suppress(PeerLost):
                peer.send(encode(messages.ReleaseSegments(segments)))

    def _start_sweeping(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            self.call_later(_SWEEP_INTERVAL_S, self._sweep_segments)

    def _sweep_segments(self) -> None:
        self.release_segments()
        self.payloads.pool.trim(_IDLE_SEGMENT_S)
        self._is_sweeping = self.payloads.has_segments
        if self._is_sweeping:
            self.call_later(_SWEEP_INTERVAL_S, self._sweep_segments)

    # ---- shutdown

    def drop_inherited(self) -> None:
        """After a fork, in the child: close inherited sockets, because the child is not a known peer."""
        self._closed = True
        self._peers[self.address.node].lost_reason = "this is another process"
        for peer in self._connections:
            peer.lost_reason = "this is another process"
            peer.socket.close()
        self._listener.close()
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)

    def close(self) -> None:
        """Leave: other processes see this one as exited, and open calls fail."""
        if self._closed or self.address.pid != os.getpid():
            return
        self.announce_exit("its program has ended")
        self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        NON_BLOCKING_THREADS.pop(self._thread.ident or 0, None)
        self._peers[self.address.node].lost_reason = "this process has left"
        self._run_callbacks()
        for peer in list(self._connections):
            peer.close("this process has left")
        self._listener.close()
        self._selector.close()
        self.payloads.close()
        _unlink_socket(self.address.node)


def _call_logging_errors(callback: Callable[[], None]) -> None:
    """Run a callback and log its errors, so that the reader thread continues."""
    try:
        callback()
    except PeerLost:
        pass  # the requester has exited without waiting for the reply
    except BaseException:
        log.exception("a callback between actors failed; listening goes on")


def _socket_address(node: str) -> str | bytes:
    """Return a process's listening address.

    On Linux an abstract socket name, which leaves no file; elsewhere a socket in the runtime folder. A connecting
    process shows the listening process's key in both cases.
    """
    if sys.platform.startswith("linux"):
        return b"\0meshbook/" + node.encode()
    return str(keys.runtime_folder() / f"actors-{node}.sock")


def _is_same_user(socket: sockets.socket) -> bool:
    """Whether the other end of a socket runs as the same user.

    Every user of a machine can see an abstract socket name, connect to it, and bind it after its process has exited.
    Other users must not receive a key or hold a connection.
    """
    if not sys.platform.startswith("linux"):
        return True  # the runtime folder is private to the user
    credentials = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("iII"))
    _, user, _ = struct.unpack("iII", credentials)
    return bool(user == os.geteuid())


def _listen(node: str) -> sockets.socket:
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    listener.bind(_socket_address(node))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _unlink_socket(node: str) -> None:
    path = _socket_address(node)
    if isinstance(path, str):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _drop_inherited() -> None:
    """In a forked child: close inherited sockets, because an open copy would hide the parent's exit from its peers."""
    if _local_transport is not None:
        _local_transport.drop_inherited()


os.register_at_fork(after_in_child=_drop_inherited)


def announce_exit(reason: str) -> None:
    """Notify all peers that this process is about to exit."""
    if has_local_transport():
        local_transport().announce_exit(reason)


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
