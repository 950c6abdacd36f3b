"""Share CPU tensors' memory: move their storages into shared memory, once, and publish them to other processes."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

from meshbook.errors import TransferError
from meshbook.wire.regions import Region, RegionPublisher, RegionReader

if TYPE_CHECKING:
    import torch

# Published and mapped regions belong to the process, like its descriptors and its address space: actors of several
# meshes in one process share them.
published = RegionPublisher()
reader = RegionReader()

# held while a storage moves into shared memory: two threads may move the same one at the same time
_move_lock = threading.Lock()


def _reset_after_fork() -> None:
    """In a forked child: threads do not survive a fork, and an inherited lock may be held forever."""
    global _move_lock
    _move_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def publish_shared(tensor: torch.Tensor, nbytes: int) -> Region:
    storage = tensor.untyped_storage()
    with _move_lock:
        if not storage.is_shared():
            _move_to_shared_memory(storage)
    fd, _ = _share_storage(storage)
    if fd < 0:
        raise TransferError(
            "the memory of this tensor is a mapped file that is not open for others; Buffer(tensor.clone()), or copy "
            "it into a tensor made by Buffer.empty(...)"
        )
    return published.publish(fd, int(tensor.storage_offset()) * tensor.element_size(), nbytes, storage)


def _share_storage(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the file descriptor, owned by the storage, of the file that it maps, and its size.

    Moves the storage into shared memory, in place, if it is not there yet. Independent of the sharing strategy that is
    set for torch's own queues.
    """
    try:
        fd_and_size: tuple[int, int] = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise TransferError(
            f"the {storage.nbytes():,} bytes of this tensor's storage cannot be moved into shared memory: {error}"
        ) from error
    return fd_and_size


def _move_to_shared_memory(storage: torch.UntypedStorage) -> None:
    """Move a storage into shared memory.

    Its original memory is retained as long as the storage lives: a numpy array, a DLPack capsule or a kernel on another
    thread may still use it.
    """
    import torch

    _check_shm_space(storage.nbytes())
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    try:
        # copy-on-write: shares the memory until one of the two is written or, as here, moved
        original = torch._lazy_clone(flat)
    except RuntimeError as error:
        raise TransferError(
            "the memory of this tensor is not torch's own (torch.from_numpy, torch.frombuffer, a mapped file), and "
            "cannot be moved into shared memory without leaving its owner behind; Buffer(tensor.clone()), or copy it "
            "into a tensor made by Buffer.empty(...)"
        ) from error
    has_array = not storage.resizable()  # torch marks it so when .numpy() is called
    _share_storage(storage)
    weakref.finalize(storage, _release_original, original).atexit = False
    if has_array:
        warnings.warn(
            f"the {storage.nbytes():,} bytes of this tensor's storage were moved into shared memory, and a numpy array "
            f"made of it before does not go along: it keeps the numbers of this moment. Call .numpy() again, or make "
            f"the tensor by Buffer.empty(...), which is never moved",
            stacklevel=5,
        )


def _release_original(original: torch.Tensor) -> None:
    """Drop the last reference to the original memory, which is the argument."""


def _check_shm_space(nbytes: int) -> None:
    """Check that /dev/shm has enough free space.

    Raises:
        TransferError: /dev/shm is too small. Writing past its end would kill this process.
    """
    try:
        filesystem = os.statvfs("/dev/shm")
    except OSError:
        return
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < nbytes:
        raise TransferError(
            f"this tensor's storage has {nbytes:,} bytes, and /dev/shm has {free:,} free; make it larger (docker run "
            f"--shm-size), or make the tensor by Buffer.empty(...), which does not need it"
        )
