"""Anonymous memory files of Linux, and mappings of them that are freed by hand.

The constants are those that `mmap` and `os` lack, or whose wrappers cannot map at an address or without retaining a
descriptor. This module knows nothing of segments.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from dataclasses import dataclass

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# Linux constants that `mmap` and `os` lack, or whose wrappers cannot map at an address or without retaining a
# descriptor.
PROT_READ, PROT_WRITE = 0x1, 0x2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value
MADV_HUGEPAGE = 14
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # since Linux 5.14
MADV_COLLAPSE = 25  # since Linux 6.1
MFD_NOEXEC_SEAL = 0x8  # since Linux 6.3; sealing allowed, and required where vm.memfd_noexec=2


def copy_to_fresh_pages(target: memoryview, source: memoryview) -> None:
    """Copy to untouched memory. Large targets get huge pages, which takes a third of the time."""
    import numpy as np  # its copies release the GIL

    destination = np.frombuffer(target, np.uint8)
    if destination.nbytes >= 2 * HUGE_PAGE_BYTES:
        first, last = (
            round_up(destination.ctypes.data, PAGE_BYTES),
            (destination.ctypes.data + destination.nbytes) // PAGE_BYTES * PAGE_BYTES,
        )
        load_libc().madvise(first, last - first, MADV_HUGEPAGE)
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
        libc = load_libc()
        slack = HUGE_PAGE_BYTES if length >= HUGE_PAGE_BYTES else 0
        reserved = round_up(length, PAGE_BYTES) + slack
        base = libc.mmap(None, reserved, 0, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if base == MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address = round_up(base, HUGE_PAGE_BYTES) if slack else base
        if libc.mmap(address, length, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED:
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
        advice = MADV_POPULATE_WRITE if to_write else MADV_POPULATE_READ
        if load_libc().madvise(first, last - first, advice) and ctypes.get_errno() != errno.EINVAL:
            # EINVAL: this kernel does not support it
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unmap(self) -> None:
        load_libc().munmap(self.base, self.reserved)


@functools.cache
def load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_int64], pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def keep_freed_memory() -> None:
    """Have this process keep up to 64 MiB that it frees, so that pieces of 1 MiB do not get fresh pages each time.

    Those cost more than to copy what is in them. Does nothing with another allocator than that of glibc.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h; without the second each such piece is mapped by itself
    with contextlib.suppress(AttributeError):
        load_libc().mallopt(trim_threshold, 64 << 20)
        load_libc().mallopt(mmap_threshold, 32 << 20)


def create_memory_file(name: str) -> int:
    """Create an anonymous memory file that can be sealed."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without the flag
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def has_memory_files() -> bool:
    """Whether this process can create such a file and open it by its path."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        fd = create_memory_file("meshbook-probe")
    except OSError:
        return False
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def write_at(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:  # the kernel writes at most 2 GiB per call
        done += os.pwrite(fd, view[done:], offset + done)


def flatten(buffer: memoryview) -> memoryview:
    """Return the same bytes as a one-dimensional view."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
