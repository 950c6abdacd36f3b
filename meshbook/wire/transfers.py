"""Values between machines: shared buffers of one are copied to another in chunks, once per machine.

The side that lacks a buffer asks for its chunks, and never for more than a few at once: so the sender needs no queue,
other messages pass between chunks, and no frame is large. What arrives goes into a segment of this process, which the
processes of this machine read as they read those of their own. No sockets here: requests are messages, and chunks come
as messages too or by a `DataConnections`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meshbook.errors import TransferError
from meshbook.wire import codec
from meshbook.wire.buffers import SegmentPool
from meshbook.wire.messages import BufferChunk, FetchChunk, SharedBuffer
from meshbook.wire.segments import USE_COUNT, open_segment, use_number

# One frame. Measured through CURVE: 2.3 times the rate of one frame of 64 MB, at half the CPU.
CHUNK_BYTES = 1 << 20
# Smaller ones are given to a standby as they are.
_MIN_LEFT_OUT_BYTES = 64 << 10
# Bytes asked for at once and in all that have not come: by messages, where more than the way holds (10 Gbit/s and 5 ms
# are 6 MB) gains nothing, and by a data connection, where requests cost more than what is sent.
_BY_MESSAGES = CHUNK_BYTES, 8 * CHUNK_BYTES
_DIRECTLY = 8 * CHUNK_BYTES, 32 * CHUNK_BYTES


@contextlib.contextmanager
def open_requested(request: FetchChunk) -> Iterator[Callable[[memoryview, int], None]]:
    """Give a function that reads what is at an offset of the buffer that is asked for, of a process of this machine.

    Raises:
        TransferError, OSError: here, or as it is read: the memory cannot be had any more.
    """
    buffer = request.buffer
    fd = open_segment(buffer, os.O_RDONLY, buffer.offset + buffer.nbytes)

    def read(target: memoryview, offset: int) -> None:
        at = buffer.offset + offset
        while target:
            num_read = os.preadv(fd, [target], at)
            if not num_read:
                raise TransferError("this value ends in a smaller file")
            target, at = target[num_read:], at + num_read
        (number,) = USE_COUNT.unpack(os.pread(fd, USE_COUNT.size, 0))
        if number != use_number(buffer.segment):
            raise TransferError(f"process {buffer.pid} has reused the memory of this value; send it again")

    try:
        yield read
    finally:
        os.close(fd)


def serve(request: FetchChunk, memory: memoryview) -> Iterator[tuple[BufferChunk, memoryview]]:
    """Read what is asked for, in pieces: each without its data, and that. The last may say why it cannot be had.

    Args:
        memory: for CHUNK_BYTES, used for each.
    """
    at, end = request.offset, request.offset + request.nbytes
    piece = BufferChunk(transfer=request.transfer, index=request.index)
    try:
        with open_requested(request) as read:
            while at < end:
                data = memory[: min(CHUNK_BYTES, end - at)]
                read(data, at)
                yield msgspec.structs.replace(piece, offset=at), data
                at += len(data)
    except (TransferError, OSError) as error:
        yield msgspec.structs.replace(piece, offset=at, error=str(error)), memory[:0]


def serve_chunks(request: FetchChunk) -> Iterator[BufferChunk]:
    """Read what is asked for, in messages."""
    for piece, data in serve(request, memoryview(bytearray(min(CHUNK_BYTES, request.nbytes)))):
        yield msgspec.structs.replace(piece, data=bytes(data))


def without_bytes(chunk: BufferChunk) -> BufferChunk:
    """Return a chunk as a standby of its receiver is given it."""
    return msgspec.structs.replace(chunk, data=b"", left_out=len(chunk.data) + chunk.left_out)


def without_data(message: bytes, decoder: codec.Decoder[Any] = codec.host_reports) -> bytes:
    """Return a message, encoded, as a standby of its receiver is given it: without the bytes of a large chunk."""
    if len(message) < _MIN_LEFT_OUT_BYTES:
        return message
    chunk = decoder.decode_body(message)
    if not isinstance(chunk, BufferChunk):
        return message
    return codec.encode_body(without_bytes(chunk))


def _write_at(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


Copies = dict[SharedBuffer, SharedBuffer]


@dataclass
class _Missing:
    """A part of a buffer that was asked for: what has not come of it."""

    buffer: SharedBuffer
    offset: int
    nbytes: int


@dataclass
class _Transfer:
    """Buffers that are on their way.

    Attributes:
        directly: what is asked for is to come by a data connection.
        unrequested: parts that were not asked for yet.
        requested: by index, those that were.
    """

    copies: Copies
    send: Callable[[FetchChunk], None]
    on_done: Callable[[Copies | str], None]
    directly: bool
    unrequested: Iterator[_Missing]
    requested: dict[int, _Missing] = field(default_factory=dict)
    num_requested: int = 0


class BufferFetcher:
    """Copies buffers of other machines into segments of a pool. `handle` takes the chunks that come.

    Args:
        act: does what must not be done in a standby of this process (`Loop.act`).
    """

    def __init__(self, pool: SegmentPool, act: Callable[[Callable[[], None]], None] = lambda write: write()) -> None:
        self._pool, self._act = pool, act
        self._transfers: dict[str, _Transfer] = {}
        self._numbers = itertools.count(1)

    def fetch(
        self,
        buffers: Sequence[SharedBuffer],
        readers: int | Collection[int],
        send: Callable[[FetchChunk], None],
        on_done: Callable[[Copies | str], None],
        *,
        directly: bool = False,
    ) -> str:
        """Begin to copy buffers; return the transfer's name.

        Args:
            readers: see `SegmentPool.write`.
            send: sends a request to the machine of the buffers.
            on_done: called once, with the copies, or with why there are none; no segment is then retained.
            directly: there is a data connection to that machine; if it ends, call `ask_again`.
        """
        name = str(next(self._numbers))
        try:
            copies = dict(zip(buffers, self._pool.allocate([one.nbytes for one in buffers], readers), strict=True))
        except (TransferError, OSError) as error:
            on_done(f"this machine has no memory for it: {error}")
            return name
        parts = _iter_parts(buffers, (_DIRECTLY if directly else _BY_MESSAGES)[0])
        self._transfers[name] = _Transfer(copies, send, on_done, directly, parts)
        self._request(name)
        return name

    def is_open(self, name: str) -> bool:
        return name in self._transfers

    def handle(self, chunk: BufferChunk) -> None:
        """Take a chunk that has come; of a transfer that has ended, or if it came before, it is dropped."""
        transfer = self._transfers.get(chunk.transfer)
        missing = None if transfer is None else transfer.requested.get(chunk.index)
        if transfer is None or missing is None or chunk.offset != missing.offset:
            return
        num_came = len(chunk.data) + chunk.left_out
        if chunk.error or not 0 < num_came <= missing.nbytes:
            self.cancel(chunk.transfer, chunk.error or f"{num_came} bytes came, and {missing.nbytes} were asked for")
            return
        copy = transfer.copies[missing.buffer]
        self._act(lambda: _write_at(copy.fd, chunk.data, copy.offset + chunk.offset))
        missing.offset, missing.nbytes = missing.offset + num_came, missing.nbytes - num_came
        if not missing.nbytes:
            del transfer.requested[chunk.index]
            self._request(chunk.transfer)

    def ask_again(self, name: str) -> None:
        """The data connection has ended: ask for all that has not come of a transfer as messages."""
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.directly:
            missing, transfer.requested = transfer.requested.values(), {}
            transfer.unrequested = itertools.chain(_split(missing), _split(transfer.unrequested))
            transfer.directly = False
            self._request(name)

    def cancel(self, name: str, reason: str) -> None:
        """End a transfer that is not done; `on_done` is called with the reason."""
        transfer = self._transfers.pop(name, None)
        if transfer is None:
            return
        for segment in {copy.segment for copy in transfer.copies.values()}:
            self._pool.release_all(segment)
        transfer.on_done(reason)

    def cancel_all(self, reason: str) -> None:
        for name in list(self._transfers):
            self.cancel(name, reason)

    def _request(self, name: str) -> None:
        transfer = self._transfers[name]
        part_bytes, max_bytes = _DIRECTLY if transfer.directly else _BY_MESSAGES
        while len(transfer.requested) * part_bytes < max_bytes:
            missing = next(transfer.unrequested, None)
            if missing is None:
                break
            index = transfer.num_requested
            transfer.num_requested += 1
            transfer.requested[index] = missing
            transfer.send(
                FetchChunk(
                    transfer=name,
                    index=index,
                    buffer=missing.buffer,
                    offset=missing.offset,
                    nbytes=missing.nbytes,
                    directly=transfer.directly,
                )
            )
        if not transfer.requested:
            del self._transfers[name]
            transfer.on_done(transfer.copies)


def _iter_parts(buffers: Iterable[SharedBuffer], part_bytes: int) -> Iterator[_Missing]:
    for buffer in buffers:
        for offset in range(0, buffer.nbytes, part_bytes):
            yield _Missing(buffer, offset, min(part_bytes, buffer.nbytes - offset))


def _split(parts: Iterable[_Missing]) -> Iterator[_Missing]:
    """Cut parts into those that are asked for as messages."""
    for part in parts:
        for offset in range(0, part.nbytes, CHUNK_BYTES):
            yield _Missing(part.buffer, part.offset + offset, min(CHUNK_BYTES, part.nbytes - offset))
