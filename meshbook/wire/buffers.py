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
import errno
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import TracebackType

from meshbook.clock import Clock, SystemClock
from meshbook.errors import TransferError
from meshbook.wire.memory_files import (
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PAGE_BYTES,
    PROT_READ,
    PROT_WRITE,
    MappedFile,
    flatten,
    has_memory_files,
    round_up,
)
from meshbook.wire.messages import InlineBuffer, SharedBuffer
from meshbook.wire.segments import (
    USE_COUNT,
    Segment,
    SegmentReaders,
    _cannot_open_message,
    format_mib,
    group_by_segment,
    open_segment,
    round_up_capacity,
    use_number,
)

ALIGN_BYTES = 64  # alignment of every buffer: a cache line, and the alignment of torch and numpy

MAX_FREE_BYTES = 512 << 20
MAX_FREE_SEGMENTS = 64  # a file descriptor each, of the usual 1,024 of a process


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
        self.is_available = has_memory_files()  # False: `write` returns inline buffers only
        _register_fork_handlers(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._name_prefix = secrets.token_hex(4)
        self._num_created = 0
        self._in_use: dict[str, Segment] = {}  # by the name of the use
        self._receiving: dict[str, Segment] = {}  # also in use, by this process
        self._finalized_names: deque[str] = deque()  # receive buffers without views; finalizers append at any moment
        self._free: dict[str, Segment] = {}  # by the name of the last use; the one free for longest first
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
        views = [flatten(buffer) for buffer in buffers]
        pending_readers = SegmentReaders.of(readers)
        if not self.is_available:
            return [InlineBuffer(bytes(view)) for view in views]
        written: list[SharedBuffer | None] = [None] * len(views)
        names: list[str] = []
        try:
            for group in group_by_segment([view.nbytes for view in views]):
                end = PAGE_BYTES
                pieces = []
                for index in group:
                    pieces.append((end, views[index]))
                    end = round_up(end + views[index].nbytes, ALIGN_BYTES)
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

    def allocate(self, sizes: Sequence[int], readers: int | Collection[int] = 1) -> list[SharedBuffer]:
        """Return buffers as `write` does, of these sizes, whose bytes the caller writes into their files.

        Raises:
            TransferError: there are no memory files here, or the pool is closed.
            OSError: no descriptors are left. Nothing is retained in either case.
        """
        if not self.is_available:
            raise TransferError("there are no memory files on this machine")
        found: dict[int, SharedBuffer] = {}
        names: list[str] = []
        try:
            for group in group_by_segment(sizes):
                offsets, end = [], PAGE_BYTES
                for index in group:
                    offsets.append(end)
                    end = round_up(end + sizes[index], ALIGN_BYTES)
                segment = self._acquire(end, SegmentReaders.of(readers))
                names.append(segment.use_name)
                segment.prepare(end)
                for index, offset in zip(group, offsets, strict=True):
                    found[index] = SharedBuffer(os.getpid(), segment.fd, offset, sizes[index], segment.use_name)
        except BaseException:
            for name in names:
                self._discard(name)
            raise
        return [found[index] for index in range(len(sizes))]

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

    def _acquire(self, min_bytes: int, readers: SegmentReaders | None) -> Segment:
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
                segment = Segment.create(f"{self._name_prefix}-{self._num_created}", round_up_capacity(min_bytes))
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

    def _add_free(self, name: str, segment: Segment) -> None:
        segment.free_since = self._clock.monotonic()
        self._free[name] = segment

    def _pop_excess(self) -> list[Segment]:
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

    def __init__(self, segment: Segment, nbytes: int, pool: SegmentPool) -> None:
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
        fd = open_segment(memory, os.O_RDWR, end)
        try:
            mapping = MappedFile.from_fd(fd, end, PROT_READ | PROT_WRITE, MAP_SHARED)
            stack.callback(mapping.unmap)
            mapping.populate(memory.offset + start, memory.offset + stop)
        except OSError as error:
            raise TransferError(_cannot_open_message(memory.pid, end, error)) from error
        finally:
            os.close(fd)
        view = mapping.view()
        if USE_COUNT.unpack_from(view)[0] != use_number(memory.segment):
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
        opened = open_segment(buffer, os.O_RDONLY, length)
        try:
            mapping = MappedFile.from_fd(opened, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE)
        except OSError as error:
            raise TransferError(_cannot_open_message(pid, length, error)) from error
        finally:
            os.close(opened)
        view = mapping.view()
        # Never unmapped at exit: other threads may still read while the interpreter shuts down.
        weakref.finalize(view.obj, _unmap_and_release, mapping, segment, self._released).atexit = False
        if USE_COUNT.unpack_from(view)[0] != use_number(segment):
            raise TransferError(f"process {pid} has reused the memory of this value, which came too late; resend it")
        return view


def _unmap_and_release(mapping: MappedFile, segment: str, released: deque[str]) -> None:
    mapping.unmap()
    released.append(segment)


def _drain(released: deque[str]) -> Iterator[str]:
    while True:
        try:
            yield released.popleft()
        except IndexError:
            return


def _register_fork_handlers(pool: SegmentPool) -> None:
    pool_ref = weakref.ref(pool)

    def in_child() -> None:
        if (pool := pool_ref()) is not None:
            pool._reset_after_fork()

    def in_parent() -> None:
        if (pool := pool_ref()) is not None:
            pool._disown_receiving()

    os.register_at_fork(after_in_child=in_child, after_in_parent=in_parent)


def _close_all(segments: Iterable[Segment]) -> None:
    """Close segments. Call without the lock: freeing a gigabyte takes a while."""
    for segment in segments:
        segment.close()


def _no_memory_message(needed_bytes: int, pool: SegmentPool) -> str:
    return (
        f"no memory for the {format_mib(needed_bytes)} of this value to be shared: {format_mib(pool.used_bytes)} are "
        f"in use, {format_mib(pool.free_bytes)} kept for reuse; delete values that came from here, or send less"
    )
