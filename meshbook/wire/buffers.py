"""Shared-memory segments that several processes of one machine read, and receive buffers that other processes fill.

The owner copies a buffer into a segment (an anonymous memory file) and sends a `SharedBuffer` with its location. A
reader opens the file as /proc/<pid>/fd/<fd> and maps it privately: nothing is copied until a process writes to a page,
and such a write does not affect the other readers. This module knows nothing of pickles, tensors, sockets or meshes.

Lifetime of a segment:

- From `write` until its last reader has released it, the owner does not change the bytes.
- A reader releases it when the last array, tensor or view over its mapping is freed. `SegmentReader.drain_released`
  then lists the segment; the code that owns the socket notifies the owner, which calls `SegmentPool.release`.
- A segment is reused only after *all* its readers have released it, under a new name: the name identifies late or
  repeated releases of an earlier use, and readers that come too late, so they do no harm.
- A reader that died releases everything: by `SegmentPool.remove_reader`, or by `release_all` if the caller counts
  readers itself.
- If the owner dies, processes that have mapped the segment keep it; opening it later raises `TransferError`.

In the other direction, an owner creates a `ReceiveBuffer`, others write into it (`map_for_writing`), and the owner
keeps it: data from many processes lies in one contiguous piece, copied once. It is reused when the owner's last view of
it is freed.

Without memory files (a system other than Linux, a forbidden `memfd_create`, no file descriptors left), `write` returns
`InlineBuffer`s, which are part of the message.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import secrets
import struct
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from meshbook.clock import Clock, SystemClock
from meshbook.errors import TransferError
from meshbook.wire.messages import InlineBuffer, SharedBuffer

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
ALIGN_BYTES = 64  # alignment of every buffer: a cache line, and the alignment of torch and numpy

# Buffers of at least this size get a segment each, so that each is freed separately. Smaller ones share: a model of a
# thousand small parameters must not use a thousand file descriptors on both sides.
OWN_SEGMENT_BYTES = 8 << 20
PACKED_SEGMENT_BYTES = 64 << 20  # the most that one small live buffer can hold back

MAX_FREE_BYTES = 512 << 20
MAX_FREE_SEGMENTS = 64  # a file descriptor each, of the usual 1,024 of a process

# At the start of every segment: the number of its uses. The buffers begin a page later.
_USE_COUNT = struct.Struct("<Q")

# Linux constants that `mmap` and `os` lack, or whose wrappers cannot map at an address or without retaining a
# descriptor.
_PROT_READ, _PROT_WRITE = 0x1, 0x2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # since Linux 5.14
_MADV_COLLAPSE = 25  # since Linux 6.1
_MFD_NOEXEC_SEAL = 0x8  # since Linux 6.3; sealing allowed, and required where vm.memfd_noexec=2


class SegmentPool:
    """The segments that one process owns, retained for reuse. Thread-safe; `close` (or `with`) frees everything.

    Fresh pages cost eight times as much as the copy itself, so segments are reused: the smallest free segment that is
    large enough and at most twice too large. Nothing stays mapped in the owner, so its resident memory does not grow. A
    process forked from the owner starts with an empty pool.
    """

    def __init__(self, *, max_free_bytes: int = MAX_FREE_BYTES, clock: Clock | None = None) -> None:
        self._max_free_bytes = max_free_bytes
        self._clock = clock or SystemClock()
        self._reset()
        self.is_available = _has_memory_files()  # False: `write` returns inline buffers only
        _register_fork_handlers(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._name_prefix = secrets.token_hex(4)
        self._num_created = 0
        self._in_use: dict[str, _Segment] = {}  # by the name of the use
        self._receiving: dict[str, _Segment] = {}  # also in use, by this process
        self._finalized_names: deque[str] = deque()  # receive buffers without views; finalizers append at any moment
        self._free: dict[str, _Segment] = {}  # by the name of the last use; the one free for longest first
        self._closed = False

    def _reset_after_fork(self) -> None:
        """Reset the pool in a forked child.

        The descriptors would retain the parent's memory, and the lock may be held for ever.
        """
        inherited = [*self._in_use.values(), *self._receiving.values(), *self._free.values()]
        closed = self._closed
        self._reset()
        self._closed = closed
        for segment in inherited:
            segment.close()

    def _disown_receiving(self) -> None:
        """After a fork, in the parent: mark receive buffers as not reusable, because the child sees their content."""
        for segment in list(self._receiving.values()):
            segment.is_exclusive = False

    def __enter__(self) -> SegmentPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        """The memory, in bytes, of receive buffers and of segments that readers have not released."""
        with self._lock:
            self._reclaim_receiving()
            return sum(
                segment.resident_bytes for segments in (self._in_use, self._receiving) for segment in segments.values()
            )

    @property
    def free_bytes(self) -> int:
        """The memory, in bytes, that is retained for reuse."""
        with self._lock:
            self._reclaim_receiving()
            return sum(segment.resident_bytes for segment in self._free.values())

    def write(
        self, buffers: Sequence[memoryview], readers: int | Collection[int] = 1
    ) -> list[SharedBuffer | InlineBuffer]:
        """Copy buffers to where other processes can read them. Blocks for the copy, without the lock.

        Args:
            buffers: contiguous; of any item type.
            readers: the processes that will open, and must release, the buffers: a number, or the ranks themselves,
                which can then be removed one by one.

        Returns:
            One for each buffer, in order. `SharedBuffer`s of one segment are opened, and released, together.

        Raises:
            TransferError: there is no memory for it, or the pool is closed. Nothing is retained.
        """
        views = [_flatten(buffer) for buffer in buffers]
        pending_readers = _Readers.of(readers)
        if not self.is_available:
            return [InlineBuffer(bytes(view)) for view in views]
        written: list[SharedBuffer | None] = [None] * len(views)
        names: list[str] = []
        try:
            for group in _group_by_segment([view.nbytes for view in views]):
                end = PAGE_BYTES
                pieces = []
                for index in group:
                    pieces.append((end, views[index]))
                    end = _round_up(end + views[index].nbytes, ALIGN_BYTES)
                segment = self._acquire(end, pending_readers.copy())
                names.append(segment.use_name)
                segment.fill(pieces)
                for index, (offset, view) in zip(group, pieces, strict=True):
                    written[index] = SharedBuffer(os.getpid(), segment.fd, offset, view.nbytes, segment.use_name)
        except BaseException as error:  # KeyboardInterrupt too: segments that no reader knows would never be released
            for name in names:
                self._discard(name)
            if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise TransferError(_no_memory_message(sum(view.nbytes for view in views), self)) from error
            if isinstance(error, OSError):  # no descriptors left, or forbidden: sent inline, which is slower
                return [InlineBuffer(bytes(view)) for view in views]
            raise
        return [shared for shared in written if shared is not None]

    def receive_buffer(self, nbytes: int) -> ReceiveBuffer | None:
        """Return memory that others write into and this process keeps, with its pages allocated; None if unavailable.

        None means: no memory files here, or no descriptors left.

        Raises:
            TransferError: there is no memory for it, or the pool is closed.
        """
        if not self.is_available:
            return None
        end = PAGE_BYTES + nbytes
        try:
            segment = self._acquire(end, None)
        except OSError:
            return None
        try:
            return ReceiveBuffer(segment, nbytes, self)
        except BaseException as error:
            self._discard(segment.use_name)
            if isinstance(error, OSError):
                raise TransferError(_no_memory_message(nbytes, self)) from error
            raise

    def release(self, segment: str, count: int = 1, *, reader: int | None = None) -> None:
        """Record that readers released a segment: `count` of an anonymous number, or the named one.

        A name that is not in use (any more) is ignored: it was already released, dropped or closed.
        """
        with self._lock:
            in_use = self._in_use.get(segment)
            if in_use is None:
                return
            in_use.readers.release(count, reader)
            if not in_use.readers:
                self._mark_free(segment)
            excess = self._pop_excess()
        _close_all(excess)

    def remove_reader(self, reader: int) -> None:
        """Release everything that a reader, now lost, holds by name."""
        with self._lock:
            names = [name for name, segment in self._in_use.items() if reader in segment.readers.ranks]
        for name in names:
            self.release(name, reader=reader)

    def release_all(self, segment: str) -> None:
        """Free a segment, whatever readers are counted."""
        with self._lock:
            if segment in self._in_use:
                self._mark_free(segment)
            excess = self._pop_excess()
        _close_all(excess)

    def trim(self, idle_s: float) -> None:
        """Free the memory of segments that have been unused for longer than `idle_s` seconds."""
        with self._lock:
            self._reclaim_receiving()
            freed_before = self._clock.monotonic() - idle_s
            idle = [name for name, segment in self._free.items() if segment.free_since <= freed_before]
            excess = [self._free.pop(name) for name in idle] + self._pop_excess()
        _close_all(excess)

    def close(self) -> None:
        """Free everything. Processes that have mapped a segment keep it; opening one later raises `TransferError`."""
        with self._lock:
            segments = [*self._in_use.values(), *self._receiving.values(), *self._free.values()]
            self._in_use.clear()
            self._receiving.clear()
            self._free.clear()
            self._closed = True
        _close_all(segments)

    def _acquire(self, min_bytes: int, readers: _Readers | None) -> _Segment:
        """Return a segment for others to read; with `readers` None, one for a receive buffer."""
        with self._lock:
            if self._closed:
                raise TransferError("the shared memory of this process is closed: its mesh was stopped or detached")
            self._reclaim_receiving()
            fitting = [
                name
                for name, segment in self._free.items()
                if min_bytes <= segment.capacity <= max(2 * min_bytes, 2 * PAGE_BYTES)
            ]
            if fitting:
                segment = self._free.pop(min(fitting, key=lambda name: self._free[name].capacity))
            else:
                self._num_created += 1
                segment = _Segment.create(f"{self._name_prefix}-{self._num_created}", _round_up_capacity(min_bytes))
            segment.num_uses += 1
            if readers is None:
                self._receiving[segment.use_name] = segment
            else:
                segment.readers = readers
                self._in_use[segment.use_name] = segment
            return segment

    def _reclaim_receiving(self) -> None:
        """Reclaim receive buffers whose views were freed. The caller holds the lock."""
        for name in _drain(self._finalized_names):
            segment = self._receiving.pop(name, None)
            if segment is not None and segment.is_exclusive:
                self._add_free(name, segment)
            elif segment is not None:
                segment.close()

    def _mark_free(self, name: str) -> None:
        """Move a segment from in use to free. The caller holds the lock."""
        self._add_free(name, self._in_use.pop(name))

    def _add_free(self, name: str, segment: _Segment) -> None:
        segment.free_since = self._clock.monotonic()
        self._free[name] = segment

    def _pop_excess(self) -> list[_Segment]:
        """Remove and return the free segments to close. The caller holds the lock.

        First those too large to retain at all, then those free for longest.
        """
        excess = []
        total = sum(segment.resident_bytes for segment in self._free.values())
        too_large = [name for name, segment in self._free.items() if segment.resident_bytes > self._max_free_bytes]
        while self._free and (total > self._max_free_bytes or len(self._free) > MAX_FREE_SEGMENTS):
            segment = self._free.pop(too_large.pop() if too_large else next(iter(self._free)))
            total -= segment.resident_bytes
            excess.append(segment)
        return excess

    def _discard(self, name: str) -> None:
        with self._lock:
            segment = self._in_use.pop(name, None) or self._receiving.pop(name, None)
        if segment is not None:
            segment.close()


class ReceiveBuffer:
    """Memory that other processes fill, by `map_for_writing(buffer.memory, ...)`, and that this process then keeps.

    As a context manager it frees the memory at exit unless `claim` was called: a process that still writes, because its
    command was cancelled or its controller stopped, then writes into memory that nothing reads.
    """

    def __init__(self, segment: _Segment, nbytes: int, pool: SegmentPool) -> None:
        self._pool = pool
        self._mapping: MappedFile | None = segment.map_for_receiving(PAGE_BYTES + nbytes)
        self.memory = SharedBuffer(os.getpid(), segment.fd, PAGE_BYTES, nbytes, segment.use_name)

    def __enter__(self) -> ReceiveBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.unmap()
            self._pool._discard(self.memory.segment)

    def claim(self) -> memoryview:
        """Return the bytes, once all have written. They return to the pool when the last view of them is freed."""
        mapping, self._mapping = self._mapping, None
        assert mapping is not None, "a room is kept once"
        view = mapping.view()
        weakref.finalize(
            view.obj, _unmap_and_release, mapping, self.memory.segment, self._pool._finalized_names
        ).atexit = False
        return view[PAGE_BYTES:]


@contextlib.contextmanager
def map_for_writing(memory: SharedBuffer, start: int, stop: int) -> Iterator[memoryview]:
    """Map another process's receive buffer; its bytes from `start` to `stop` are writable until the `with` ends.

    Raises:
        TransferError: the buffer no longer exists, or is not on this machine.
    """
    end = memory.offset + memory.nbytes
    with contextlib.ExitStack() as stack:
        fd = _open_segment(memory, os.O_RDWR, end)
        try:
            mapping = MappedFile.from_fd(fd, end, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
            stack.callback(mapping.unmap)
            mapping.populate(memory.offset + start, memory.offset + stop)
        except OSError as error:
            raise TransferError(_cannot_open_message(memory.pid, end, error)) from error
        finally:
            os.close(fd)
        view = mapping.view()
        if _USE_COUNT.unpack_from(view)[0] != _use_number(memory.segment):
            raise TransferError(f"process {memory.pid} has reused this room, for which this one has come too late")
        yield view[memory.offset :]


class SegmentReader:
    """Opens other processes' segments, and tracks which of them this process no longer uses. Thread-safe."""

    def __init__(self) -> None:
        # The garbage collector appends to it, in any thread, at any point: a deque needs no lock.
        self._released: deque[str] = deque()

    def open(self, buffer: SharedBuffer | InlineBuffer) -> memoryview:
        """Open one buffer; see `open_all`."""
        return self.open_all((buffer,))[0]

    def open_all(self, buffers: Iterable[SharedBuffer | InlineBuffer]) -> list[memoryview]:
        """Return the buffers of one message, in order, each as writable bytes private to this process.

        Nothing is copied: pages stay shared with all other readers until they are written to. (Writing to all of a
        large array in place costs eight copies the first time; an explicit copy is then cheaper.) Objects built on a
        view (memoryview, numpy array, torch tensor) retain its segment; each segment counts as released once, when the
        last of them is freed. So open the buffers of one message together, by one call.

        Raises:
            TransferError: the owner has exited, or has reused the segment since. Segments already opened by this call
                count as released.
        """
        buffers = list(buffers)
        segments: dict[tuple[int, int, str], tuple[SharedBuffer, int]] = {}  # with the end of the bytes read from it
        for buffer in buffers:
            if isinstance(buffer, SharedBuffer):
                if buffer.offset < PAGE_BYTES or buffer.nbytes < 0:
                    raise TransferError(f"not a shared buffer: {buffer.nbytes} bytes at {buffer.offset}")
                key = (buffer.pid, buffer.fd, buffer.segment)
                end = segments[key][1] if key in segments else 0
                segments[key] = buffer, max(end, buffer.offset + buffer.nbytes)
        mapped = {key: self._map(buffer, end) for key, (buffer, end) in segments.items()}
        return [
            memoryview(bytearray(buffer.data)) if isinstance(buffer, InlineBuffer)
            else mapped[buffer.pid, buffer.fd, buffer.segment][buffer.offset : buffer.offset + buffer.nbytes]
            for buffer in buffers
        ]  # fmt: skip

    def discard(self, buffers: Iterable[SharedBuffer | InlineBuffer]) -> None:
        """Release the segments of a message that will not be opened here because its command was cancelled."""
        segments = {buffer.segment: None for buffer in buffers if isinstance(buffer, SharedBuffer)}
        self._released.extend(segments)

    def drain_released(self) -> tuple[str, ...]:
        """Return the segments released since the last call, in order, for their owners' `release`. Does not block."""
        return tuple(_drain(self._released))

    def _map(self, buffer: SharedBuffer, length: int) -> memoryview:
        pid, segment = buffer.pid, buffer.segment
        opened = _open_segment(buffer, os.O_RDONLY, length)
        try:
            mapping = MappedFile.from_fd(opened, length, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_NORESERVE)
        except OSError as error:
            raise TransferError(_cannot_open_message(pid, length, error)) from error
        finally:
            os.close(opened)
        view = mapping.view()
        # Never unmapped at exit: other threads may still read while the interpreter shuts down.
        weakref.finalize(view.obj, _unmap_and_release, mapping, segment, self._released).atexit = False
        if _USE_COUNT.unpack_from(view)[0] != _use_number(segment):
            raise TransferError(f"process {pid} has reused the memory of this value, which came too late; resend it")
        return view


def _open_segment(buffer: SharedBuffer, mode: int, length: int) -> int:
    """Open the owner's segment here, after checking its name and that it has `length` bytes; return the descriptor."""
    try:
        # Non-blocking: if the pid was reused, the descriptor may be a pipe.
        opened = os.open(f"/proc/{buffer.pid}/fd/{buffer.fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(_cannot_open_message(buffer.pid, length, error)) from error
    try:
        if os.readlink(f"/proc/self/fd/{opened}") != f"/memfd:{_file_name(buffer.segment)} (deleted)":
            raise TransferError(f"process {buffer.pid} no longer holds the data of this value; send it again")
        if os.fstat(opened).st_size < length:  # access past a file's end would kill this process
            raise TransferError(f"not a shared buffer: it ends {length} bytes into a smaller file")
    except BaseException as error:
        os.close(opened)
        if isinstance(error, OSError):
            raise TransferError(_cannot_open_message(buffer.pid, length, error)) from error
        raise
    return opened


def _unmap_and_release(mapping: MappedFile, segment: str, released: deque[str]) -> None:
    mapping.unmap()
    released.append(segment)


def _drain(released: deque[str]) -> Iterator[str]:
    while True:
        try:
            yield released.popleft()
        except IndexError:
            return


# ---------------------------------------------------------------------------------------------------------------------
# One segment


@dataclass
class _Readers:
    """The readers that have not released a segment yet: a number, or ranks."""

    num_unnamed: int = 0
    ranks: set[int] = field(default_factory=set)

    @staticmethod
    def of(readers: int | Collection[int]) -> _Readers:
        pending = _Readers(num_unnamed=readers) if isinstance(readers, int) else _Readers(ranks=set(readers))
        if pending.num_unnamed < 0 or not pending:
            raise ValueError("a buffer that nobody reads would never be released; give at least one reader")
        return pending

    def copy(self) -> _Readers:
        return _Readers(self.num_unnamed, set(self.ranks))

    def release(self, count: int, rank: int | None) -> None:
        if rank is None:
            self.num_unnamed = max(0, self.num_unnamed - count)
        else:
            self.ranks.discard(rank)

    def __bool__(self) -> bool:
        return bool(self.num_unnamed or self.ranks)


@dataclass
class _Segment:
    """An anonymous memory file. Its size is sealed and never changes, so access to a mapping of it cannot fault."""

    name: str
    fd: int
    capacity: int  # bytes; those never written to cost nothing
    num_uses: int = 0
    readers: _Readers = field(default_factory=_Readers)
    free_since: float = 0.0  # monotonic
    written_bytes: int = 0  # from the start; these have pages
    huge_bytes: int = 0  # from the start; these have huge pages
    can_be_huge: bool = True  # True until huge pages have failed
    is_exclusive: bool = True  # no process forked from this one sees its content

    @classmethod
    def create(cls, name: str, capacity: int) -> _Segment:
        fd = _create_memory_file(_file_name(f"{name}."))
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

            mapping = MappedFile.from_fd(self.fd, end, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
            try:
                target = mapping.view()
                _USE_COUNT.pack_into(target, 0, self.num_uses)
                for offset, view in pieces:
                    destination = np.frombuffer(target, np.uint8, view.nbytes, offset)
                    np.copyto(destination, np.frombuffer(view, np.uint8))
            finally:
                mapping.unmap()
        else:
            for offset, view in ((0, memoryview(_USE_COUNT.pack(self.num_uses))), *pieces):
                _write_at(self.fd, view, offset)
        self.written_bytes = max(self.written_bytes, end)

    def map_for_receiving(self, end: int) -> MappedFile:
        """Map the first `end` bytes, with the number of this use written and pages allocated for all writers.

        Raises:
            OSError: there is no memory for it.
        """
        is_huge = self._ensure_huge_pages(end)
        mapping = MappedFile.from_fd(self.fd, end, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
        try:
            if not is_huge:
                mapping.populate()
            _USE_COUNT.pack_into(mapping.view(), 0, self.num_uses)
        except BaseException:
            mapping.unmap()
            raise
        self.written_bytes = max(self.written_bytes, end)
        return mapping

    def _ensure_huge_pages(self, end: int) -> bool:
        """Ensure huge pages for the first `end` bytes, if possible; return whether they have them.

        The content of pages that are converted is lost.
        """
        length = _round_up(end, HUGE_PAGE_BYTES)
        if end < HUGE_PAGE_BYTES or not self.can_be_huge:
            return False
        if self.huge_bytes < length:
            mapping = MappedFile.from_fd(self.fd, length, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
            try:
                start = mapping.address + self.huge_bytes
                for address in range(start, mapping.address + length, HUGE_PAGE_BYTES):
                    ctypes.memset(address, 0, 1)  # madvise refuses a range without any page
                self.can_be_huge = _libc().madvise(start, length - self.huge_bytes, _MADV_COLLAPSE) == 0
            finally:
                mapping.unmap()
            if self.can_be_huge:
                self.huge_bytes = length
        return self.can_be_huge


def copy_to_fresh_pages(target: memoryview, source: memoryview) -> None:
    """Copy to untouched memory. Large targets get huge pages, which takes a third of the time."""
    import numpy as np  # its copies release the GIL

    destination = np.frombuffer(target, np.uint8)
    if destination.nbytes >= 2 * HUGE_PAGE_BYTES:
        first, last = (
            _round_up(destination.ctypes.data, PAGE_BYTES),
            (destination.ctypes.data + destination.nbytes) // PAGE_BYTES * PAGE_BYTES,
        )
        _libc().madvise(first, last - first, _MADV_HUGEPAGE)
    np.copyto(destination, np.frombuffer(source, np.uint8))


@dataclass(frozen=True)
class MappedFile:
    """The first bytes of a file in memory, at a multiple of the huge page size so that huge pages can be mapped.

    `mmap.mmap` chooses its address itself, and before Python 3.13 retains a descriptor for as long as it lives.
    """

    base: int  # of the reserved addresses
    reserved: int  # bytes
    address: int
    length: int

    @classmethod
    def from_fd(cls, fd: int, length: int, protection: int, flags: int) -> MappedFile:
        libc = _libc()
        slack = HUGE_PAGE_BYTES if length >= HUGE_PAGE_BYTES else 0
        reserved = _round_up(length, PAGE_BYTES) + slack
        base = libc.mmap(None, reserved, 0, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if base == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address = _round_up(base, HUGE_PAGE_BYTES) if slack else base
        if libc.mmap(address, length, protection, flags | _MAP_FIXED, fd, 0) == _MAP_FAILED:
            number = ctypes.get_errno()
            libc.munmap(base, reserved)
            raise OSError(number, os.strerror(number))
        return cls(base, reserved, address, length)

    def view(self) -> memoryview:
        """Return the bytes. The view does not keep the mapping alive."""
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.address)).cast("B")

    def populate(self, start: int = 0, stop: int | None = None, *, to_write: bool = True) -> None:
        """Allocate the pages at once, for reading or also for writing, instead of one page fault each.

        Raises:
            OSError: there is no memory for them.
        """
        first = self.address + start // PAGE_BYTES * PAGE_BYTES
        last = self.address + (self.length if stop is None else stop)
        advice = _MADV_POPULATE_WRITE if to_write else _MADV_POPULATE_READ
        if _libc().madvise(first, last - first, advice) and ctypes.get_errno() != errno.EINVAL:
            # EINVAL: this kernel does not support it
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unmap(self) -> None:
        _libc().munmap(self.base, self.reserved)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_int64], pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _create_memory_file(name: str) -> int:
    """Create an anonymous memory file that can be sealed."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without the flag
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _has_memory_files() -> bool:
    """Whether this process can create such a file and open it by its path."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        fd = _create_memory_file("meshbook-probe")
    except OSError:
        return False
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _register_fork_handlers(pool: SegmentPool) -> None:
    pool_ref = weakref.ref(pool)

    def in_child() -> None:
        if (pool := pool_ref()) is not None:
            pool._reset_after_fork()

    def in_parent() -> None:
        if (pool := pool_ref()) is not None:
            pool._disown_receiving()

    os.register_at_fork(after_in_child=in_child, after_in_parent=in_parent)


def _close_all(segments: Iterable[_Segment]) -> None:
    """Close segments. Call without the lock: freeing a gigabyte takes a while."""
    for segment in segments:
        segment.close()


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:  # the kernel writes at most 2 GiB per call
        done += os.pwrite(fd, view[done:], offset + done)


def _flatten(buffer: memoryview) -> memoryview:
    """Return the same bytes as a one-dimensional view."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast


def _group_by_segment(sizes: Sequence[int]) -> Iterator[list[int]]:
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


def _round_up_capacity(min_bytes: int) -> int:
    """Return a size at most a quarter larger, so that slightly larger values can reuse it. Unused bytes are free."""
    step = max(PAGE_BYTES, 1 << max(0, min_bytes.bit_length() - 3))
    rounded = _round_up(min_bytes, step)
    return _round_up(rounded, HUGE_PAGE_BYTES) if rounded >= HUGE_PAGE_BYTES else rounded


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _file_name(use_name: str) -> str:
    """Return the name of the memory file, which stays the same through all its uses."""
    return f"meshbook-{use_name.rpartition('.')[0]}"


def _use_number(use_name: str) -> int:
    number = use_name.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0  # 0 is never the number of a use


def _format_mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _no_memory_message(needed_bytes: int, pool: SegmentPool) -> str:
    return (
        f"no memory for the {_format_mib(needed_bytes)} of this value to be shared: {_format_mib(pool.used_bytes)} are "
        f"in use, {_format_mib(pool.free_bytes)} kept for reuse; delete values that came from here, or send less"
    )


def _cannot_open_message(pid: int, length: int, error: OSError) -> str:
    if not _is_alive(pid):
        return (
            f"process {pid}, which held the {_format_mib(length)} of this value, is gone; make it again and resend it"
        )
    if isinstance(error, FileNotFoundError):
        return f"process {pid} no longer holds the data of this value; send it again"
    if isinstance(error, PermissionError):
        return (
            f"this process may not read the memory that process {pid} shares ({error.strerror}); both must run as the "
            f"same user, and neither with capabilities of its own"
        )
    return f"the {_format_mib(length)} of this value, shared by process {pid}, cannot be mapped here: {error.strerror}"


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
