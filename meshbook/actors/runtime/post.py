"""A process's end of all that actors say to each other: one listening socket, one reading thread, one table of calls.

Whoever calls writes to the other process's socket on its own thread; what comes in is heard on the reading thread,
which runs no user code: a call goes into its actor's mailbox, an answer to whoever waits for it. A connection that ends
is a process that has ended: every open call to it fails at that moment. All that changes an open call (an answer, the
end of a process, a message of this process to itself) is done on the reading thread, one after the other.

The same code serves the notebook and the ranks. `here()` is this process's own, made when it is first needed.
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

from meshbook.actors.runtime.futures import MUST_NOT_WAIT
from meshbook.actors.runtime.parcels import NONE, Parcels
from meshbook.actors.runtime.peer import Loopback, Peer, PeerGone, frame
from meshbook.actors.runtime.remembered import Remembered
from meshbook.clock import monotonic
from meshbook.errors import ProtocolError
from meshbook.wire import codec, keys, messages
from meshbook.wire.messages import Address

log = logging.getLogger("meshbook.actors")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(messages.PeerMessage).decode

_IDLE_S = 30.0  # after which shared memory that nobody reads goes back to the system
_LOOK_S = 0.5  # between looks for segments that were let go of, while there are any


def encode(word: messages.PeerWord) -> bytes:
    """A word as a frame: the same bytes go to every process of a mesh."""
    return frame(_encode(word))


class News:
    """How processes have ended, as somebody may tell a moment after their sockets have closed."""

    def __init__(self) -> None:
        self.delay_s = 0.0  # how long it usually takes until it is told; 0: nobody tells
        self._told: Remembered[int, str] = Remembered()
        self._change = threading.Condition()

    def tell(self, pid: int, how: str) -> None:
        with self._change:
            self._told[pid] = how
            self._change.notify_all()

    def of(self, address: Address | None, *, wait: bool) -> str:
        """Why nobody answers there. Waits for the news, briefly, if there may be some."""
        if address is None:
            return "its process has ended"
        with self._change:
            if wait and self.delay_s:
                self._change.wait_for(lambda: address.pid in self._told, self.delay_s)
            how = self._told.get(address.pid)
        return f"its process (pid {address.pid}) {how or 'has ended'}"


def for_user_code() -> None:
    """Make this thread one that user code may run on.

    Threads inherit the signals that their maker has blocked, and so do processes: the child of a thread that blocks
    SIGCHLD would never hear of its own children's end. Only SIGINT stays blocked: it is the main thread's, for Stop.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})


class Expected(Protocol):
    """Who waits for answers under a number."""

    def arrived(self, peer: Any, word: Any) -> bool:
        """An Answer, Failure or ToPort came; True: nothing more will."""

    def lost(self, peer: Any, reason: str) -> bool:
        """The process behind `peer` has ended; True: nothing more will come."""


@runtime_checkable
class Call(Expected, Protocol):
    """Who waits for the answers of a call, and not for what comes through a port."""

    caller: Any  # (id of the actor, its message) that has made it; None: code outside any actor

    def awaited(self) -> list[messages.AnswerAwaited]:
        """The actors that have not answered, if somebody waits for them."""


class Post:
    """This process among those with actors."""

    def __init__(self) -> None:
        self.address = Address(secrets.token_hex(8), secrets.token_hex(16), os.getpid())
        self.parcels = Parcels()
        self.hears: dict[type, Callable[[Any, Any], None]] = {  # more by `life`, when there are actors
            messages.Greet: self._greeted,
            messages.Answer: self._answered,
            messages.Failure: self._answered,
            messages.ToPort: self._answered,
            messages.Leave: self._leave,
            messages.Leaving: self._peer_leaving,
            messages.LetGo: lambda peer, word: self.parcels.release(peer, word.segments),
        }
        self.on_gone: list[Callable[[Any, str], None]] = []
        self.on_expect: Callable[[], None] | None = None  # called with each call that is made, by who makes it
        self.news = News()
        self._numbers = itertools.count(1)
        self._expected: dict[int, Expected] = {}
        self._peers: dict[str, Any] = {self.address.node: Loopback(self.address, self._hear_own)}
        self._gone_nodes: deque[str] = deque()  # of `_peers`; who is told that they are gone is told why
        self._connections: set[Peer] = set()
        self._connecting = threading.Lock()
        self._listener = _listen(self.address.node)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._writers: list[Peer] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._is_called = False  # the reading thread will look at `_soon`
        self._closed = False
        self._looking = False
        self.parcels.first_borrowed = self._start_looking
        self._thread = threading.Thread(target=self._run, name="meshbook-post", daemon=True)
        self._thread.start()

    # ---- sending

    def peer(self, address: Address) -> Any:
        """The connection to a process; made on first use.

        Raises:
            PeerGone: there is no such process any more.
        """
        found = self._peers.get(address.node)
        if found is not None and found.gone is None:
            return found
        with self._connecting:
            found = self._peers.get(address.node)
            if found is not None:
                if found.gone is None:
                    return found
                raise PeerGone(found.gone)
            socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
            try:
                socket.connect(_place(address.node))
                if not _is_of_this_user(socket):
                    raise ConnectionRefusedError("somebody else has taken its place")
                peer = Peer(socket, address, self._wants_to_write, lambda: self._thread.ident or 0)
                peer.send(encode(messages.Greet(codec.PROTOCOL.decode(), address.key, self.address)))
            except (OSError, PeerGone) as error:
                socket.close()
                raise PeerGone(f"its process (pid {address.pid}) has ended") from error
            self._connections.add(peer)
            self._selector.register(socket, selectors.EVENT_READ, peer)
            self._peers[address.node] = peer  # last: other threads may send from now on, after the greeting
            return peer

    def expect(self, expected: Expected) -> int:
        """A number under which answers will be given to `expected`."""
        number = next(self._numbers)
        self._expected[number] = expected
        if self.on_expect is not None:
            self.on_expect()
        return number

    def awaited(self) -> list[tuple[Any, list[messages.AnswerAwaited]]]:
        """The open calls that somebody in this process waits for, with who has made them. From any thread."""
        found = []
        for expected in list(self._expected.values()):
            if isinstance(expected, Call) and (answers := expected.awaited()):
                found.append((expected.caller, answers))
        return found

    @property
    def has_open_calls(self) -> bool:
        return bool(self._expected)

    def forget(self, number: int) -> None:
        self._expected.pop(number, None)

    def lost(self, number: int, peer: Any, reason: str) -> None:
        """What was to be sent to `peer` could not be. From any thread; those who wait are told on the reading one."""
        self.call_soon(lambda: self._lost(number, peer, reason))

    def _lost(self, number: int, peer: Any, reason: str) -> None:
        expected = self._expected.get(number)
        if expected is not None and expected.lost(peer, reason):
            self._expected.pop(number, None)

    def reply(self, peer: Any, word: messages.PeerWord) -> None:
        """Send what was packed for `peer` alone; if that is gone, the memory goes back."""
        try:
            peer.send(encode(word))
        except PeerGone:
            self.parcels.pool.forget_reader(peer.number)

    def call_later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` on the reading thread, where it must not wait."""
        heapq.heappush(self._timers, (monotonic() + delay_s, next(self._numbers), act))
        self._wake()

    def call_soon(self, act: Callable[[], None]) -> None:
        """Call `act` on the reading thread, where it must not wait; in the order of these calls."""
        self._soon.append(act)
        if not self._is_called:
            self._is_called = True
            self._wake()
        if self._closed:  # nobody reads any more
            self._work_off()

    def _work_off(self) -> None:
        self._is_called = False  # first: what comes from now on calls again
        for _ in range(len(self._soon)):
            try:
                act = self._soon.popleft()
            except IndexError:  # after the end, threads do this beside each other
                return
            _guarded(act)

    # ---- the reading thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        MUST_NOT_WAIT[threading.get_ident()] = (
            "this thread hears the answers of actors and cannot wait for one; use a callback"
        )
        while not self._closed:
            wait_s = max(0.0, self._timers[0][0] - monotonic()) if self._timers else None
            for key, events in self._selector.select(wait_s):
                try:
                    self._ready(key, events)
                except BaseException:  # SystemExit of a user's callback among them
                    log.exception("a message between actors could not be handled; listening goes on")
            self._work_off()
            while self._timers and self._timers[0][0] <= monotonic():
                _guarded(heapq.heappop(self._timers)[2])

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
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
                        self._selector.modify(
                            writer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, writer
                        )
            return
        if events & selectors.EVENT_WRITE and peer.write_on():
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
        if events & selectors.EVENT_READ:
            try:
                bodies = peer.read()
                if bodies is None:
                    self._ended(peer)
                    return
                for body in bodies:
                    try:
                        self._hear(peer, body)
                    except (ProtocolError, msgspec.MsgspecError):
                        raise
                    except PeerGone:
                        pass  # it has not waited for what it asked
                    except BaseException:  # those behind it are other people's
                        log.exception("a message between actors could not be handled; listening goes on")
            except (ProtocolError, msgspec.MsgspecError) as error:
                log.warning("process %s was cut off: %s", peer.address and peer.address.pid, error)
                self._ended(peer)

    def _accept(self) -> None:
        try:
            socket, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it stays readable, and this thread would do nothing else
                log.warning("another process of the mesh cannot be heard: %s; it is tried again every second", error)
                self._selector.unregister(self._listener)
                self.call_later(1.0, self._listen_again)
            return
        if not _is_of_this_user(socket):
            socket.close()
            return
        peer = Peer(socket, None, self._wants_to_write, lambda: self._thread.ident or 0)
        self._connections.add(peer)
        self._selector.register(socket, selectors.EVENT_READ, peer)

    def _listen_again(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _hear(self, peer: Any, body: memoryview) -> None:
        word = _decode(body)
        if peer.address is None and type(word) is not messages.Greet:
            raise ProtocolError("it spoke before it showed the key of this process")
        hear = self.hears.get(type(word))
        if hear is not None:
            hear(peer, word)

    def _hear_own(self, peer: Any, body: memoryview) -> None:
        self.call_soon(lambda: self._hear(peer, body))

    def _greeted(self, peer: Peer, word: messages.Greet) -> None:
        if word.protocol != codec.PROTOCOL.decode():
            raise ProtocolError(codec.describe_version(word.protocol.encode()))
        if not hmac.compare_digest(word.key.encode(), self.address.key.encode()):
            raise ProtocolError("it does not know the key of this process")
        peer.address = word.address
        with self._connecting:
            self._peers.setdefault(word.address.node, peer)

    def _answered(self, peer: Any, word: Any) -> None:
        number = word.port if type(word) is messages.ToPort else word.call
        expected = self._expected.get(number)
        if expected is None:  # nobody waits any more
            self.parcels.discard(peer, word)
        elif expected.arrived(peer, word):
            self._expected.pop(number, None)

    def farewell(self, reason: str) -> None:
        """Tell everybody that the end of this process, which comes next, is no failure."""
        said = encode(messages.Leaving(reason))
        for peer in list(self._connections):
            with contextlib.suppress(PeerGone):
                peer.send(said)

    def _leave(self, peer: Any, word: messages.Leave) -> None:
        self.farewell(word.reason)
        peer.send(encode(messages.Answer(word.call, NONE)))

    def _peer_leaving(self, peer: Any, word: messages.Leaving) -> None:
        peer.leaving = peer.leaving or word.reason

    def _ended(self, peer: Peer) -> None:
        self._connections.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        pid = peer.address.pid if peer.address is not None else 0
        why = f"was stopped: {peer.leaving}" if peer.leaving is not None else "has ended"
        peer.close(f"its process (pid {pid}) {why}")
        self.parcels.forget(peer)
        if peer.address is not None:
            self._remember_gone(peer.address.node)
        for number in list(self._expected):
            self._lost(number, peer, peer.gone or "")
        for told in list(self.on_gone):
            told(peer, peer.gone or "")

    def _remember_gone(self, node: str) -> None:
        self._gone_nodes.append(node)
        while len(self._gone_nodes) > Remembered.LIMIT:
            oldest = self._peers.get(self._gone_nodes.popleft())
            if oldest is not None and oldest.gone is not None:
                del self._peers[oldest.address.node]

    def _wants_to_write(self, peer: Peer) -> None:
        self._writers.append(peer)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    # ---- shared memory

    def let_go(self) -> None:
        """Tell owners which of their segments nobody here looks at any more."""
        for peer, segments in self.parcels.take_released():
            with contextlib.suppress(PeerGone):
                peer.send(encode(messages.LetGo(segments)))

    def _start_looking(self) -> None:
        if not self._looking:
            self._looking = True
            self.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self.let_go()
        self.parcels.pool.trim(_IDLE_S)
        self._looking = self.parcels.busy
        if self._looking:
            self.call_later(_LOOK_S, self._look)

    # ---- the end

    def drop_inherited(self) -> None:
        """After a fork, in the child: it is nobody that others know."""
        self._closed = True
        self._peers[self.address.node].gone = "this is another process"
        for peer in self._connections:
            peer.gone = "this is another process"
            peer.socket.close()
        self._listener.close()
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)

    def close(self) -> None:
        """Leave. Other processes see this one as ended; open calls fail."""
        if self._closed or self.address.pid != os.getpid():
            return
        self.farewell("its program has ended")
        self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        MUST_NOT_WAIT.pop(self._thread.ident or 0, None)
        self._peers[self.address.node].gone = "this process has left"
        self._work_off()
        for peer in list(self._connections):
            peer.close("this process has left")
        self._listener.close()
        self._selector.close()
        self.parcels.close()
        _remove(self.address.node)


def _guarded(act: Callable[[], None]) -> None:
    """The reading thread goes on, whatever becomes of one thing that it does."""
    try:
        act()
    except PeerGone:
        pass  # it has not waited for what it asked
    except BaseException:
        log.exception("a callback between actors failed; listening goes on")


def _place(node: str) -> str | bytes:
    """Where a process listens: on Linux a name that leaves no file behind, elsewhere a socket in the runtime folder.
    Who connects shows the process's key either way."""
    if sys.platform.startswith("linux"):
        return b"\0meshbook/" + node.encode()
    return str(keys.runtime_folder() / f"actors-{node}.sock")


def _is_of_this_user(socket: sockets.socket) -> bool:
    """Whether who is at the other end runs as the same user. Everybody on a machine can see such a name, knock, and
    take it when its process has ended: nobody else is to be shown a key, or to hold a connection."""
    if not sys.platform.startswith("linux"):
        return True  # the runtime folder lets nobody else in
    found = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("iII"))
    _, user, _ = struct.unpack("iII", found)
    return bool(user == os.geteuid())


def _listen(node: str) -> sockets.socket:
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    listener.bind(_place(node))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _remove(node: str) -> None:
    place = _place(node)
    if isinstance(place, str):
        with contextlib.suppress(OSError):
            os.unlink(place)


def _forked() -> None:
    """In a child that user code has forked: a socket that it holds would keep others from hearing of our end."""
    if _post is not None:
        _post.drop_inherited()


os.register_at_fork(after_in_child=_forked)


def farewell(reason: str) -> None:
    """This process is told to end: say so to those that it has spoken with."""
    if is_open():
        here().farewell(reason)


_lock = threading.Lock()
_post: Post | None = None


def here() -> Post:
    """This process's own post. One per process, because references to actors that arrive in messages need it."""
    global _post
    if _post is None or _post.address.pid != os.getpid():
        with _lock:
            if _post is None or _post.address.pid != os.getpid():
                _post = Post()
                atexit.register(_post.close)
    return _post


def is_open() -> bool:
    """Whether this process has one already."""
    return _post is not None and _post.address.pid == os.getpid()
