"""A connection to another process with actors: sends and receives complete frames.

A frame is four bytes of length and a body. Sending never waits for the receiver to process a frame; past a backlog
limit it waits for the receiver to read its socket. Independent of what frames contain.
"""

from __future__ import annotations

import contextlib
import itertools
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from meshbook.actors.runtime.reactor import Reactor
from meshbook.errors import ProtocolError, TransferError
from meshbook.wire import codec
from meshbook.wire.messages import NodeAddress

_LENGTH_BYTES = 4
_READ_BYTES = 256 << 10
_BUFFER_BYTES = 1 << 20  # socket buffer: holds thousands of small calls before the sender has to queue them itself
_MAX_GREETING_BYTES = 4096  # maximum frame size from a peer that has not shown the key yet
_MAX_BACKLOG_BYTES = 64 << 20  # maximum backlog to a process that does not read; then the sender waits
_peer_ids = itertools.count(1)

Frame = bytes | bytearray


class PeerLost(Exception):
    """The other process has exited, or never existed."""


class FrameReader:
    """Cuts what arrives on a connection into the bodies of frames.

    Args:
        is_known: whether a PeerHello has come; until then, frames are small.
    """

    def __init__(self, is_known: Callable[[], bool]) -> None:
        self._is_known = is_known
        self._partial_frame = bytearray()

    def split(self, chunk: bytes | bytearray) -> Iterator[memoryview]:
        """Return the bodies that are complete with this chunk.

        Raises:
            ProtocolError: a frame exceeds the maximum size; here, or as the bodies are taken.
        """
        if self._partial_frame:
            self._partial_frame += chunk
            if len(self._partial_frame) < self._num_bytes_needed():
                return iter(())
            chunk, self._partial_frame = self._partial_frame, bytearray()
        return self._split_bodies(chunk)

    def _num_bytes_needed(self) -> int:
        if len(self._partial_frame) < _LENGTH_BYTES:
            return _LENGTH_BYTES
        size = int.from_bytes(self._partial_frame[:_LENGTH_BYTES], "little")
        self._check_size(size)
        return _LENGTH_BYTES + size

    def _check_size(self, size: int) -> None:
        allowed = codec.MAX_MESSAGE_BYTES if self._is_known() else _MAX_GREETING_BYTES
        if size > allowed:
            raise ProtocolError(f"a frame of {size} bytes came; {allowed} are allowed")

    def _split_bodies(self, chunk: bytes | bytearray) -> Iterator[memoryview]:
        view, at, end = memoryview(chunk), 0, len(chunk)
        try:
            while end - at >= _LENGTH_BYTES:
                size = int.from_bytes(view[at : at + _LENGTH_BYTES], "little")
                if size > _MAX_GREETING_BYTES:
                    self._check_size(size)
                if end - at - _LENGTH_BYTES < size:
                    break
                start, at = at + _LENGTH_BYTES, at + _LENGTH_BYTES + size
                yield view[start:at]
        finally:
            if at < end:
                self._partial_frame = bytearray(view[at:])


class Connection:
    """What connections to processes of this machine and of others have in common.

    Attributes:
        id: identifies the other end within this process; never reused.
        address: None: no PeerHello received yet.
        lost_reason: None: it is open.
        announced_exit: the reason, if the other end has announced its exit.
    """

    def __init__(self, address: NodeAddress | None, reactor: Reactor) -> None:
        self.id = next(_peer_ids)
        self.address = address
        self.lost_reason: str | None = None
        self.announced_exit: str | None = None
        self._reactor = reactor
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._drained = threading.Condition(self._lock)
        self._frames = FrameReader(lambda: self.address is not None)

    def close(self, reason: str) -> None:
        """Close the connection. Threads blocked in `send` are woken."""
        with self._lock:
            if self.lost_reason is None:
                self.lost_reason = reason
            self._backlog.clear()
            self._backlog_bytes = 0
            self._drained.notify_all()

    def _queue(self, data: memoryview) -> None:
        """Add to the backlog. The caller holds the lock."""
        self._backlog.append(data)
        self._backlog_bytes += len(data)

    def _wait_for_room(self) -> None:
        """Wait until the backlog is not too long, unless on the thread that shortens it. The caller holds the lock."""
        if self._backlog_bytes > _MAX_BACKLOG_BYTES and threading.get_ident() != self._reactor.thread_id:
            self._drained.wait_for(
                lambda: self._backlog_bytes < _MAX_BACKLOG_BYTES // 2 or self.lost_reason is not None
            )


class Peer(Connection):
    """The other end of a connection to a process of this machine."""

    is_local = True  # it can read shared memory of this process

    def __init__(self, socket: sockets.socket, address: NodeAddress | None, reactor: Reactor) -> None:
        super().__init__(address, reactor)
        self.socket = socket
        socket.setblocking(False)
        for option in (sockets.SO_SNDBUF, sockets.SO_RCVBUF):
            with contextlib.suppress(OSError):
                socket.setsockopt(sockets.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, data: Frame) -> None:
        """Send a frame. Any thread; frames of one thread arrive in order.

        Raises:
            PeerLost: the connection is closed.
        """
        with self._lock:
            if self.lost_reason is not None:
                raise PeerLost(self.lost_reason)
            sent = 0
            if not self._backlog:
                try:
                    sent = self.socket.send(data)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise PeerLost(str(error)) from error
                if sent == len(data):
                    return
            if not self._backlog:
                self._reactor.watch_writable(self.socket)
            self._queue(memoryview(data)[sent:])
            self._wait_for_room()

    def flush(self) -> bool:
        """Send the backlog; return whether it is empty. Reader thread only."""
        with self._lock:
            while self._backlog:
                try:
                    sent = self.socket.send(self._backlog[0])
                except BlockingIOError:
                    break
                except OSError:
                    return True  # `read` detects the closed connection
                self._backlog_bytes -= sent
                if sent == len(self._backlog[0]):
                    self._backlog.popleft()
                else:
                    self._backlog[0] = self._backlog[0][sent:]
            self._drained.notify_all()
            return not self._backlog

    def read(self) -> Iterator[memoryview] | None:
        """Return the received bodies; None at the end of the connection. Reader thread only.

        Raises:
            ProtocolError: a frame exceeds the maximum size.
        """
        try:
            chunk = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        if not chunk:
            return None
        return self._frames.split(chunk)

    def close(self, reason: str) -> None:
        super().close(reason)
        self._reactor.unregister(self.socket)
        self.socket.close()

    def cut_off(self) -> None:
        """Have the other side know that nothing more of it is taken; closing the socket does."""

    def drop_inherited(self, reason: str) -> None:
        """After a fork, in the child: the connection is the parent's."""
        self.lost_reason = reason
        self.socket.close()


def encode_frame(body: bytes) -> bytes:
    _check_size(len(body))
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def encode_large_frame(encode_into: Callable[[bytearray, int], None]) -> bytearray:
    """As `encode_frame`, of a body that is encoded in its place: fresh memory for 64 MiB costs more than a copy."""
    frame = bytearray(_LENGTH_BYTES)
    encode_into(frame, _LENGTH_BYTES)
    nbytes = len(frame) - _LENGTH_BYTES
    _check_size(nbytes)
    frame[:_LENGTH_BYTES] = nbytes.to_bytes(_LENGTH_BYTES, "little")
    return frame


def _check_size(nbytes: int) -> None:
    if nbytes > codec.MAX_MESSAGE_BYTES:
        raise TransferError(
            f"a message of {nbytes:,} bytes, and {codec.MAX_MESSAGE_BYTES:,} are the most outside shared memory; "
            "send less at a time"
        )


class Loopback:
    """This process as its own peer. Sent messages are dispatched on the reader thread, like those of others."""

    is_local = True

    def __init__(self, address: NodeAddress, deliver: Callable[[Any, memoryview], None]) -> None:
        self.id = next(_peer_ids)
        self.address = address
        self.lost_reason: str | None = None
        self.announced_exit: str | None = None
        self._deliver = deliver

    def send(self, data: Frame) -> None:
        """Deliver a frame to this process.

        Raises:
            PeerLost: this process has left.
        """
        if self.lost_reason is not None:
            raise PeerLost(self.lost_reason)
        self._deliver(self, memoryview(data)[_LENGTH_BYTES:])
