"""A process's end of all that actors say to each other: one listening socket, one reading thread, one table of calls.

Whoever calls writes to the other process's socket on its own thread; what comes in is heard on the reading thread,
which runs no user code: a call goes into its actor's mailbox, an answer to whoever waits for it. A connection that ends
is a process that has ended: every open call to it fails at that moment. All that changes an open call (an answer, the
end of a process, a message of this process to itself) is done on the reading thread, one after the other.

The same code serves the notebook and the ranks. `local_transport()` is this process's own, made when first needed.
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

_IDLE_SEGMENT_S = 30.0  # after which shared memory that nobody reads goes back to the system
_SWEEP_INTERVAL_S = 0.5  # between looks for segments that were let go of, while there are any


def encode(message: messages.ActorMessage) -> bytes:
    """A word as a frame: the same bytes go to every process of a mesh."""
    return encode_frame(_encode(message))


class ExitReasons:
    """How processes have ended, as somebody may tell a moment after their sockets have closed."""

    def __init__(self) -> None:
        self.delay_s = 0.0  # how long it usually takes until it is told; 0: nobody tells
        self._reason_by_pid: BoundedDict[int, str] = BoundedDict()
        self._changed = threading.Condition()

    def record(self, pid: int, reason: str) -> None:
        with self._changed:
            self._reason_by_pid[pid] = reason
            self._changed.notify_all()

    def describe(self, address: NodeAddress | None, *, wait: bool) -> str:
        """Why nobody answers there. Waits for the news, briefly, if there may be some."""
        if address is None:
            return "its process has ended"
        with self._changed:
            if wait and self.delay_s:
                self._changed.wait_for(lambda: address.pid in self._reason_by_pid, self.delay_s)
            reason = self._reason_by_pid.get(address.pid)
        return f"its process (pid {address.pid}) {reason or 'has ended'}"


def unblock_signals() -> None:
    """Make this thread one that user code may run on.

    Threads inherit the signals that their maker has blocked, and so do processes: the child of a thread that blocks
    SIGCHLD would never hear of its own children's end. Only SIGINT stays blocked: it is the main thread's, for Stop.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})


class ReplyHandler(Protocol):
    """Who waits for answers under a number."""

    def on_reply(self, peer: Any, reply: Any) -> bool:
        """An Answer, Failure or ToPort came; True: nothing more will."""

    def on_peer_lost(self, peer: Any, reason: str) -> bool:
        """The process behind `peer` has ended; True: nothing more will come."""


@runtime_checkable
class CallReplyHandler(ReplyHandler, Protocol):
    """Who waits for the answers of a call, and not for what comes through a port."""

    caller: Any  # (id of the actor, its message) that has made it; None: code outside any actor

    def awaited_replies(self) -> list[messages.PendingEndpointCall]:
        """The actors that have not answered, if somebody waits for them."""


class Transport:
    """This process among those with actors."""

    def __init__(self) -> None:
        self.address = NodeAddress(secrets.token_hex(8), secrets.token_hex(16), os.getpid())
        self.payloads = PayloadCodec()
        self.message_handlers: dict[type, Callable[[Any, Any], None]] = {  # more by `life`, when there are actors
            messages.PeerHello: self._greeted,
            messages.ActorReply: self._reply_received,
            messages.ActorFailure: self._reply_received,
            messages.PortMessage: self._reply_received,
            messages.PrepareShutdown: self._exit_requested,
            messages.ShutdownNotice: self._exit_announced,
            messages.ReleaseSegments: lambda peer, word: self.payloads.release(peer, word.segments),
        }
        self.peer_lost_callbacks: list[Callable[[Any, str], None]] = []
        self.on_call_started: Callable[[], None] | None = None  # called with each call that is made, by who makes it
        self.exit_reasons = ExitReasons()
        self._handler_ids = itertools.count(1)
        self._reply_handlers: dict[int, ReplyHandler] = {}
        self._peers: dict[str, Any] = {self.address.node: Loopback(self.address, self._dispatch_own)}
        self._lost_nodes: deque[str] = deque()  # of `_peers`; who is told that they are gone is told why
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
        self._is_wake_pending = False  # the reading thread will look at `_soon`
        self._closed = False
        self._is_sweeping = False
        self.payloads.on_segments_used = self._start_sweeping
        self._thread = threading.Thread(target=self._run, name="meshbook-post", daemon=True)
        self._thread.start()

    # ---- sending

    def peer(self, address: NodeAddress) -> Any:
        """The connection to a process; made on first use.

        Raises:
            PeerGone: there is no such process any more.
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
            self._peers[address.node] = peer  # last: other threads may send from now on, after the greeting
            return peer

    def add_reply_handler(self, handler: ReplyHandler) -> int:
        """A number under which answers will be given to `handler`."""
        handler_id = next(self._handler_ids)
        self._reply_handlers[handler_id] = handler
        if self.on_call_started is not None:
            self.on_call_started()
        return handler_id

    def awaited_replies(self) -> list[tuple[Any, list[messages.PendingEndpointCall]]]:
        """The open calls that somebody in this process waits for, with who has made them. From any thread."""
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
        """What was to be sent to `peer` could not be. From any thread; those who wait are told on the reading one."""
        self.call_soon(lambda: self._notify_lost_peer(handler_id, peer, reason))

    def _notify_lost_peer(self, handler_id: int, peer: Any, reason: str) -> None:
        handler = self._reply_handlers.get(handler_id)
        if handler is not None and handler.on_peer_lost(peer, reason):
            self._reply_handlers.pop(handler_id, None)

    def reply(self, peer: Any, message: messages.ActorMessage) -> None:
        """Send what was packed for `peer` alone; if that is gone, the memory goes back."""
        try:
            peer.send(encode(message))
        except PeerLost:
            self.payloads.pool.remove_reader(peer.id)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` on the reading thread, where it must not wait."""
        heapq.heappush(self._timers, (monotonic() + delay_s, next(self._handler_ids), callback))
        self._wake()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the reading thread, where it must not wait; in the order of these calls."""
        self._callbacks.append(callback)
        if not self._is_wake_pending:
            self._is_wake_pending = True
            self._wake()
        if self._closed:  # nobody reads any more
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        self._is_wake_pending = False  # first: what comes from now on calls again
        for _ in range(len(self._callbacks)):
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # after the end, threads do this beside each other
                return
            _call_logging_errors(callback)

    # ---- the reading thread

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
                except BaseException:  # SystemExit of a user's callback among them
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
                        pass  # it has not waited for what it asked
                    except BaseException:  # those behind it are other people's
                        log.exception("a message between actors could not be handled; listening goes on")
            except (ProtocolError, msgspec.MsgspecError) as error:
                log.warning("process %s was cut off: %s", peer.address and peer.address.pid, error)
                self._peer_disconnected(peer)

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it stays readable, and this thread would do nothing else
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
        if handler is None:  # nobody waits any more
            self.payloads.discard(peer, reply)
        elif handler.on_reply(peer, reply):
            self._reply_handlers.pop(handler_id, None)

    def announce_exit(self, reason: str) -> None:
        """Tell everybody that the end of this process, which comes next, is no failure."""
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
        """Tell owners which of their segments nobody here looks at any more."""
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

    # ---- the end

    def drop_inherited(self) -> None:
        """After a fork, in the child: it is nobody that others know."""
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
        """Leave. Other processes see this one as ended; open calls fail."""
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
    """The reading thread goes on, whatever becomes of one thing that it does."""
    try:
        callback()
    except PeerLost:
        pass  # it has not waited for what it asked
    except BaseException:
        log.exception("a callback between actors failed; listening goes on")


def _socket_address(node: str) -> str | bytes:
    """Where a process listens: on Linux a name that leaves no file behind, elsewhere a socket in the runtime folder.
    Who connects shows the process's key either way."""
    if sys.platform.startswith("linux"):
        return b"\0meshbook/" + node.encode()
    return str(keys.runtime_folder() / f"actors-{node}.sock")


def _is_same_user(socket: sockets.socket) -> bool:
    """Whether who is at the other end runs as the same user. Everybody on a machine can see such a name, knock, and
    take it when its process has ended: nobody else is to be shown a key, or to hold a connection."""
    if not sys.platform.startswith("linux"):
        return True  # the runtime folder lets nobody else in
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
    """In a child that user code has forked: a socket that it holds would keep others from hearing of our end."""
    if _local_transport is not None:
        _local_transport.drop_inherited()


os.register_at_fork(after_in_child=_drop_inherited)


def announce_exit(reason: str) -> None:
    """This process is told to end: say so to those that it has spoken with."""
    if has_local_transport():
        local_transport().announce_exit(reason)


_lock = threading.Lock()
_local_transport: Transport | None = None


def local_transport() -> Transport:
    """This process's own post. One per process, because references to actors that arrive in messages need it."""
    global _local_transport
    if _local_transport is None or _local_transport.address.pid != os.getpid():
        with _lock:
            if _local_transport is None or _local_transport.address.pid != os.getpid():
                _local_transport = Transport()
                atexit.register(_local_transport.close)
    return _local_transport


def has_local_transport() -> bool:
    """Whether this process has one already."""
    return _local_transport is not None and _local_transport.address.pid == os.getpid()
