"""Live memory of one process that other processes of the same machine read and write at any time.

Unlike `buffers`, which hands over one copy, a region stays the owner's live memory: readers see the owner's changes and
never wait for the owner. This module knows nothing of tensors, pickles or meshes; the owner supplies the file that
backs the memory (a memory file, or shared memory).

- `RegionPublisher.publish` returns a `Region`, a small record of where the memory is. Any process that has it uses
  `RegionReader`. The region ends with the object that owns the memory, and needs no descriptor beside that object's
  own.
- A *slot table*, a small memory file of the owner that all its readers map too, has one word per region: the region's
  serial number while it is published, 0 afterwards. A reader checks the word before and after it copies, so it sees a
  `drop` at once; it can also drop a region itself, and the owner frees the memory when it next publishes or drops
  something.
- Readers and writers are not synchronised: a copy that runs beside a write may contain some of both. The program orders
  reads and writes itself (by an endpoint's reply, a message), as with RDMA.
- Readers detect a dead owner by its pidfd: its memory may still be mapped here, and must not be taken for current
  state.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import select
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshbook.errors import TransferError
from meshbook.wire.descriptors import describe_shortage, is_shortage
from meshbook.wire.memory_files import MappedFile

MAX_REGIONS = 65_536  # of one process; the slot table is a sparse file, so unused words cost nothing
MAX_MAPPED_FILES = 4096  # of one owner that a reader retains: mapping 1 GB again costs 30 ms in page faults

# For regions of at least this size, a thread maps the pages ahead of the first copy: page faults during the copy would
# cost half as much as the copy.
_PREFAULT_BYTES = 16 << 20

_SLOT_TABLE_BYTES = 8 * (2 + MAX_REGIONS)
# Free slots that are not reused yet: two readers may drop one region at the same moment, and the later one must not
# clear the word of the owner's next region. 4 KiB of the slot table.
_MIN_FREE_SLOTS = 512
# Regions of one piece of memory that can be dropped independently; further requests return these again. It bounds the
# slots of a program that publishes the same memory in every step and never drops it.
_MAX_SLOTS_PER_MEMORY = 16


class Region(NamedTuple):
    """The location of some memory. Plain data: any process may send, copy and retain it."""

    machine: str  # of the owner; `machine_id()`
    pid: int
    table_fd: int  # in the owner
    table_name: str  # expected name of the descriptor; differs if another process reuses the pid
    slot: int  # in the slot table
    serial: int  # the slot's value while the memory is published
    fd: int  # in the owner; of the file
    file_name: str
    offset: int  # in the file
    nbytes: int


class RegionPublisher:
    """The regions that this process publishes. Thread-safe. A forked child publishes and retains none of them."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._table: _SlotTable | None = None
        self._published: dict[int, _PublishedRegion] = {}  # by slot
        self._slots_by_memory: dict[_MemoryKey, deque[int]] = {}  # slots, the least recently issued first
        self._free_slots: deque[int] = deque()  # the one free for longest first
        self._num_published = 0

    def _reset_after_fork(self) -> None:
        table = self._table
        self._reset()  # the child does not track the owners' end: the slot table is the parent's
        if table is not None:
            table.close()

    def __len__(self) -> int:
        """Return the number of published regions, after reclaiming those that were dropped or whose owner was freed."""
        with self._lock:
            self._reclaim_dropped()
            return len(self._published)

    def publish(self, fd: int, offset: int, nbytes: int, owner: object) -> Region:
        """Let other processes read and write `nbytes` bytes of a file from `offset`.

        Args:
            fd: of the file; open for as long as `owner` lives.
            owner: the object that the memory belongs to. The region is dropped when it is freed.

        Raises:
            TransferError: too many regions, or no descriptors left.
        """
        with self._lock:
            self._reclaim_dropped()
            memory_key = (id(owner), offset, nbytes)
            slots = self._slots_by_memory.get(memory_key, ())
            if len(slots) >= _MAX_SLOTS_PER_MEMORY:
                assert isinstance(slots, deque)
                slots.rotate(-1)
                return self._published[slots[-1]].region
            table = self._get_table()
            if len(self._published) == MAX_REGIONS:
                raise TransferError(
                    f"this process offers {MAX_REGIONS:,} buffers already; drop() those that nobody needs"
                )
            file_name = os.readlink(f"/proc/self/fd/{fd}")
            self._num_published += 1
            num_slots = len(self._published) + len(self._free_slots)
            can_reuse = len(self._free_slots) > _MIN_FREE_SLOTS or num_slots == MAX_REGIONS
            slot = self._free_slots.popleft() if can_reuse else _SlotTable.FIRST_SLOT + num_slots
            serial = table[slot] = self._num_published
            region = Region(
                machine_id(), os.getpid(), table.fd, table.name, slot, serial, fd, file_name, offset, nbytes
            )

            # runs in any thread, even one that holds the lock: garbage collection may call it
            def ended(_: object) -> None:
                if table[slot] == serial:
                    table.clear(slot)

            self._published[slot] = _PublishedRegion(region, memory_key, weakref.ref(owner, ended))
            self._slots_by_memory.setdefault(memory_key, deque()).append(slot)
            return region

    def publish_token(self, owner: object) -> Region:
        """Publish a region of one byte, used only to drop and check it: for memory that is read in another way.

        Raises:
            TransferError: see `publish`.
        """
        with self._lock:
            fd = self._get_table().fd
        return self.publish(fd, 0, 1, owner)

    def drop(self, region: Region) -> None:
        """Make further reads fail and release this process's memory. Idempotent."""
        with self._lock:
            if self._table is not None and self._table[region.slot] == region.serial:
                self._table.clear(region.slot)
            self._reclaim_dropped()

    def _get_table(self) -> _SlotTable:
        """Return the slot table, created on first use. The caller holds the lock."""
        self._table = self._table or _SlotTable.create()
        return self._table

    def _reclaim_dropped(self) -> None:
        """Reclaim the slots of regions that the owner or a reader dropped. The caller holds the lock."""
        table = self._table
        if table is None or not table.pop_unseen_drops():
            return
        for slot in [slot for slot in self._published if table[slot] == 0]:
            memory_key = self._published.pop(slot).memory_key
            slots = self._slots_by_memory[memory_key]
            slots.remove(slot)
            if not slots:
                del self._slots_by_memory[memory_key]
            self._free_slots.append(slot)


class RegionReader:
    """Other processes' regions, mapped here. Thread-safe."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # mappings are inherited; the lock may be held for ever

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[tuple[int, str], _OwnerProcess] = {}

    @contextlib.contextmanager
    def map_region(self, region: Region) -> Iterator[int]:
        """Yield the region's address in this process, valid until the end of the `with`.

        Raises:
            TransferError: the region is on another machine, was dropped, or its owner has exited. Also raised at the
                end of the `with`: then the copied bytes are undefined.
        """
        if region.machine != machine_id():
            raise TransferError(
                f"this buffer of {_format_size(region.nbytes)} is in the memory of process {region.pid} on "
                f"another machine"
            )
        with self._lock:
            for key in [key for key, other in self._owners.items() if other.is_dead()]:
                del self._owners[key]  # a thread that still copies holds a reference, and its second check fails
            owner = self._owner(region)
            owner.check_region(region)
            file = owner.map_file(region)
            file.num_users += 1
        try:
            yield file.address + region.offset
            owner.check_region(region)
        finally:
            with self._lock:
                file.num_users -= 1

    def drop(self, region: Region) -> None:
        """Ask the owner to free the region. Does not wait; does nothing if the region or its owner no longer exists."""
        with self._lock:
            try:
                owner = self._owner(region)
                owner.check_region(region)
            except TransferError:
                return
            owner.table.clear(region.slot)
            owner.unmap_dropped()

    def _owner(self, region: Region) -> _OwnerProcess:
        key = (region.pid, region.table_name)
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = _OwnerProcess.open(region)
        return owner


@functools.cache
def machine_id() -> str:
    """Return an id of this machine's PID namespace: two containers of one machine have different ids."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # not Linux: no other process's memory can be opened here


def create_memory_file(nbytes: int) -> int:
    """Create a zero-filled memory file of `nbytes` bytes; return its descriptor.

    Raises:
        TransferError: no memory, or no descriptors left.
    """
    try:
        fd = os.memfd_create(f"meshbook-{secrets.token_hex(8)}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise TransferError(f"{_format_size(nbytes)} of shared memory cannot be had: {error.strerror}") from error
    return fd


# ---------------------------------------------------------------------------------------------------------------------


_MemoryKey = tuple[int, int, int]  # the owner's id(), the offset in the file, the number of bytes


class _PublishedRegion(NamedTuple):
    region: Region
    memory_key: _MemoryKey
    owner: weakref.ref[object]  # its callback runs only while this object exists


class _SlotTable:
    """One word per region, in memory that several processes map. One instruction writes a word."""

    # The first words: a flag that others have dropped regions since the owner last checked; the number of drops ever.
    _HAS_UNSEEN_DROPS, _NUM_DROPS = 0, 1
    FIRST_SLOT = 2

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self._map = mmap.mmap(fd, _SLOT_TABLE_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> _SlotTable:
        fd = create_memory_file(_SLOT_TABLE_BYTES)
        return cls(fd, os.readlink(f"/proc/self/fd/{fd}"))

    def __getitem__(self, slot: int) -> int:
        return self._words[slot]

    def __setitem__(self, slot: int, serial: int) -> None:
        self._words[slot] = serial

    def clear(self, slot: int) -> None:
        self._words[slot] = 0
        # two concurrent increments may count as one: it is only compared with an earlier value
        self._words[self._NUM_DROPS] += 1
        self._words[self._HAS_UNSEEN_DROPS] = 1

    @property
    def num_drops(self) -> int:
        return self._words[self._NUM_DROPS]

    def pop_unseen_drops(self) -> bool:
        """Whether a region was dropped since the last call. Only the owner calls this."""
        unseen = bool(self._words[self._HAS_UNSEEN_DROPS])
        # Cleared before the owner scans: a concurrent drop is seen now or sets it again.
        self._words[self._HAS_UNSEEN_DROPS] = 0
        return unseen

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class _OwnerProcess:
    """A process that publishes regions (possibly this one): its slot table, liveness, and files mapped here."""

    def __init__(self, table: _SlotTable, pidfd: int) -> None:
        self.table = table
        self._files: dict[str, _SharedFile] = {}  # by name; the most recently used is last
        self._num_drops = 0
        self._pidfd = pidfd
        self._is_dead = False

    @classmethod
    def open(cls, region: Region) -> _OwnerProcess:
        try:
            pidfd = os.pidfd_open(region.pid)
        except ProcessLookupError as error:
            raise TransferError(_owner_exited_message(region)) from error
        except OSError as error:
            raise TransferError(_not_opened_message(region, error)) from error
        try:
            return cls(_SlotTable(_open_owner_fd(region, region.table_fd, region.table_name), region.table_name), pidfd)
        except BaseException:
            os.close(pidfd)
            raise

    def is_dead(self) -> bool:
        if not self._is_dead:
            poll = select.poll()  # one for each look: several threads may look at once
            poll.register(self._pidfd, select.POLLIN)
            self._is_dead = bool(poll.poll(0))
        return self._is_dead

    def check_region(self, region: Region) -> None:
        if self.is_dead():
            raise TransferError(_owner_exited_message(region))
        if self.table[region.slot] != region.serial:
            raise TransferError(
                f"this buffer of {_format_size(region.nbytes)} was dropped, by its owner (process {region.pid}) or by "
                f"another reader, or its tensor is gone there; the owner has to make a new one, and to keep the tensor"
            )

    def map_file(self, region: Region) -> _SharedFile:
        """Return the mapped file that holds the region."""
        self.unmap_dropped()
        file = self._files.pop(region.file_name, None) or _SharedFile.open(region)
        if region not in file.regions:
            file.regions.add(region)
            if region.nbytes >= _PREFAULT_BYTES:
                threading.Thread(target=file.prefault, args=(region,), name="meshbook-pages", daemon=True).start()
        idle = [name for name, other in self._files.items() if other.num_users == 0]
        for name in idle[: max(0, len(self._files) + 1 - MAX_MAPPED_FILES)]:
            del self._files[name]
        self._files[region.file_name] = file
        return file

    def unmap_dropped(self) -> None:
        """Unmap files without live regions: a mapping retains memory that the owner has released."""
        if self._num_drops == self.table.num_drops:
            return
        self._num_drops = self.table.num_drops
        for name, file in list(self._files.items()):
            file.regions = {region for region in file.regions if self.table[region.slot] == region.serial}
            if not file.regions:
                del self._files[name]  # a thread that still copies holds a reference

    def __del__(self) -> None:  # may run in any thread: that of the last copy
        self.table.close()
        os.close(self._pidfd)


class _SharedFile:
    """A complete file of another process, mapped here."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped = mapped
        self.address = mapped.address
        self.num_users = 0
        self.regions: set[Region] = set()

    @classmethod
    def open(cls, region: Region) -> _SharedFile:
        fd = _open_owner_fd(region, region.fd, region.file_name)
        try:
            size = os.fstat(fd).st_size
            if region.offset < 0 or region.offset + region.nbytes > size:  # access past the end would raise SIGBUS
                raise TransferError(
                    f"not a buffer: {region.nbytes} bytes from {region.offset} of a file of {size} bytes"
                )
            return cls(MappedFile.from_fd(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED))
        except OSError as error:
            raise TransferError(
                f"the {_format_size(region.nbytes)} of this buffer, of process {region.pid}, cannot be mapped here: "
                f"{error.strerror}"
            ) from error
        finally:
            os.close(fd)

    def prefault(self, region: Region) -> None:
        with contextlib.suppress(OSError):  # no memory for the page tables: the copy faults pages in itself
            self._mapped.populate(region.offset, region.offset + region.nbytes, to_write=False)

    def __del__(self) -> None:
        self._mapped.unmap()


def _open_owner_fd(region: Region, fd: int, expected_name: str) -> int:
    """Open a descriptor of the owner here, after checking its name."""
    try:
        # Non-blocking: if the pid was reused, the descriptor may be a pipe.
        opened = os.open(f"/proc/{region.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise TransferError(
            f"this process may not open the memory of process {region.pid} ({error.strerror}); both must run as the "
            f"same user, and neither with capabilities of its own"
        ) from error
    except OSError as error:
        if is_shortage(error):
            raise TransferError(_not_opened_message(region, error)) from error
        if not Path(f"/proc/{region.pid}").exists():
            raise TransferError(_owner_exited_message(region)) from error
        raise TransferError(
            f"process {region.pid} no longer has the {_format_size(region.nbytes)} of this buffer: it was dropped"
        ) from error
    if os.readlink(f"/proc/self/fd/{opened}") == expected_name:
        return opened
    os.close(opened)
    raise TransferError(_owner_exited_message(region))


def _owner_exited_message(region: Region) -> str:
    return (
        f"process {region.pid}, whose memory this buffer of {_format_size(region.nbytes)} is, has ended; what was in "
        f"it is lost, unless somebody read it before"
    )


def _not_opened_message(region: Region, error: OSError) -> str:
    why = describe_shortage() if is_shortage(error) else error.strerror
    return f"the {_format_size(region.nbytes)} of this buffer, of process {region.pid}, cannot be read now: {why}"


def _format_size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):,.1f} MiB"
