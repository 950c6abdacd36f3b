"""Writes a staged save to disk on a thread of its own: no collectives, and nothing of the main thread's.

The files are those of DCP's `FileSystemWriter`: for each item of the plan what `torch.save` makes of it, one after the
other. But a tensor's bytes go from the staged copy straight into the file, and are summed up once, for the digest:
`torch.save` would sum them up a second time, which takes longer than writing them (1.6 GB/s; crc32 here 2.3 GB/s).
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
from msgspec import Struct
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from meshbook.rank.checkpoints.staging import StagedState
from meshbook.wire.messages import SavedFile

_RESULTS_PREFIX = ".results-"
# What is summed up and written at once: it stays in a core's cache in between.
_CHUNK_BYTES = 1 << 20
# The disk is asked to begin with every so many bytes; otherwise it would rest until the file is whole.
_FLUSH_BYTES = 1 << 23


class SaveDropped(Exception):
    """The save has ended elsewhere; what is still to be written of it is not needed."""


class HashingFile:
    """A file that DCP writes to, and that knows its digest. Writes only at its end."""

    def __init__(self, path: Path, is_dropped: Callable[[], bool]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._is_dropped = is_dropped
        self.num_bytes, self.crc = 0, 0
        self._num_flushed = 0

    def write(self, data: bytes | memoryview) -> int:
        if self._is_dropped():
            raise SaveDropped
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), _CHUNK_BYTES):
            remaining = whole[start : start + _CHUNK_BYTES]
            self.crc = zlib.crc32(remaining, self.crc)  # releases the GIL, as os.write does
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
            self.num_bytes += min(_CHUNK_BYTES, len(whole) - start)
            if self.num_bytes - self._num_flushed >= _FLUSH_BYTES:
                self._begin_writeback()
        return len(whole)

    def _begin_writeback(self) -> None:
        """Have the system write what it has so far, without waiting; Linux does so for what will not be needed."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                num_bytes = self.num_bytes - self._num_flushed
                os.posix_fadvise(self._fd, self._num_flushed, num_bytes, os.POSIX_FADV_DONTNEED)
        self._num_flushed = self.num_bytes

    def tell(self) -> int:
        return self.num_bytes

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class HashingFileSystem(FileSystem):
    """DCP's file system, which notes the size and digest of each file written.

    Attributes:
        files: what was written, in order.
    """

    def __init__(self, is_dropped: Callable[[], bool]) -> None:
        self.files: list[SavedFile] = []
        self._is_dropped = is_dropped

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            raise ValueError(f"mode {mode!r} is not written")
        file = HashingFile(Path(path), self._is_dropped)
        try:
            yield file
        finally:
            file.close()
        # `.metadata` is written under this name and renamed.
        self.files.append(SavedFile(Path(path).name.removesuffix(".tmp"), file.num_bytes, f"{file.crc:08x}"))


def make_writer(folder: Path, is_dropped: Callable[[], bool]) -> tuple[FileSystemWriter, HashingFileSystem]:
    """Return DCP's writer to this folder, and what notes its files."""
    # With a copy-ahead it would wait on CUDA streams, though all is in CPU memory.
    writer = FileSystemWriter(folder, thread_count=1, sync_files=True, per_thread_copy_ahead=0)
    files = HashingFileSystem(is_dropped)
    writer.fs = files
    return writer, files


def write_part(files: HashingFileSystem, plan: SavePlan, staged: StagedState, folder: Path, rank: int) -> None:
    """Write one rank's file, and where each item is in it. Blocks until the former is on the disk."""
    name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    with files.create_stream(folder / name, "wb") as stream:
        results = [_write_item(stream, item, staged, name) for item in plan.items]
        os.fsync(stream.fileno())
    (folder / f"{_RESULTS_PREFIX}{rank}").write_bytes(msgspec.json.encode(results))


class _Written(Struct, frozen=True, array_like=True):
    """Where an item is. Not torch's own object: rank 0 would unpickle what is in a folder that others may share."""

    key: str  # in the checkpoint
    offset: tuple[int, ...] | None  # of a part of a tensor, in the whole
    index: int | None  # of the part
    file: str
    start: int  # in the file, in bytes, as is the length
    length: int

    def result(self) -> WriteResult:
        index = MetadataIndex(self.key, None if self.offset is None else torch.Size(self.offset), self.index)
        return WriteResult(index, self.length, _StorageInfo(self.file, self.start, self.length))


def _write_item(stream: HashingFile, item: WriteItem, staged: StagedState, name: str) -> _Written:
    start, data = stream.tell(), staged.resolve_data(item)
    for piece in saved_pieces(data) if isinstance(data, torch.Tensor) else (data.getbuffer(),):
        stream.write(piece)
    offset = None if item.index.offset is None else tuple(item.index.offset)
    return _Written(item.index.fqn, offset, item.index.index, name, start, stream.tell() - start)


def saved_pieces(tensor: torch.Tensor) -> list[bytes | memoryview]:
    """Return what `torch.save` writes of a contiguous tensor of its own storage, without a copy of its data.

    The zip records have no checksum of the data, as with `torch.serialization.set_crc32_options(False)`.
    """
    recorder = _Recorder()
    with torch.serialization.skip_data():  # of this thread alone
        torch.save(tensor, recorder)  # type: ignore[arg-type]  # it needs these methods alone
    holes = [piece for piece in recorder.pieces if isinstance(piece, int)]
    if holes != ([tensor.nbytes] if tensor.nbytes else []):
        raise RuntimeError(f"torch.save left out {holes} bytes of a tensor of {tensor.nbytes}")
    # Not `.numpy()`: it would mark the storage as one that may not be resized.
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    data = numpy.from_dlpack(flat).data if tensor.nbytes else memoryview(b"")
    return [data if isinstance(piece, int) else piece for piece in recorder.pieces]


class _Recorder:
    """A file that `torch.save` writes to.

    Attributes:
        pieces: bytes that were written, and numbers of bytes that were left out.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes | int] = []

    def write(self, data: bytes | memoryview) -> int:
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, bytes):
            self.pieces[-1] = last + data
        else:
            self.pieces.append(bytes(data))
        return len(data)

    def seek(self, num_bytes: int, whence: int) -> None:
        if whence != os.SEEK_CUR:
            raise ValueError(f"torch.save seeks from {whence}")
        self.pieces.append(num_bytes)

    def flush(self) -> None:
        """Nothing is buffered here."""


def write_metadata(writer: FileSystemWriter, metadata: Metadata, folder: Path, world_size: int) -> None:
    """Write `.metadata` from what all ranks have left in the folder. Blocks until it is on the disk."""
    files = [folder / f"{_RESULTS_PREFIX}{rank}" for rank in range(world_size)]
    written = [msgspec.json.decode(file.read_bytes(), type=list[_Written]) for file in files]
    writer.finish(metadata, [[each.result() for each in of_rank] for of_rank in written])
    for file in files:
        file.unlink()
