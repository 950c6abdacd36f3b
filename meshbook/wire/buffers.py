"""Bytes that several processes of one machine read, with one copy for all of them.

The owner copies a buffer into a segment (an anonymous memory file) and sends a `SharedBuffer` that says where it is; a
reader opens the file as /proc/<pid>/fd/<fd> and maps it privately: nothing is copied until somebody writes, and who
writes does not disturb the others. Knows nothing of pickles, tensors, sockets or meshes.

Who may use a segment when:

- From `write` until its last reader has let go, the owner leaves the bytes alone.
- A reader lets go when the last array, tensor or view over its mapping is gone. Its `SegmentReader` then lists the
  segment in `take_released`; whoever owns the socket tells the owner, which calls `SegmentPool.release`.
- Only a segment that *all* its readers have released is used again, under a new name: a late or repeated release of an
  earlier use, and a reader that comes too late, are recognised by it and do no harm.
- A reader that died lets go of everything: `SegmentPool.forget_reader`, or `drop` for whoever counts readers himself.
- An owner that dies takes nothing from those who have mapped already; who opens afterwards gets `TransferError`.

Where there are no such files (another system than Linux, a forbidden `memfd_create`, no file descriptors left), `write`
answers with `InlineBuffer`s, which ride in the message.
"""

from __future__ import annotations

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
ALIGN_BYTES = 64  # of every buffer: a cache line, and what torch and numpy align to themselves

# Buffers of at least this size get a segment each, so that each goes back when it is done with. Smaller ones share:
# a model of a thousand small parameters must not cost a thousand file descriptors on both sides.
OWN_SEGMENT_BYTES = 8 << 20
PACKED_SEGMENT_BYTES = 64 << 20  # what one small survivor can hold back at most

MAX_FREE_BYTES = 512 << 20
MAX_FREE_SEGMENTS = 64  # a file descriptor each, of 1,024 that a process usually has
COPY_CHUNK_BYTES = 16 << 20  # a slice assignment keeps the GIL: 1 ms per chunk, then other threads have their turn

_USE = struct.Struct("<Q")  # at the start of every segment: how often it has been used. The buffers begin a page later.

# Linux's own numbers, for what `mmap` and `os` lack or cannot do (map at an address; a map that keeps no descriptor).
_PROT_READ, _PROT_WRITE = 0x1, 0x2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25  # since Linux 6.1
_MFD_NOEXEC_SEAL = 0x8  # since Linux 6.3; sealing allowed, and required where vm.memfd_noexec=2


class SegmentPool:
    """Segments that one process owns, kept for reuse. Thread-safe; `close` (or `with`) gives everything back.

    Fresh pages cost eight times as much as the copy itself, hence the reuse: the smallest free segment that is large
    enough, and not more than twice too large. Nothing stays mapped in the owner: its resident memory does not grow.
    A process forked from the owner starts with an empty pool of its own.
    """

    def __init__(self, *, max_free_bytes: int = MAX_FREE_BYTES, clock: Clock | None = None) -> None:
        self._max_free_bytes = max_free_bytes
        self._clock = clock or SystemClock()
        self._start()
        self.available = _memory_files_work()  # False: `write` puts everything inline
        _on_fork(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._token = secrets.token_hex(4)
        self._num_created = 0
        self._in_use: dict[str, _Segment] = {}  # by the name of the use
        self._free: dict[str, _Segment] = {}  # by the name of the last use; the one free for longest first
        self._closed = False

    def _drop_inherited(self) -> None:
        """After a fork, in the child. The descriptors would keep the parent's memory; the lock may be held for ever."""
        inherited, closed = [*self._in_use.values(), *self._free.values()], self._closed
        self._start()
        self._closed = closed
        for segment in inherited:
            segment.close()

    def __enter__(self) -> SegmentPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        """Memory of segments that readers have not released."""
        with self._lock:
            return sum(segment.resident_bytes for segment in self._in_use.values())

    @property
    def free_bytes(self) -> int:
        """Memory kept for reuse."""
        with self._lock:
            return sum(segment.resident_bytes for segment in self._free.values())

    def write(
        self, buffers: Sequence[memoryview], readers: int | Collection[int] = 1
    ) -> list[SharedBuffer | InlineBuffer]:
        """Copy buffers to where other processes can read them. Waits for the copy, without the lock.

        Args:
            buffers: contiguous; of any item type.
            readers: who will open them, and so must release them: a number, or the ranks themselves, which then can be
                forgotten one by one.

        Returns:
            One for each buffer, in order. `SharedBuffer`s of one segment are opened, and released, together.

        Raises:
            TransferError: there is no memory for it, or the pool is closed. Nothing is kept.
        """
        views = [_flat(buffer) for buffer in buffers]
        awaited = _Readers.of(readers)
        if not self.available:
            return [InlineBuffer(bytes(view)) for view in views]
        written: list[SharedBuffer | None] = [None] * len(views)
        names: list[str] = []
        try:
            for group in _grouped([view.nbytes for view in views]):
                end = PAGE_BYTES
                places = []
                for index in group:
                    places.append((end, views[index]))
                    end = _round_up(end + views[index].nbytes, ALIGN_BYTES)
                segment = self._take(end, awaited.copy())
                names.append(segment.use_name)
                segment.fill(places)
                for index, (offset, view) in zip(group, places, strict=True):
                    written[index] = SharedBuffer(os.getpid(), segment.fd, offset, view.nbytes, segment.use_name)
        except BaseException as error:  # KeyboardInterrupt too: what nobody was told of, nobody would release
            for name in names:
                self._discard(name)
            if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise TransferError(_no_memory(views, self)) from error
            if isinstance(error, OSError):  # no descriptors left, or forbidden: slower, but it arrives
                return [InlineBuffer(bytes(view)) for view in views]
            raise
        return [shared for shared in written if shared is not None]

    def release(self, segment: str, count: int = 1, *, reader: int | None = None) -> None:
        """Readers have let go of a segment: `count` of those that were given as a number, or the named one.

        A name that is not in use (any more) is ignored: it was released, dropped or closed before.
        """
        with self._lock:
            held = self._in_use.get(segment)
            if held is None:
                return
            held.readers.let_go(count, reader)
            if not held.readers:
                self._set_free(segment)
            doomed = self._over_the_limit()
        _close_all(doomed)

    def forget_reader(self, reader: int) -> None:
        """A reader is gone, and with it every claim it had by name."""
        with self._lock:
            held = [name for name, segment in self._in_use.items() if reader in segment.readers.ranks]
        for name in held:
            self.release(name, reader=reader)

    def drop(self, segment: str) -> None:
        """Nobody reads this segment any more, whatever was counted."""
        with self._lock:
            if segment in self._in_use:
                self._set_free(segment)
            doomed = self._over_the_limit()
        _close_all(doomed)

    def trim(self, idle_s: float) -> None:
        """Give back the memory of segments that have been free for longer than `idle_s` seconds."""
        before = self._clock.monotonic() - idle_s
        with self._lock:
            idle = [name for name, segment in self._free.items() if segment.free_since <= before]
            doomed = [self._free.pop(name) for name in idle] + self._over_the_limit()
        _close_all(doomed)

    def close(self) -> None:
        """Give everything back. Who has mapped a segment keeps it; who has not yet, will get `TransferError`."""
        with self._lock:
            doomed = [*self._in_use.values(), *self._free.values()]
            self._in_use.clear()
            self._free.clear()
            self._closed = True
        _close_all(doomed)

    def _take(self, need_bytes: int, readers: _Readers) -> _Segment:
        with self._lock:
            if self._closed:
                raise TransferError("the shared memory of this process is closed: its mesh was stopped or detached")
            fitting = [
                name for name, segment in self._free.items()
                if need_bytes <= segment.capacity <= max(2 * need_bytes, 2 * PAGE_BYTES)
            ]
            if fitting:
                segment = self._free.pop(min(fitting, key=lambda name: self._free[name].capacity))
            else:
                self._num_created += 1
                segment = _Segment.create(f"{self._token}-{self._num_created}", _roomy(need_bytes))
            segment.num_uses += 1
            segment.readers = readers
            self._in_use[segment.use_name] = segment
            return segment

    def _set_free(self, name: str) -> None:
        """Holds the lock."""
        segment = self._in_use.pop(name)
        segment.free_since = self._clock.monotonic()
        self._free[name] = segment

    def _over_the_limit(self) -> list[_Segment]:
        """Free segments to close: those too large to keep at all, then those free for longest. Holds the lock."""
        doomed = []
        total = sum(segment.resident_bytes for segment in self._free.values())
        too_large = [name for name, segment in self._free.items() if segment.resident_bytes > self._max_free_bytes]
        while self._free and (total > self._max_free_bytes or len(self._free) > MAX_FREE_SEGMENTS):
            segment = self._free.pop(too_large.pop() if too_large else next(iter(self._free)))
            total -= segment.resident_bytes
            doomed.append(segment)
        return doomed

    def _discard(self, name: str) -> None:
        with self._lock:
            segment = self._in_use.pop(name, None)
        if segment is not None:
            segment.close()


class SegmentReader:
    """Opens other processes' segments, and knows which of them nobody here looks at any more. Thread-safe."""

    def __init__(self) -> None:
        # The garbage collector appends to it, in any thread, in the middle of anything: a deque needs no lock.
        self._released: deque[str] = deque()

    def open(self, buffer: SharedBuffer | InlineBuffer) -> memoryview:
        """One buffer, as `open_all` has it."""
        return self.open_all((buffer,))[0]

    def open_all(self, buffers: Iterable[SharedBuffer | InlineBuffer]) -> list[memoryview]:
        """The buffers of one message, in order, each as writable bytes that belong to this process alone.

        Nothing is copied: pages are shared with everybody else until they are written to. (Writing to all of a large
        array in place costs eight copies the first time; who is going to had better make the copy.) Whatever is built
        on a view (memoryview, numpy array, torch tensor) keeps its segment; each segment counts as released once, when
        the last of them is gone. So the buffers of one message are opened together, by one call.

        Raises:
            TransferError: the owner is gone, or has used the segment for something else since. What had been opened
                by this call counts as released.
        """
        buffers = list(buffers)
        ends: dict[tuple[int, int, str], int] = {}
        for buffer in buffers:
            if isinstance(buffer, SharedBuffer):
                if buffer.offset < PAGE_BYTES or buffer.nbytes < 0:
                    raise TransferError(f"not a shared buffer: {buffer.nbytes} bytes at {buffer.offset}")
                place = (buffer.pid, buffer.fd, buffer.segment)
                ends[place] = max(ends.get(place, 0), buffer.offset + buffer.nbytes)
        mapped = {place: self._map(*place, end) for place, end in ends.items()}
        return [
            memoryview(bytearray(buffer.data)) if isinstance(buffer, InlineBuffer)
            else mapped[buffer.pid, buffer.fd, buffer.segment][buffer.offset : buffer.offset + buffer.nbytes]
            for buffer in buffers
        ]  # fmt: skip

    def discard(self, buffers: Iterable[SharedBuffer | InlineBuffer]) -> None:
        """Release the segments of a message that will not be opened here: its command was called off."""
        segments = {buffer.segment: None for buffer in buffers if isinstance(buffer, SharedBuffer)}
        self._released.extend(segments)

    def take_released(self) -> tuple[str, ...]:
        """Segments released since the last call, in order; for their owners' `release`. Never waits."""
        return tuple(_drained(self._released))

    def _map(self, pid: int, fd: int, segment: str, length: int) -> memoryview:
        file_name = f"/memfd:{_file_name(segment)} (deleted)"
        try:
            # Non-blocking, for a stranger's descriptor may by now be a pipe.
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(_cannot_open(pid, length, error)) from error
        try:
            if os.readlink(f"/proc/self/fd/{opened}") != file_name:
                raise TransferError(f"process {pid} no longer holds the data of this value; send it again")
            if os.fstat(opened).st_size < length:  # touching what lies behind a file's end would kill this process
                raise TransferError(f"not a shared buffer: it ends {length} bytes into a smaller file")
            mapping = MappedFile.of(opened, length, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_NORESERVE)
        except OSError as error:
            raise TransferError(_cannot_open(pid, length, error)) from error
        finally:
            os.close(opened)
        view = mapping.view()
        # Never unmapped at exit: other threads may still read when the interpreter ends.
        weakref.finalize(view.obj, _let_go, mapping, segment, self._released).atexit = False
        if _USE.unpack_from(view)[0] != _use_number(segment):
            raise TransferError(f"process {pid} has reused the memory of this value, which came too late; resend it")
        return view


def _let_go(mapping: MappedFile, segment: str, released: deque[str]) -> None:
    mapping.unmap()
    released.append(segment)


def _drained(released: deque[str]) -> Iterator[str]:
    while True:
        try:
            yield released.popleft()
        except IndexError:
            return


# ---------------------------------------------------------------------------------------------------------------------
# One segment


@dataclass
class _Readers:
    """Who has not let go yet: so many, or these."""

    number: int = 0
    ranks: set[int] = field(default_factory=set)

    @staticmethod
    def of(readers: int | Collection[int]) -> _Readers:
        awaited = _Readers(number=readers) if isinstance(readers, int) else _Readers(ranks=set(readers))
        if awaited.number < 0 or not awaited:
            raise ValueError("a buffer that nobody reads would never be released; give at least one reader")
        return awaited

    def copy(self) -> _Readers:
        return _Readers(self.number, set(self.ranks))

    def let_go(self, count: int, rank: int | None) -> None:
        if rank is None:
            self.number = max(0, self.number - count)
        else:
            self.ranks.discard(rank)

    def __bool__(self) -> bool:
        return bool(self.number or self.ranks)


@dataclass
class _Segment:
    """An anonymous memory file. Its size never changes, and is sealed: a mapping of it can always be touched."""

    name: str
    fd: int
    capacity: int  # bytes; those never written to cost nothing
    num_uses: int = 0
    readers: _Readers = field(default_factory=_Readers)
    free_since: float = 0.0  # monotonic
    written_bytes: int = 0  # from the start; these have pages
    huge_bytes: int = 0  # from the start; these have huge pages
    can_be_huge: bool = True  # as far as is known

    @classmethod
    def create(cls, name: str, capacity: int) -> _Segment:
        fd = _memory_file(_file_name(f"{name}."))
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

    def fill(self, places: Sequence[tuple[int, memoryview]]) -> None:
        """Write the number of this use and each buffer at its offset.

        Measured for 64 MB, in copies into warm memory: into fresh pages 8 by pwrite and 13 through a mapping; into
        pages of a former use 3 by pwrite and 3.5 through a mapping made for the purpose; into huge pages 1.1 through
        such a mapping. Making them huge costs 4, once, so it is done when a segment comes back for the first time: what
        is reused once tends to be reused often. A mapping that is kept would be as fast, and would count as this
        process's memory for as long as it is.
        """
        end = max(offset + view.nbytes for offset, view in places)
        if HUGE_PAGE_BYTES <= end <= self.written_bytes and self.huge_bytes < end and self.can_be_huge:
            self._make_huge(_round_up(end, HUGE_PAGE_BYTES))
        pieces = [(0, memoryview(_USE.pack(self.num_uses))), *places]
        if self.huge_bytes >= end:
            self._copy_through_mapping(pieces, end)
        else:
            for offset, view in pieces:
                _write_at(self.fd, view, offset)
        self.written_bytes = max(self.written_bytes, end)

    def _make_huge(self, length: int) -> None:
        mapping = MappedFile.of(self.fd, length, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
        try:
            self.can_be_huge = _libc().madvise(mapping.address, length, _MADV_COLLAPSE) == 0
        finally:
            mapping.unmap()
        if self.can_be_huge:
            self.huge_bytes = length

    def _copy_through_mapping(self, pieces: Sequence[tuple[int, memoryview]], length: int) -> None:
        mapping = MappedFile.of(self.fd, length, _PROT_READ | _PROT_WRITE, _MAP_SHARED)
        try:
            target = mapping.view()
            for offset, view in pieces:
                for start in range(0, view.nbytes, COPY_CHUNK_BYTES):
                    stop = min(start + COPY_CHUNK_BYTES, view.nbytes)
                    target[offset + start : offset + stop] = view[start:stop]
        finally:
            mapping.unmap()


@dataclass(frozen=True)
class MappedFile:
    """A file's first bytes in memory, where huge pages can be mapped as such: at a multiple of their size.

    `mmap.mmap` chooses its address itself, and before Python 3.13 keeps a descriptor for as long as it lives.
    """

    base: int  # of the reserved addresses
    reserved: int  # bytes
    address: int
    length: int

    @classmethod
    def of(cls, fd: int, length: int, protection: int, flags: int) -> MappedFile:
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
        """The bytes. Does not keep the mapping."""
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.address)).cast("B")

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


def _memory_file(name: str) -> int:
    """A new anonymous memory file that can be sealed."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that does not know the flag
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _memory_files_work() -> bool:
    """Whether this process can make such a file and open it by its path."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        fd = _memory_file("meshbook-probe")
    except OSError:
        return False
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _on_fork(pool: SegmentPool) -> None:
    pool_or_gone = weakref.ref(pool)

    def in_child() -> None:
        if (pool := pool_or_gone()) is not None:
            pool._drop_inherited()

    os.register_at_fork(after_in_child=in_child)


def _close_all(segments: Iterable[_Segment]) -> None:
    """Outside the lock: giving back a gigabyte takes a while."""
    for segment in segments:
        segment.close()


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:  # the kernel takes at most 2 GiB at a time
        done += os.pwrite(fd, view[done:], offset + done)


def _flat(buffer: memoryview) -> memoryview:
    """The same bytes in one dimension."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast


def _grouped(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of buffers that share a segment: a large one by itself, small ones together."""
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


def _roomy(need_bytes: int) -> int:
    """A size at most a quarter larger, so that the next value, a little larger, fits too. Room unused costs nothing."""
    step = max(PAGE_BYTES, 1 << max(0, need_bytes.bit_length() - 3))
    rounded = _round_up(need_bytes, step)
    return _round_up(rounded, HUGE_PAGE_BYTES) if rounded >= HUGE_PAGE_BYTES else rounded


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _file_name(use_name: str) -> str:
    """Of the memory file, which keeps its name through all its uses."""
    return f"meshbook-{use_name.rpartition('.')[0]}"


def _use_number(use_name: str) -> int:
    number = use_name.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0  # 0: never the number of a use


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _no_memory(views: Sequence[memoryview], pool: SegmentPool) -> str:
    needed_bytes = sum(view.nbytes for view in views)
    return (
        f"no memory for the {_mib(needed_bytes)} of this value to be shared: {_mib(pool.used_bytes)} are in use, "
        f"{_mib(pool.free_bytes)} kept for reuse; delete values that came from here, or send less"
    )


def _cannot_open(pid: int, length: int, error: OSError) -> str:
    if not _lives(pid):
        return f"process {pid}, which held the {_mib(length)} of this value, is gone; make it again and resend it"
    if isinstance(error, FileNotFoundError):
        return f"process {pid} no longer holds the data of this value; send it again"
    if isinstance(error, PermissionError):
        return (
            f"this process may not read the memory that process {pid} shares ({error.strerror}); both must run as the "
            f"same user, and neither with capabilities of its own"
        )
    return f"the {_mib(length)} of this value, shared by process {pid}, cannot be mapped here: {error.strerror}"


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
