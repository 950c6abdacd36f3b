"""TCP connections between two machines that carry pieces of buffers, beside the messages that ask for them.

A message between machines is numbered, kept for a repetition, logged for a standby, encrypted by CURVE or ssh, and
copied at each of these. Here one thread reads memory, seals it (AES-GCM, which processors have instructions for) and
sends it, and one receives and opens it. Hosts listen and the supervisor connects. Nothing depends on it: where there is
no connection, or it has ended, pieces come as messages.

Who listens makes a key and sends it to the other in a message. Each connection has a key for each direction, derived
from that one and from random bytes of both ends; a record's number is its nonce. A record that was changed, repeated or
left out on the way does not open, and that ends the connection.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import logging
import os
import secrets
import socket as sockets
import struct
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import msgspec

from meshbook.clock import sleep
from meshbook.wire.loop import Loop
from meshbook.wire.memory_files import keep_freed_memory
from meshbook.wire.messages import BufferChunk, DataAddress, FetchChunk
from meshbook.wire.rate_limited_log import RateLimitedLog
from meshbook.wire.transfers import CHUNK_BYTES, serve, without_bytes

log = logging.getLogger("meshbook.data")

_CONNECT_TIMEOUT_S: Final = 3.0  # also for the greeting of who has connected
_REDIAL_S: Final = 2.0
# A connection that says nothing is looked at after so many seconds, and ends after as many more without an answer: a
# firewall may have forgotten it. What is missing then comes as messages.
_KEEP_ALIVE_S: Final = 5
_SALT_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_LENGTH: Final = struct.Struct("<I")  # of a sealed record, in front of it
_HEAD: Final = struct.Struct("<H")  # length of what is said of a piece, in front of that; then comes its data
_MAX_RECORD_BYTES: Final = CHUNK_BYTES + (64 << 10)  # a piece, and what is said of it
_GREETING: Final = b"meshbook data 1"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BufferChunk).decode


class DataConnections:
    """A process's connections to others, which it knows by numbers. All methods are called on the loop's thread."""

    def __init__(
        self, loop: Loop, on_chunk: Callable[[int, BufferChunk], None], on_ended: Callable[[int], None]
    ) -> None:
        """
        Args:
            on_chunk: takes the peer's number and a piece that has come.
            on_ended: called when a connection has ended: what was asked for and has not come by it will not come.
        """
        self._loop, self._on_chunk, self._on_ended = loop, on_chunk, on_ended
        self._connections: dict[int, _Connection] = {}
        self._addresses: dict[int, DataAddress] = {}  # of peers that this process connects to
        self._listener: sockets.socket | None = None
        # What has happened on other threads: peer and piece, or None for the end of its connection.
        self._events: deque[tuple[int, BufferChunk | None]] = deque()
        self._taken: list[tuple[int, BufferChunk | None]] = []
        self._refusals = RateLimitedLog(log)
        self._pipe: tuple[int, int] | None = None  # by which other threads wake the loop

    def listen(self, host: str, peer: int) -> DataAddress | None:
        """Accept connections of one peer at an address of this machine; None: it cannot be listened on."""
        try:
            family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
            listener = self._listener = sockets.create_server((host, 0), family=family)
        except OSError as error:
            log.warning("%s cannot be listened on: %s; values come as messages, which is slower", host, error)
            return None
        self._watch()
        address = DataAddress(host, listener.getsockname()[1], secrets.token_bytes(32))
        self._start_thread(lambda: self._accept(listener, address.key, peer))
        return address

    def dial(self, peer: int, address: DataAddress) -> None:
        """Connect to a peer, on a thread. Where that is not possible there is no connection."""
        self._watch()
        self._addresses[peer] = address
        self._loop.act(lambda: self._start_connecting(peer, address))

    def is_open(self, peer: int) -> bool:
        return peer in self._connections

    def serve(self, peer: int, request: FetchChunk) -> bool:
        """Send what a peer asks for, on a thread; return False if there is no connection."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.requests.put(request)
        return connection is not None

    def drop(self, peer: int) -> None:
        """End the connection to a peer, which is gone."""
        self._addresses.pop(peer, None)
        if (connection := self._connections.pop(peer, None)) is not None:
            self._loop.act(connection.end, logged=False)

    def take_over(self) -> None:
        """Forget all connections, in a process that has taken the place of their owner."""
        for connection in self._connections.values():
            connection.socket.detach()  # closed already; another file may have its number
        if self._listener is not None:
            self._listener.detach()
        self._connections, self._listener = {}, None
        self._events.clear()
        for peer, address in self._addresses.items():
            self.dial(peer, address)

    def close(self) -> None:
        """End all connections. The pipe stays open as long as this process: threads may write to it once more."""
        self._addresses.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(sockets.SHUT_RDWR)  # which ends `accept`
            listener.close()
        for connection in list(self._connections.values()):
            connection.end()
        if self._pipe is not None:
            self._loop.unwatch(self._pipe[0])

    # ---- events of other threads, on the loop's

    def _watch(self) -> None:
        if self._pipe is None:
            keep_freed_memory()
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)
            self._loop.watch_fd(self._pipe[0], self._handle_events, logged=True)

    def _handle_events(self) -> None:
        events = self._loop.observe(self._take_events)
        taken, self._taken = self._taken, []
        for peer, chunk in taken or events:  # a standby has the events without data
            if chunk is not None:
                self._on_chunk(peer, chunk)
                continue
            self._on_ended(peer)
            if (address := self._addresses.get(peer)) is not None:
                self._loop.call_later(_REDIAL_S, lambda peer=peer, address=address: self._redial(peer, address))  # type: ignore[misc]

    def _take_events(self) -> list[tuple[int, BufferChunk | None]]:
        """Take the events into `_taken`, and return them without data."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)  # type: ignore[index]  # it is there before anything happens
        for _ in range(len(self._events)):
            self._taken.append(self._events.popleft())
        return [(peer, chunk and without_bytes(chunk)) for peer, chunk in self._taken]

    def _redial(self, peer: int, address: DataAddress) -> None:
        def unless_there_is_one() -> None:
            if not self.is_open(peer):
                self._start_connecting(peer, address, again=True)

        if self._addresses.get(peer) is address:
            self._loop.act(unless_there_is_one)

    # ---- threads

    def _start_connecting(self, peer: int, address: DataAddress, *, again: bool = False) -> None:
        def connect() -> None:
            if not self._connect(peer, address) and again:  # there was a way, and may be one later
                self._post(peer, None)

        self._start_thread(connect)

    def _start_thread(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="meshbook-data", daemon=True).start()

    def _accept(self, listener: sockets.socket, key: bytes, peer: int) -> None:
        while True:
            try:
                socket, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):  # it was closed
                    return
                sleep(_REDIAL_S)  # no descriptor is left, or who has connected is gone
                continue
            try:
                connection = _Connection(socket, key, is_listener=True)
            except OSError as error:
                self._refusals.warning("a data connection was refused: %s", error)
                socket.close()
                continue
            if (former := self._connections.get(peer)) is not None:
                former.end()
            self._start_thread(lambda connection=connection: self._receive(peer, connection))  # type: ignore[misc]

    def _connect(self, peer: int, address: DataAddress) -> bool:
        """Connect, and receive until the connection ends; return whether there was one."""
        try:
            socket = sockets.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            log.info("%s:%d cannot be reached (%s); values go as messages", address.host, address.port, error)
            return False
        try:
            connection = _Connection(socket, address.key, is_listener=False)
        except OSError as error:
            log.warning("%s:%d is no data connection: %s", address.host, address.port, error)
            socket.close()
            return False
        if self._addresses.get(peer) is address:
            self._receive(peer, connection)
        else:
            socket.close()
        return True

    def _receive(self, peer: int, connection: _Connection) -> None:
        """Receive until the connection ends."""
        self._start_thread(connection.send_requested)
        self._connections[peer] = connection
        try:
            while True:
                self._post(peer, connection.receive_chunk())
        except (OSError, msgspec.MsgspecError) as error:
            log.info("a data connection has ended: %s", error)
        finally:
            if self._connections.get(peer) is connection:
                del self._connections[peer]
            connection.end()
            connection.socket.close()
            self._post(peer, None)

    def _post(self, peer: int, chunk: BufferChunk | None) -> None:
        self._events.append((peer, chunk))
        os.write(self._pipe[1], b"x")  # type: ignore[index]


class _Connection:
    """A connected socket whose records are sealed. One thread sends and one receives.

    Attributes:
        requests: what is to be sent.
    """

    def __init__(self, socket: sockets.socket, key: bytes, *, is_listener: bool) -> None:
        """Exchange random bytes and greetings. Blocks, for some seconds at most.

        Raises:
            OSError: the other end does not have the key, or says nothing. The socket stays open.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # which processes of one machine do without

        self.socket = socket
        self.requests: SimpleQueue[FetchChunk | None] = SimpleQueue()
        self._num_sent, self._num_received = itertools.count(), itertools.count()
        self._memory = memoryview(bytearray(_MAX_RECORD_BYTES))  # for what is received
        _set_options(socket)
        socket.settimeout(_CONNECT_TIMEOUT_S)
        own = secrets.token_bytes(_SALT_BYTES)
        socket.sendall(own)
        other = bytes(self._receive_exactly(_SALT_BYTES))
        salts = other + own if is_listener else own + other
        to_listener, from_listener = (AESGCM(hmac.digest(key, salts + way, "sha256")) for way in (b"to", b"from"))
        self._sealer, self._opener = (from_listener, to_listener) if is_listener else (to_listener, from_listener)
        self._send(_GREETING)
        if self.receive() != _GREETING:
            raise OSError("it speaks another version")
        socket.settimeout(None)

    def send_requested(self) -> None:
        """Send what is requested, until the connection ends."""
        memory = memoryview(bytearray(_MAX_RECORD_BYTES))
        data_at = _MAX_RECORD_BYTES - CHUNK_BYTES
        try:
            while (request := self.requests.get()) is not None:
                for piece, data in serve(request, memory[data_at:]):
                    head = _encode(piece)
                    begin = data_at - len(head)
                    memory[begin:data_at] = head
                    _HEAD.pack_into(memory, begin - _HEAD.size, len(head))
                    self._send(memory[begin - _HEAD.size : data_at + len(data)])
        except OSError as error:
            log.info("a data connection has ended: %s", error)
        finally:
            self.end()

    def receive_chunk(self) -> BufferChunk:
        """Wait for the next piece. Raises OSError or MsgspecError: the connection has ended, or what came is none."""
        record = memoryview(self.receive())
        if len(record) < _HEAD.size:
            raise OSError("a record came that is too short")
        data_at = _HEAD.size + _HEAD.unpack_from(record)[0]
        return msgspec.structs.replace(_decode(record[_HEAD.size : data_at]), data=record[data_at:])

    def _send(self, record: bytes | memoryview) -> None:
        sealed = self._sealer.encrypt(next(self._num_sent).to_bytes(_NONCE_BYTES, "big"), record, None)
        self.socket.sendall(_LENGTH.pack(len(sealed)), sockets.MSG_MORE)  # in one packet with what follows
        self.socket.sendall(sealed)

    def receive(self) -> bytes:
        """Return the next record. Blocks. Raises OSError: the connection has ended, or this is not the other end's."""
        from cryptography.exceptions import InvalidTag

        (nbytes,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if nbytes > _MAX_RECORD_BYTES:
            raise OSError(f"a record of {nbytes:,} bytes came")
        sealed = self._receive_exactly(nbytes)
        try:
            return self._opener.decrypt(next(self._num_received).to_bytes(_NONCE_BYTES, "big"), sealed, None)
        except InvalidTag:
            raise OSError("what came was not sealed with the mesh's key") from None

    def _receive_exactly(self, nbytes: int) -> memoryview:
        """Receive so many bytes, into memory that the next call uses again."""
        view = self._memory[:nbytes]
        while view:
            num_came = self.socket.recv_into(view)
            if not num_came:
                raise OSError("it was closed")
            view = view[num_came:]
        return self._memory[:nbytes]

    def end(self) -> None:
        """End both threads. Any thread, also more than once."""
        self.requests.put(None)
        with contextlib.suppress(OSError):
            self.socket.shutdown(sockets.SHUT_RDWR)


def _set_options(socket: sockets.socket) -> None:
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, _KEEP_ALIVE_S)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 1)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, _KEEP_ALIVE_S * 1000)
