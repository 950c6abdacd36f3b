"""Values between machines: shared buffers of one are copied to another in chunks, once per machine.

The side that lacks a buffer asks for its chunks, and never for more than a few at once: so the sender needs no queue,
other messages pass between chunks, and no frame is large. What arrives goes into a segment of this process, which the
processes of this machine read as they read those of their own. No sockets here: requests and chunks are messages.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
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
# Chunks that were asked for and have not come. More than the way holds (10 Gbit/s and 5 ms are 6 MB) gains nothing.
_MAX_REQUESTED = 8


def serve_chunk(request: FetchChunk) -> BufferChunk:
    """Return a piece of a buffer of a process of this machine, or why it cannot be had."""
    buffer, transfer = request.buffer, request.transfer
    try:
        fd = open_segment(buffer, os.O_RDONLY, buffer.offset + buffer.nbytes)
        try:
            data = _read_at(fd, request.nbytes, buffer.offset + request.offset)
            (number,) = USE_COUNT.unpack(os.pread(fd, USE_COUNT.size, 0))
        finally:
            os.close(fd)
        if number != use_number(buffer.segment):
            raise TransferError(f"process {buffer.pid} has reused the memory of this value; send it again")
    except (TransferError, OSError) as error:
        return BufferChunk(transfer=transfer, index=request.index, error=str(error))
    return BufferChunk(transfer=transfer, index=request.index, data=data)


def without_data(message: bytes, decoder: codec.Decoder[Any] = codec.host_reports) -> bytes:
    """Return a message, encoded, as a standby of its receiver is given it: without the bytes of a large chunk."""
    if len(message) < _MIN_LEFT_OUT_BYTES:
        return message
    chunk = decoder.decode_body(message)
    if not isinstance(chunk, BufferChunk):
        return message
    return codec.encode_body(msgspec.structs.replace(chunk, data=b"", left_out=len(chunk.data)))


def _write_at(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


def _read_at(fd: int, nbytes: int, offset: int) -> bytes:
    data = os.pread(fd, nbytes, offset)
    while len(data) < nbytes:
        piece = os.pread(fd, nbytes - len(data), offset + len(data))
        if not piece:
            raise TransferError("this value ends in a smaller file")
        data += piece
    return data


Copies = dict[SharedBuffer, SharedBuffer]


@dataclass
class _Transfer:
    """Buffers that are on their way.

    Attributes:
        unrequested: chunks that were not asked for yet: buffer, offset, bytes.
        requested: by index, where each goes: descriptor, offset in its file, bytes.
    """

    copies: Copies
    send: Callable[[FetchChunk], None]
    on_done: Callable[[Copies | str], None]
    unrequested: Iterator[tuple[SharedBuffer, int, int]]
    requested: dict[int, tuple[int, int, int]] = field(default_factory=dict)
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
    ) -> str:
        """Begin to copy buffers; return the transfer's name.

        Args:
            readers: see `SegmentPool.write`.
            send: sends a request to the machine of the buffers.
            on_done: called once, with the copies, or with why there are none; no segment is then retained.
        """
        name = str(next(self._numbers))
        try:
            copies = dict(zip(buffers, self._pool.allocate([one.nbytes for one in buffers], readers), strict=True))
        except (TransferError, OSError) as error:
            on_done(f"this machine has no memory for it: {error}")
            return name
        self._transfers[name] = _Transfer(copies, send, on_done, _iter_chunks(buffers))
        self._request(name)
        return name

    def is_open(self, name: str) -> bool:
        return name in self._transfers

    def handle(self, chunk: BufferChunk) -> None:
        """Take a chunk that has come; of a transfer that has ended it is dropped."""
        transfer = self._transfers.get(chunk.transfer)
        place = None if transfer is None else transfer.requested.pop(chunk.index, None)
        if transfer is None or place is None:
            return
        fd, offset, nbytes = place
        num_came = len(chunk.data) + chunk.left_out
        if chunk.error or num_came != nbytes:
            self.cancel(chunk.transfer, chunk.error or f"{num_came} bytes came, and {nbytes} were asked for")
            return
        self._act(lambda: _write_at(fd, chunk.data, offset))
        self._request(chunk.transfer)

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
        while len(transfer.requested) < _MAX_REQUESTED:
            chunk = next(transfer.unrequested, None)
            if chunk is None:
                break
            buffer, offset, nbytes = chunk
            copy, index = transfer.copies[buffer], transfer.num_requested
            transfer.num_requested += 1
            transfer.requested[index] = copy.fd, copy.offset + offset, nbytes
            transfer.send(FetchChunk(transfer=name, index=index, buffer=buffer, offset=offset, nbytes=nbytes))
        if not transfer.requested:
            del self._transfers[name]
            transfer.on_done(transfer.copies)


def _iter_chunks(buffers: Sequence[SharedBuffer]) -> Iterator[tuple[SharedBuffer, int, int]]:
    for buffer in buffers:
        for offset in range(0, buffer.nbytes, CHUNK_BYTES):
            yield buffer, offset, min(CHUNK_BYTES, buffer.nbytes - offset)
