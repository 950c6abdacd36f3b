"""Memory of one process that others of its machine read from and write to, whenever they like.

Unlike `buffers`, which hands over a copy once, a region stays the owner's live memory: what the owner changes, the next
reader sees, and nobody asks the owner or waits for it. Knows nothing of tensors, pickles or meshes; the owner brings a
file that the memory is a mapping of (a memory file, or shared memory).

- `RegionPublisher.offer` gives a `Region`: a few words that say where the memory is. Whoever has them uses
  `RegionReader`. The region ends with the object that the memory belongs to, and needs no descriptor beside that
  object's own.
- A *board*, a small memory file of the owner's that all its readers map too, has one word for each region: its number
  while it is offered, 0 afterwards. A reader looks before and after it copies, so it learns of a `drop` at once, and
  can drop a region itself; the owner's memory is then given back when it next offers or drops something.
- Readers and writers are not kept apart: a copy that runs beside a write may have some of both. When to read is up to
  the program (an endpoint's answer, a message), as it is with RDMA.
- A dead owner is known by its pidfd: its memory may still be mapped here, and is not taken for its state.
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
from meshbook.wire.buffers import MappedFile

MAX_REGIONS = 65_536  # of one process; the board is a sparse file, so unused words cost nothing
MAX_MAPPED_FILES = 4096  # of one owner that a reader keeps mapped: mapping 1 GB anew costs 30 ms in page faults

# From here on a thread has the pages of a region mapped, ahead of the first copy: one by one, as the copy comes to
# them, they cost half as much as the copy.
_PREFAULT_BYTES = 16 << 20

_SLOT_TABLE_BYTES = 8 * (2 + MAX_REGIONS)
# Free slots that are not used again yet: two readers may drop one region at the same moment, and the later one must not
# clear the word of the owner's next. 4 KiB of the board.
_MIN_FREE_SLOTS = 512
# Regions of one piece of memory that can be dropped apart from each other; who asks for more gets these once more. It
# bounds the slots of a program that offers the same memory in every step and never drops it.
_MAX_SLOTS_PER_MEMORY = 16


class Region(NamedTuple):
    """Where some memory is. Plain data: it may be sent, copied and kept by anyone."""

    machine: str  # of the owner; `machine_id()`
    pid: int
    table_fd: int  # in the owner
    table_name: str  # what the descriptor must be, lest it be another process's with the same pid
    slot: int  # on the board
    serial: int  # what stands there while the memory is offered
    fd: int  # in the owner; of the file
    file_name: str
    offset: int  # in the file
    nbytes: int


class RegionPublisher:
    """What this process offers. Thread-safe. A process forked from it offers nothing and keeps nothing of it alive."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._table: _SlotTable | None = None
        self._published: dict[int, _PublishedRegion] = {}  # by slot
        self._slots_by_memory: dict[_MemoryKey, deque[int]] = {}  # slots; the one that was given out longest ago first
        self._free_slots: deque[int] = deque()  # the one free for longest first
        self._num_published = 0

    def _reset_after_fork(self) -> None:
        table = self._table
        self._reset()  # nobody listens any more for the end of what was offered: the board is the parent's
        if table is not None:
            table.close()

    def __len__(self) -> int:
        """How many are offered; those that a reader has dropped, or whose owner is gone, are given back first."""
        with self._lock:
            self._reclaim_dropped()
            return len(self._published)

    def publish(self, fd: int, offset: int, nbytes: int, owner: object) -> Region:
        """Let others read and write `nbytes` bytes of a file from `offset`.

        Args:
            fd: of the file; open for as long as `owner` lives.
            owner: what the memory belongs to. The region is dropped when it is gone.

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

            def ended(_: object) -> None:  # in any thread, also in one that has the lock: a garbage collection may be
                if table[slot] == serial:
                    table.clear(slot)

            self._published[slot] = _PublishedRegion(region, memory_key, weakref.ref(owner, ended))
            self._slots_by_memory.setdefault(memory_key, deque()).append(slot)
            return region

    def publish_token(self, owner: object) -> Region:
        """A region of one byte, to be dropped and asked about: for memory that is read in another way.

        Raises:
            TransferError: as `offer`.
        """
        with self._lock:
            fd = self._get_table().fd
        return self.publish(fd, 0, 1, owner)

    def drop(self, region: Region) -> None:
        """Readers get an error from now on, and this process lets go of the memory. Twice is the same as once."""
        with self._lock:
            if self._table is not None and self._table[region.slot] == region.serial:
                self._table.clear(region.slot)
            self._reclaim_dropped()

    def _get_table(self) -> _SlotTable:
        """Holds the lock."""
        self._table = self._table or _SlotTable.create()
        return self._table

    def _reclaim_dropped(self) -> None:
        """Give back what was dropped, by whomever. Holds the lock."""
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
        """The address of the region in this process, which holds until the end of the `with`.

        Raises:
            TransferError: it is on another machine, was dropped, or its owner is gone. Also at the end: then what was
                copied may be anything.
        """
        if region.machine != machine_id():
            raise TransferError(
                f"this buffer of {_format_size(region.nbytes)} is in the memory of process {region.pid} on "
                f"another machine, and no engine here offers a transport between machines; send the tensor "
                f"itself as an argument"
            )
        with self._lock:
            for key in [key for key, other in self._owners.items() if other.is_dead()]:
                del self._owners[key]  # who still copies has it, and will see
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
        """Have the owner give the region back. Does not wait for it; nothing happens if that, or the owner, is gone."""
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
    """Names this machine, as far as processes can see each other on it: two containers of one machine are two."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # not Linux: nobody else's memory can be opened here


def create_memory_file(nbytes: int) -> int:
    """A new file in memory, of so many bytes, all 0; its descriptor.

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


_MemoryKey = tuple[int, int, int]  # of memory: its owner's id(), the offset in the file, the bytes


class _PublishedRegion(NamedTuple):
    region: Region
    memory_key: _MemoryKey
    owner: weakref.ref[object]  # tells of its end for as long as this is here


class _SlotTable:
    """A word for each region, in memory that several processes map. A word is written by one instruction."""

    # The first words: others have dropped something, and the owner has not looked yet; how often anyone has.
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
        self._words[self._NUM_DROPS] += 1  # two at once may count as one: it is only compared with what it was
        self._words[self._HAS_UNSEEN_DROPS] = 1

    @property
    def num_drops(self) -> int:
        return self._words[self._NUM_DROPS]

    def pop_unseen_drops(self) -> bool:
        """Whether something was dropped since this was last asked. By the owner."""
        unseen = bool(self._words[self._HAS_UNSEEN_DROPS])
        self._words[self._HAS_UNSEEN_DROPS] = (
            0  # before the owner looks: what is dropped meanwhile is seen now, or sets it again
        )
        return unseen

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class _OwnerProcess:
    """Another process (or this one) that offers regions: its board, whether it lives, and its files mapped here."""

    def __init__(self, table: _SlotTable, pidfd: int) -> None:
        self.table = table
        self._files: dict[str, _SharedFile] = {}  # by name; the one used last is last
        self._num_drops = 0
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._is_dead = False

    @classmethod
    def open(cls, region: Region) -> _OwnerProcess:
        try:
            pidfd = os.pidfd_open(region.pid)
        except OSError as error:
            raise TransferError(_owner_exited_message(region)) from error
        try:
            return cls(_SlotTable(_open_owner_fd(region, region.table_fd, region.table_name), region.table_name), pidfd)
        except BaseException:
            os.close(pidfd)
            raise

    def is_dead(self) -> bool:
        self._is_dead = self._is_dead or bool(self._poll.poll(0))
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
        """What the region is in, mapped."""
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
        """A mapping holds memory that its owner has let go of."""
        if self._num_drops == self.table.num_drops:
            return
        self._num_drops = self.table.num_drops
        for name, file in list(self._files.items()):
            file.regions = {region for region in file.regions if self.table[region.slot] == region.serial}
            if not file.regions:
                del self._files[name]  # who still copies has it

    def __del__(self) -> None:  # the last of those who copy from it may be in any thread
        self.table.close()
        os.close(self._pidfd)


class _SharedFile:
    """A file of another process, whole, mapped here."""

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
            if region.offset < 0 or region.offset + region.nbytes > size:  # touching what is behind the end would kill
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
        with contextlib.suppress(OSError):  # no memory for the tables: then as the copy comes to them
            self._mapped.populate(region.offset, region.offset + region.nbytes, to_write=False)

    def __del__(self) -> None:
        self._mapped.unmap()


def _open_owner_fd(region: Region, fd: int, expected_name: str) -> int:
    """A descriptor of the owner's, opened here, if it still is what it was."""
    try:
        # Non-blocking, for a stranger's descriptor may by now be a pipe.
        opened = os.open(f"/proc/{region.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise TransferError(
            f"this process may not open the memory of process {region.pid} ({error.strerror}); both must run as the "
            f"same user, and neither with capabilities of its own"
        ) from error
    except OSError as error:
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


def _format_size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):,.1f} MiB"
