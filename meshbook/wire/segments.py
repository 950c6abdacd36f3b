"""One segment of shared memory: its file, its readers, the name of its present use; and how others open it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from meshbook.errors import TransferError
from meshbook.wire.descriptors import describe_shortage, is_shortage
from meshbook.wire.memory_files import (
    HUGE_PAGE_BYTES,
    MADV_COLLAPSE,
    MAP_SHARED,
    PAGE_BYTES,
    PROT_READ,
    PROT_WRITE,
    MappedFile,
    create_memory_file,
    load_libc,
    round_up,
    write_at,
)
from meshbook.wire.messages import SharedBuffer

_NOT_READ = "cannot be mapped here"

# At the start of every segment: the number of its uses. The buffers begin a page later.
USE_COUNT = struct.Struct("<Q")

# Buffers of at least this size get a segment each, so that each is freed separately. Smaller ones share: a model of a
# thousand small parameters must not use a thousand file descriptors on both sides.
OWN_SEGMENT_BYTES = 8 << 20
PACKED_SEGMENT_BYTES = 64 << 20  # the most that one small live buffer can hold back


def open_segment(buffer: SharedBuffer, mode: int, length: int) -> int:
    """Open the owner's segment here, after checking its name and that it has `length` bytes; return the descriptor."""
    try:
        # Non-blocking: if the pid was reused, the descriptor may be a pipe.
        opened = os.open(f"/proc/{buffer.pid}/fd/{buffer.fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(_cannot_open_message(buffer.pid, length, error)) from error
    try:
        if os.readlink(f"/proc/self/fd/{opened}") != f"/memfd:{file_name(buffer.segment)} (deleted)":
            raise TransferError(f"process {buffer.pid} no longer holds the data of this value; send it again")
        if os.fstat(opened).st_size < length:  # access past a file's end would kill this process
            raise TransferError(f"not a shared buffer: it ends {length} bytes into a smaller file")
    except BaseException as error:
        os.close(opened)
        if isinstance(error, OSError):
            raise TransferError(_cannot_open_message(buffer.pid, length, error)) from error
        raise
    return opened


@dataclass
class SegmentReaders:
    """The readers that have not released a segment yet: a number, or ranks."""

    num_unnamed: int = 0
    ranks: set[int] = field(default_factory=set)

    @staticmethod
    def of(readers: int | Collection[int]) -> SegmentReaders:
        if isinstance(readers, int):
            pending = SegmentReaders(num_unnamed=readers)
        else:
            pending = SegmentReaders(ranks=set(readers))
        if pending.num_unnamed < 0 or not pending:
            raise ValueError("a buffer that nobody reads would never be released; give at least one reader")
        return pending

    def copy(self) -> SegmentReaders:
        return SegmentReaders(self.num_unnamed, set(self.ranks))

    def release(self, count: int, rank: int | None) -> None:
        if rank is None:
            self.num_unnamed = max(0, self.num_unnamed - count)
        else:
            self.ranks.discard(rank)

    def __bool__(self) -> bool:
        return bool(self.num_unnamed or self.ranks)


@dataclass
class Segment:
    """An anonymous memory file. Its size is sealed and never changes, so access to a mapping of it cannot fault."""

    name: str
    fd: int
    capacity: int  # bytes; those never written to cost nothing
    num_uses: int = 0
    readers: SegmentReaders = field(default_factory=SegmentReaders)
    free_since: float = 0.0  # monotonic
    written_bytes: int = 0  # from the start; these have pages
    huge_bytes: int = 0  # from the start; these have huge pages
    can_be_huge: bool = True  # True until huge pages have failed
    is_exclusive: bool = True  # no process forked from this one sees its content

    @classmethod
    def create(cls, name: str, capacity: int) -> Segment:
        fd = create_memory_file(file_name(f"{name}."))
        try:
            os.ftruncate(fd, capacity)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(name, fd, capacity)

    @property
    def use_name(self) -> str:
        return f"{self.name}.{self.num_uses}"

    @property
    def resident_bytes(self) -> int:
        return max(self.written_bytes, self.huge_bytes)

    def close(self) -> None:
        os.close(self.fd)

    def fill(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Write the number of this use, and each buffer at its offset.

        Measured, in copies into warm memory: into fresh small pages 2.5 to 4 by pwrite and 5 to 10 through a mapping;
        into fresh huge ones 2.5; into reused ones 3 by pwrite, and 1 through a temporary mapping if they are huge. With
        small pages, the reader's first access costs another copy. A permanent mapping would be as fast, but would count
        as this process's memory for as long as it exists.
        """
        end = max(offset + view.nbytes for offset, view in pieces)
        if self._ensure_huge_pages(end):
            import numpy as np  # its copies release the GIL

            mapping = MappedFile.from_fd(self.fd, end, PROT_READ | PROT_WRITE, MAP_SHARED)
            try:
                target = mapping.view()
                USE_COUNT.pack_into(target, 0, self.num_uses)
                for offset, view in pieces:
                    destination = np.frombuffer(target, np.uint8, view.nbytes, offset)
                    np.copyto(destination, np.frombuffer(view, np.uint8))
            finally:
                mapping.unmap()
        else:
            for offset, view in ((0, memoryview(USE_COUNT.pack(self.num_uses))), *pieces):
                write_at(self.fd, view, offset)
        self.written_bytes = max(self.written_bytes, end)

    def prepare(self, end: int) -> None:
        """Write the number of this use; the first `end` bytes are for the caller to write into the file.

        Into huge pages that takes half the time.
        """
        self._ensure_huge_pages(end)
        write_at(self.fd, memoryview(USE_COUNT.pack(self.num_uses)), 0)
        self.written_bytes = max(self.written_bytes, end)

    def map_for_receiving(self, end: int) -> MappedFile:
        """Map the first `end` bytes, with the number of this use written and pages allocated for all writers.

        Raises:
            OSError: there is no memory for it.
        """
        is_huge = self._ensure_huge_pages(end)
        mapping = MappedFile.from_fd(self.fd, end, PROT_READ | PROT_WRITE, MAP_SHARED)
        try:
            if not is_huge:
                mapping.populate()
            USE_COUNT.pack_into(mapping.view(), 0, self.num_uses)
        except BaseException:
            mapping.unmap()
            raise
        self.written_bytes = max(self.written_bytes, end)
        return mapping

    def _ensure_huge_pages(self, end: int) -> bool:
        """Ensure huge pages for the first `end` bytes, if possible; return whether they have them.

        The content of pages that are converted is lost.
        """
        length = round_up(end, HUGE_PAGE_BYTES)
        if end < HUGE_PAGE_BYTES or not self.can_be_huge:
            return False
        if self.huge_bytes < length:
            mapping = MappedFile.from_fd(self.fd, length, PROT_READ | PROT_WRITE, MAP_SHARED)
            try:
                start = mapping.address + self.huge_bytes
                for address in range(start, mapping.address + length, HUGE_PAGE_BYTES):
                    ctypes.memset(address, 0, 1)  # madvise refuses a range without any page
                self.can_be_huge = load_libc().madvise(start, length - self.huge_bytes, MADV_COLLAPSE) == 0
            finally:
                mapping.unmap()
            if self.can_be_huge:
                self.huge_bytes = length
        return self.can_be_huge


def group_by_segment(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of buffers that share a segment: a large one by itself, small ones together."""
    packed: list[int] = []
    packed_bytes = 0
    for index, nbytes in enumerate(sizes):
        if nbytes >= OWN_SEGMENT_BYTES:
            yield [index]
            continue
        if packed and packed_bytes + nbytes > PACKED_SEGMENT_BYTES:
            yield packed
            packed, packed_bytes = [], 0
        packed.append(index)
        packed_bytes += nbytes
    if packed:
        yield packed


def round_up_capacity(min_bytes: int) -> int:
    """Return a size at most a quarter larger, so that slightly larger values can reuse it. Unused bytes are free."""
    step = max(PAGE_BYTES, 1 << max(0, min_bytes.bit_length() - 3))
    rounded = round_up(min_bytes, step)
    return round_up(rounded, HUGE_PAGE_BYTES) if rounded >= HUGE_PAGE_BYTES else rounded


def file_name(use_name: str) -> str:
    """Return the name of the memory file, which stays the same through all its uses."""
    return f"meshbook-{use_name.rpartition('.')[0]}"


def use_number(use_name: str) -> int:
    number = use_name.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0  # 0 is never the number of a use


def format_mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _cannot_open_message(pid: int, length: int, error: OSError) -> str:
    if is_shortage(error):
        return f"the {format_mib(length)} of this value, shared by process {pid}, {_NOT_READ}: {describe_shortage()}"
    if not _is_alive(pid):
        return f"process {pid}, which held the {format_mib(length)} of this value, is gone; make it again and resend it"
    if isinstance(error, FileNotFoundError):
        return f"process {pid} no longer holds the data of this value; send it again"
    if isinstance(error, PermissionError):
        return (
            f"this process may not read the memory that process {pid} shares ({error.strerror}); both must run as the "
            f"same user, and neither with capabilities of its own"
        )
    return f"the {format_mib(length)} of this value, shared by process {pid}, {_NOT_READ}: {error.strerror}"


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
