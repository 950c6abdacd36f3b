"""Memory of one process that others of its machine read from and write to, whenever they like.

Unlike `buffers`, which hands over a copy once, a region stays the owner's live memory: what the owner changes, the next
reader sees, and nobody asks the owner or waits for it. Knows nothing of tensors, pickles or meshes; the owner brings a
file that the memory is a mapping of (a memory file, or shared memory).

- `Regions.offer` gives a `Region`: a few words that say where the memory is. Whoever has them uses `RegionReader`.
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
_AHEAD_BYTES = 16 << 20

_BOARD_BYTES = 8 * (2 + MAX_REGIONS)
# Free slots that are not used again yet: two readers may drop one region at the same moment, and the later one must not
# clear the word of the owner's next. 4 KiB of the board.
_RESTING_SLOTS = 512


class Region(NamedTuple):
    """Where some memory is. Plain data: it may be sent, copied and kept by anyone."""

    machine: str  # of the owner; `machine()`
    pid: int
    board_fd: int  # in the owner
    board_name: str  # what the descriptor must be, lest it be another process's with the same pid
    slot: int  # on the board
    number: int  # what stands there while the memory is offered
    fd: int  # in the owner; of the file
    file_name: str
    offset: int  # in the file
    nbytes: int


class Regions:
    """What this process offers. Thread-safe. A process forked from it offers nothing and keeps nothing of it alive."""

    def __init__(self) -> None:
        self._start()
        os.register_at_fork(after_in_child=self._drop_inherited)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._board: _Board | None = None
        self._offered: dict[int, _Offer] = {}  # by slot
        self._free_slots: deque[int] = deque()  # the one free for longest first
        self._num_offers = 0

    def _drop_inherited(self) -> None:
        offers, board = list(self._offered.values()), self._board
        self._start()
        for offer in offers:
            os.close(offer.fd)
        if board is not None:
            board.close()

    def __len__(self) -> int:
        """How many are offered; those that a reader has dropped are given back first."""
        with self._lock:
            self._sweep()
            return len(self._offered)

    def offer(self, fd: int, offset: int, nbytes: int, keep: object) -> Region:
        """Let others read and write `nbytes` bytes of a file from `offset`.

        Args:
            fd: of the file; the caller may close it afterwards.
            keep: kept alive until the region is dropped: what the memory belongs to.

        Raises:
            TransferError: too many regions, or no descriptors left.
        """
        with self._lock:
            self._sweep()
            try:
                board = self._board = self._board or _Board.create()
                if len(self._offered) == MAX_REGIONS:
                    raise TransferError(
                        f"this process offers {MAX_REGIONS:,} buffers already; drop() those that nobody needs"
                    )
                own_fd = os.dup(fd)
            except OSError as error:
                raise TransferError(f"the memory cannot be shared: {error.strerror}") from error
            self._num_offers += 1
            num_slots = len(self._offered) + len(self._free_slots)
            is_rested = len(self._free_slots) > _RESTING_SLOTS or num_slots == MAX_REGIONS
            slot = self._free_slots.popleft() if is_rested else _Board.FIRST_SLOT + num_slots
            self._offered[slot] = _Offer(own_fd, keep)
            board[slot] = self._num_offers
            file_name = os.readlink(f"/proc/self/fd/{own_fd}")
            return Region(
                machine(), os.getpid(), board.fd, board.name, slot, self._num_offers, own_fd, file_name, offset, nbytes
            )

    def drop(self, region: Region) -> None:
        """Readers get an error from now on, and this process lets go of the memory. Twice is the same as once."""
        with self._lock:
            if self._board is not None and self._board[region.slot] == region.number:
                self._board.clear(region.slot)
            self._sweep()

    def _sweep(self) -> None:
        """Give back what was dropped, by whomever. Holds the lock."""
        board = self._board
        if board is None or not board.take_unseen():
            return
        for slot in [slot for slot in self._offered if board[slot] == 0]:
            os.close(self._offered.pop(slot).fd)
            self._free_slots.append(slot)


class RegionReader:
    """Other processes' regions, mapped here. Thread-safe."""

    def __init__(self) -> None:
        self._start()
        os.register_at_fork(after_in_child=self._start)  # mappings are inherited; the lock may be held for ever

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[tuple[int, str], _Owner] = {}

    @contextlib.contextmanager
    def use(self, region: Region) -> Iterator[int]:
        """The address of the region in this process, which holds until the end of the `with`.

        Raises:
            TransferError: it is on another machine, was dropped, or its owner is gone. Also at the end: then what was
                copied may be anything.
        """
        if region.machine != machine():
            raise TransferError(
                f"this buffer of {_size(region.nbytes)} is in the memory of process {region.pid} on another machine, "
                f"and no engine here offers a transport between machines; send the tensor itself as an argument"
            )
        with self._lock:
            for key in [key for key, other in self._owners.items() if other.is_dead()]:
                del self._owners[key]  # who still copies has it, and will see
            owner = self._owner(region)
            owner.check(region)
            file = owner.file(region)
            file.num_users += 1
        try:
            yield file.address + region.offset
            owner.check(region)
        finally:
            with self._lock:
                file.num_users -= 1

    def drop(self, region: Region) -> None:
        """Have the owner give the region back. Does not wait for it; nothing happens if that, or the owner, is gone."""
        with self._lock:
            try:
                owner = self._owner(region)
                owner.check(region)
            except TransferError:
                return
            owner.board.clear(region.slot)
            owner.forget_dropped()

    def _owner(self, region: Region) -> _Owner:
        key = (region.pid, region.board_name)
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = _Owner.open(region)
        return owner


@functools.cache
def machine() -> str:
    """Names this machine, as far as processes can see each other on it: two containers of one machine are two."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # not Linux: nobody else's memory can be opened here


def memory_file(nbytes: int) -> int:
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
        raise TransferError(f"{_size(nbytes)} of shared memory cannot be had: {error.strerror}") from error
    return fd


# ---------------------------------------------------------------------------------------------------------------------


class _Offer(NamedTuple):
    fd: int
    keep: object


class _Board:
    """A word for each region, in memory that several processes map. A word is written by one instruction."""

    # The first words: others have dropped something, and the owner has not looked yet; how often anyone has.
    _UNSEEN, _NUM_DROPS = 0, 1
    FIRST_SLOT = 2

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self._map = mmap.mmap(fd, _BOARD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> _Board:
        fd = memory_file(_BOARD_BYTES)
        return cls(fd, os.readlink(f"/proc/self/fd/{fd}"))

    def __getitem__(self, slot: int) -> int:
        return self._words[slot]

    def __setitem__(self, slot: int, number: int) -> None:
        self._words[slot] = number

    def clear(self, slot: int) -> None:
        self._words[slot] = 0
        self._words[self._NUM_DROPS] += 1  # two at once may count as one: it is only compared with what it was
        self._words[self._UNSEEN] = 1

    @property
    def num_drops(self) -> int:
        return self._words[self._NUM_DROPS]

    def take_unseen(self) -> bool:
        """Whether something was dropped since this was last asked. By the owner."""
        unseen = bool(self._words[self._UNSEEN])
        self._words[self._UNSEEN] = 0  # before the owner looks: what is dropped meanwhile is seen now, or sets it again
        return unseen

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class _Owner:
    """Another process (or this one) that offers regions: its board, whether it lives, and its files mapped here."""

    def __init__(self, board: _Board, pidfd: int) -> None:
        self.board = board
        self._files: dict[str, _SharedFile] = {}  # by name; the one used last is last
        self._num_drops = 0
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._dead = False

    @classmethod
    def open(cls, region: Region) -> _Owner:
        try:
            pidfd = os.pidfd_open(region.pid)
        except OSError as error:
            raise TransferError(_gone(region)) from error
        try:
            return cls(_Board(_open(region, region.board_fd, region.board_name), region.board_name), pidfd)
        except BaseException:
            os.close(pidfd)
            raise

    def is_dead(self) -> bool:
        self._dead = self._dead or bool(self._poll.poll(0))
        return self._dead

    def check(self, region: Region) -> None:
        if self.is_dead():
            raise TransferError(_gone(region))
        if self.board[region.slot] != region.number:
            raise TransferError(
                f"this buffer of {_size(region.nbytes)} was dropped, by its owner (process {region.pid}) or by another "
                f"reader; the owner has to make a new one"
            )

    def file(self, region: Region) -> _SharedFile:
        """What the region is in, mapped."""
        self.forget_dropped()
        file = self._files.pop(region.file_name, None) or _SharedFile.open(region)
        if region not in file.regions:
            file.regions.add(region)
            if region.nbytes >= _AHEAD_BYTES:
                threading.Thread(target=file.populate, args=(region,), name="meshbook-pages", daemon=True).start()
        idle = [name for name, other in self._files.items() if other.num_users == 0]
        for name in idle[: max(0, len(self._files) + 1 - MAX_MAPPED_FILES)]:
            del self._files[name]
        self._files[region.file_name] = file
        return file

    def forget_dropped(self) -> None:
        """A mapping holds memory that its owner has let go of."""
        if self._num_drops == self.board.num_drops:
            return
        self._num_drops = self.board.num_drops
        for name, file in list(self._files.items()):
            file.regions = {region for region in file.regions if self.board[region.slot] == region.number}
            if not file.regions:
                del self._files[name]  # who still copies has it

    def __del__(self) -> None:  # the last of those who copy from it may be in any thread
        self.board.close()
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
        fd = _open(region, region.fd, region.file_name)
        try:
            size = os.fstat(fd).st_size
            if region.offset < 0 or region.offset + region.nbytes > size:  # touching what is behind the end would kill
                raise TransferError(
                    f"not a buffer: {region.nbytes} bytes from {region.offset} of a file of {size} bytes"
                )
            return cls(MappedFile.of(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED))
        except OSError as error:
            raise TransferError(
                f"the {_size(region.nbytes)} of this buffer, of process {region.pid}, cannot be mapped here: "
                f"{error.strerror}"
            ) from error
        finally:
            os.close(fd)

    def populate(self, region: Region) -> None:
        with contextlib.suppress(OSError):  # no memory for the tables: then as the copy comes to them
            self._mapped.populate(region.offset, region.offset + region.nbytes, to_write=False)

    def __del__(self) -> None:
        self._mapped.unmap()


def _open(region: Region, fd: int, name: str) -> int:
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
            raise TransferError(_gone(region)) from error
        raise TransferError(
            f"process {region.pid} no longer has the {_size(region.nbytes)} of this buffer: it was dropped"
        ) from error
    if os.readlink(f"/proc/self/fd/{opened}") == name:
        return opened
    os.close(opened)
    raise TransferError(_gone(region))


def _gone(region: Region) -> str:
    return (
        f"process {region.pid}, whose memory this buffer of {_size(region.nbytes)} is, has ended; what was in it is "
        f"lost, unless somebody read it before"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):,.1f} MiB"
