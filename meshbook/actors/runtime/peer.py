"""One connection to another process with actors: whole frames out, whole frames in, and its end.

A frame is four bytes of length and a body. Sending never waits for the other side's work, only, past a bound, for its
socket. Knows nothing of what frames mean.
"""

from __future__ import annotations

import contextlib
import itertools
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from meshbook.errors import ProtocolError, TransferError
from meshbook.wire import codec
from meshbook.wire.messages import NodeAddress

_LENGTH_BYTES = 4
_READ_BYTES = 256 << 10
_BUFFER_BYTES = 1 << 20  # of the socket: thousands of small calls on their way before a sender has to queue them itself
_MAX_GREETING_BYTES = 4096  # the most that we read of who has not shown the key yet
_MAX_BACKLOG_BYTES = 64 << 20  # what a sender may be ahead of a process that does not read; then it waits
_peer_ids = itertools.count(1)


class PeerLost(Exception):
    """The other process has ended, or was never there."""


class Peer:
    """The other end. `number` is this process's own name for it, never used twice."""

    def __init__(
        self,
        socket: sockets.socket,
        address: NodeAddress | None,
        watch_writable: Callable[[Peer], None],
        reader_thread: Callable[[], int],
    ) -> None:
        self.id = next(_peer_ids)
        self.socket = socket
        self.address = address  # None: it has not greeted yet
        self.lost_reason: str | None = None
        self.announced_exit: str | None = None  # it has said that it will end, and why
        self._watch_writable, self._reader_thread = watch_writable, reader_thread
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._drained = threading.Condition(self._lock)
        self._partial_frame = bytearray()
        socket.setblocking(False)
        for option in (sockets.SO_SNDBUF, sockets.SO_RCVBUF):
            with contextlib.suppress(OSError):
                socket.setsockopt(sockets.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, data: bytes) -> None:
        """Send a frame, from any thread; frames of one thread arrive in order.

        Raises:
            PeerGone: nobody will read it.
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
                self._watch_writable(self)
            self._backlog.append(memoryview(data)[sent:])
            self._backlog_bytes += len(data) - sent
            if self._backlog_bytes > _MAX_BACKLOG_BYTES and threading.get_ident() != self._reader_thread():
                self._drained.wait_for(
                    lambda: self._backlog_bytes < _MAX_BACKLOG_BYTES // 2 or self.lost_reason is not None
                )

    def flush(self) -> bool:
        """Send what waits; True when nothing is left. Reader thread only."""
        with self._lock:
            while self._backlog:
                try:
                    sent = self.socket.send(self._backlog[0])
                except BlockingIOError:
                    break
                except OSError:
                    return True  # the reading side hears of the end
                self._backlog_bytes -= sent
                if sent == len(self._backlog[0]):
                    self._backlog.popleft()
                else:
                    self._backlog[0] = self._backlog[0][sent:]
            self._drained.notify_all()
            return not self._backlog

    def read(self) -> Iterator[memoryview] | None:
        """The bodies that have come; None at the end of the connection. Reader thread only.

        Raises:
            ProtocolError: a frame is larger than any that we send.
        """
        try:
            chunk = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        if not chunk:
            return None
        if self._partial_frame:
            self._partial_frame += chunk
            if len(self._partial_frame) < self._num_bytes_needed():
                return iter(())
            chunk, self._partial_frame = bytes(self._partial_frame), bytearray()
        return self._split_bodies(chunk)

    def _num_bytes_needed(self) -> int:
        if len(self._partial_frame) < _LENGTH_BYTES:
            return _LENGTH_BYTES
        size = int.from_bytes(self._partial_frame[:_LENGTH_BYTES], "little")
        self._check_size(size)
        return _LENGTH_BYTES + size

    def _check_size(self, size: int) -> None:
        allowed = codec.MAX_MESSAGE_BYTES if self.address is not None else _MAX_GREETING_BYTES
        if size > allowed:
            raise ProtocolError(f"a frame of {size} bytes came; {allowed} are allowed")

    def _split_bodies(self, chunk: bytes) -> Iterator[memoryview]:
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

    def close(self, reason: str) -> None:
        """The end of the connection. Whoever waits to send is told."""
        with self._lock:
            if self.lost_reason is None:
                self.lost_reason = reason
            self._backlog.clear()
            self._backlog_bytes = 0
            self._drained.notify_all()
            self.socket.close()


def encode_frame(body: bytes) -> bytes:
    if len(body) > codec.MAX_MESSAGE_BYTES:
        raise TransferError(
            f"a message of {len(body):,} bytes, and {codec.MAX_MESSAGE_BYTES:,} are the most outside shared memory; "
            "send less at a time"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Loopback:
    """This process as its own peer. What is sent is heard on the reading thread, like what others send."""

    def __init__(self, address: NodeAddress, deliver: Callable[[Any, memoryview], None]) -> None:
        self.id = next(_peer_ids)
        self.address = address
        self.lost_reason: str | None = None
        self.announced_exit: str | None = None
        self._deliver = deliver

    def send(self, data: bytes) -> None:
        """Raises PeerGone: this process has left."""
        if self.lost_reason is not None:
            raise PeerLost(self.lost_reason)
        self._deliver(self, memoryview(data)[_LENGTH_BYTES:])
