"""Writes a staged save to disk on a thread of its own: no collectives, and nothing of the main thread's."""

from __future__ import annotations

import contextlib
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from meshbook.rank.checkpoints.staging import StagedState
from meshbook.wire.messages import SavedFile

_RESULTS_PREFIX = ".results-"


class SaveDropped(Exception):
    """The save has ended elsewhere; what is still to be written of it is not needed."""


class HashingFile:
    """A file that DCP writes to, and that knows its digest. Writes only at its end."""

    def __init__(self, path: Path, is_dropped: Callable[[], bool]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._is_dropped = is_dropped
        self.num_bytes, self.crc = 0, 0

    def write(self, data: bytes | memoryview) -> int:
        if self._is_dropped():
            raise SaveDropped
        remaining = memoryview(data).cast("B")
        num_bytes = len(remaining)
        self.crc = zlib.crc32(remaining, self.crc)  # releases the GIL, as os.write does
        while remaining:
            remaining = remaining[os.write(self._fd, remaining) :]
        self.num_bytes += num_bytes
        return num_bytes

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


def write_part(writer: FileSystemWriter, plan: SavePlan, staged: StagedState, folder: Path, rank: int) -> None:
    """Write one rank's files, and where each item is in them. Blocks until the former are on the disk."""
    results = writer.write_data(plan, staged).value()
    (folder / f"{_RESULTS_PREFIX}{rank}").write_bytes(pickle.dumps(results))


def write_metadata(writer: FileSystemWriter, metadata: Metadata, folder: Path, world_size: int) -> None:
    """Write `.metadata` from what all ranks have left in the folder. Blocks until it is on the disk."""
    files = [folder / f"{_RESULTS_PREFIX}{rank}" for rank in range(world_size)]
    writer.finish(metadata, [pickle.loads(file.read_bytes()) for file in files])
    for file in files:
        file.unlink()
