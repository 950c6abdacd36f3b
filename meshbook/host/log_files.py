"""What ranks have printed, on their host's disk: how it is written, and what is dropped when it grows too large.

Each rank has files of its own, `<rank>-<number>`, of records: kind, time, text as it was printed. `log_search` reads
them, in a process of its own. The loop's part is to append some KiB a few times per second.

A supervisor's standby keeps the same books and writes nothing. What the supervisor may not have written when it was
killed are its last appends; the standby then writes these again, at the same places.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from meshbook.wire.loop import Loop
from meshbook.wire.messages import KeptLogs

# Kind of the text, wall clock, bytes of text. No kind is 0, which is what a file has where the disk refused a write.
HEADER: Final = struct.Struct("<BdI")
STDOUT: Final = 1
STDERR: Final = 2
EVENT: Final = 3  # whole lines that the rank has not printed: its error in a cell, its end

# Seconds that text waits for more of it, and bytes that are written at once.
_FLUSH_S = 0.1
_FLUSH_BYTES = 64 << 10
# A file's size, within these bounds, is a share of the limit: what is dropped is a file.
_MIN_FILE_BYTES, _MAX_FILE_BYTES, _FILES_PER_LIMIT = 16 << 10, 4 << 20, 64
# Appends that a standby repeats: those of one turn of the loop, for which the supervisor may have been too slow.
_MAX_REPEATED = 64


def logs_folder(folder: Path, host: int) -> Path:
    """The folder of a host's files, in the folder of its sockets."""
    return folder / f"h{host}-logs"


def file_name(rank: int, number: int) -> str:
    return f"{rank}-{number}"


def files_of_ranks(folder: Path) -> dict[int, list[int]]:
    """Return the numbers of each rank's files, oldest first."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            rank, _, number = name.partition("-")
            if rank.isdecimal() and number.isdecimal():
                found.setdefault(int(rank), []).append(int(number))
    return {rank: sorted(numbers) for rank, numbers in sorted(found.items())}


@dataclass
class _RankFiles:
    """The files of one rank."""

    number: int = 0  # of the newest one
    sizes: deque[int] = field(default_factory=deque)  # of all files, oldest first
    unwritten: bytearray = field(default_factory=bytearray)


class LogFiles:
    """Appends to the files of a host's ranks."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        """
        Args:
            folder: created with the first text. A host before this one may have left files in it.
        """
        self.folder = folder
        self._loop = loop
        self._limit_bytes = 256 << 20
        self._ranks: dict[int, _RankFiles] = {}
        self._num_unwritten = 0
        self._is_flush_scheduled = False
        self._wall_offset = loop.clock.wall() - loop.clock.monotonic()
        self._last_writes: deque[tuple[str, int, bytes]] = deque(maxlen=_MAX_REPEATED)
        self._has_folder = False
        self._dropped_bytes = self._refused_bytes = 0
        self._problem = ""
        for rank, numbers in files_of_ranks(folder).items():
            sizes = deque((folder / file_name(rank, number)).stat().st_size for number in numbers)
            self._ranks[rank] = _RankFiles(numbers[-1], sizes)

    def set_limit(self, limit_bytes: int) -> None:
        """Set how many bytes all files may have."""
        self._limit_bytes = limit_bytes

    def append(self, rank: int, kind: int, text: str) -> None:
        files = self._ranks.setdefault(rank, _RankFiles())
        data = text.encode("utf-8", "backslashreplace")
        files.unwritten += HEADER.pack(kind, self._wall_offset + self._loop.clock.monotonic(), len(data))
        files.unwritten += data
        self._num_unwritten += HEADER.size + len(data)
        if self._num_unwritten >= _FLUSH_BYTES:
            self.flush()
        elif not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_later(_FLUSH_S, self._flush_scheduled)

    def flush(self) -> None:
        """Write what is not written yet."""
        if not self._num_unwritten:
            return
        self._num_unwritten = 0
        file_bytes = max(_MIN_FILE_BYTES, min(_MAX_FILE_BYTES, self._limit_bytes // _FILES_PER_LIMIT))
        for rank, files in self._ranks.items():
            if not files.unwritten:
                continue
            data, files.unwritten = bytes(files.unwritten), bytearray()
            if not files.sizes or files.sizes[-1] + len(data) > file_bytes:
                files.number += 1
                files.sizes.append(0)
            write = (file_name(rank, files.number), files.sizes[-1], data)
            files.sizes[-1] += len(data)
            self._last_writes.append(write)
            self._loop.act(partial(self._write, *write))
        self._drop_oldest()

    def take_over(self) -> None:
        """Go on in a process that was forked from the one that has written so far, and that has ended."""
        for name, offset, data in self._last_writes:
            rank, _, number = name.partition("-")
            files = self._ranks[int(rank)]
            if int(number) > files.number - len(files.sizes):  # it was not dropped since
                self._loop.act(partial(self._write, name, offset, data))

    def kept(self) -> KeptLogs:
        """What is kept, without the time of the oldest text."""
        return KeptLogs(
            host="",
            since=None,
            num_bytes=self._num_bytes(),
            limit_bytes=self._limit_bytes,
            dropped_bytes=self._dropped_bytes,
            unwritten_bytes=self._refused_bytes,
            problem=self._problem,
        )

    def _num_bytes(self) -> int:
        return sum(sum(files.sizes) for files in self._ranks.values())

    def _flush_scheduled(self) -> None:
        self._is_flush_scheduled = False
        self.flush()
        # The machine's clock may have been set, or stood still while the machine slept.
        clock = self._loop.clock
        self._wall_offset = self._loop.observe(clock.wall) - clock.monotonic()

    def _drop_oldest(self) -> None:
        """Drop the oldest file of the rank that has most, until all is within the limit."""
        excess = self._num_bytes() - self._limit_bytes
        while excess > 0:
            rank, files = max(self._ranks.items(), key=lambda item: (sum(item[1].sizes), -item[0]))
            oldest = file_name(rank, files.number - len(files.sizes) + 1)
            size = files.sizes.popleft()
            excess -= size
            self._dropped_bytes += size
            self._loop.act(partial(self._remove, oldest))

    def _write(self, name: str, offset: int, data: bytes) -> None:
        try:
            if not self._has_folder:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                self._has_folder = True
            fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(fd, data[done:], offset + done)
            finally:
                os.close(fd)
        except OSError as error:  # the disk is full, perhaps: what cannot be kept is counted
            self._refused_bytes += len(data)
            self._problem = error.strerror or str(error)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()


def first_time(head: bytes) -> float | None:
    """Return the wall clock of a file's first text, from its first bytes; None if there is none."""
    return float(HEADER.unpack_from(head)[1]) if len(head) >= HEADER.size and head[0] else None


def records(data: bytes) -> Iterator[tuple[int, float, int, int]]:
    """Yield kind, time, and begin and end of the text, of the records in a file's bytes; a part of one is left out."""
    start, size = 0, len(data)
    while start + HEADER.size <= size:
        if not data[start]:  # refused by the disk
            start = size - len(data[start:].lstrip(b"\0"))
            continue
        kind, time, num_bytes = HEADER.unpack_from(data, start)
        begin = start + HEADER.size
        start = begin + num_bytes
        if start > size:
            return
        yield kind, time, begin, start
