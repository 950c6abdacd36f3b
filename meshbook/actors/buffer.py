"""Bulk data between actors: a tensor stays in its owner's memory, and other processes copy from it and into it.

The owner creates a `Buffer` of a tensor and sends it to other actors; as a message it has a few bytes. A reader's
`read_into` is one copy out of the owner's live memory, without any work of the owner. This works because

- a CPU tensor's storage is moved into shared memory when the first `Buffer` of it is created. All tensors and
  parameters that share the storage move with it. Arrays and pointers taken earlier (`t.numpy()`, DLPack) do not: they
  retain the storage's original memory, which is freed together with the storage;
- a CUDA tensor is read on the same machine through CUDA IPC;
- between machines there is no transport yet: the future of `read_into` raises an error.

The memory belongs to the owner: a buffer of it can be read until `drop`, and as long as the owner holds the tensor.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from meshbook.actors.runtime.futures import Future
from meshbook.errors import TransferError
from meshbook.wire.regions import Region, RegionPublisher, RegionReader, create_memory_file

if TYPE_CHECKING:
    import torch

# Up to this size a copy takes less time (some 50 us) than a round trip to another thread.
INLINE_BYTES = 256 << 10


class Buffer:
    """A tensor's memory that other processes of this machine read and write without work of its owner.

        class Trainer(Actor):
            @endpoint
            def weights(self) -> Buffer:
                return Buffer(self.model.fc.weight)     # 1 GB: moved to shared memory once, some bytes from then on

        class Generator(Actor):
            @endpoint
            async def sync(self, weights: Buffer) -> None:
                await weights.read_into(self.model.fc.weight.data)

    Access is one-sided: it reads the current content, even in the middle of the owner's `optimizer.step()`. The program
    decides by messages when to read.

    The buffer can be read as long as its owner holds the tensor or this object. It costs one file descriptor per
    storage, however many buffers of that storage exist.

    Args:
        tensor: contiguous, not empty, on the CPU or a CUDA device. Views are fine: their complete storage is moved,
            unless it is in shared memory already (`Buffer.empty`, `share_memory_()`). A moved storage also retains its
            original memory, because an array or a pointer may still refer to it.

    Raises:
        TransferError: the tensor is not contiguous, is empty, or is of a kind without memory of its own; its memory is
            not torch's (`torch.from_numpy`, a mapped file); or there is not enough shared memory or no file descriptor
            left.

    Warns:
        UserWarning: the storage was moved, and a numpy array was created from it earlier.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        _check_tensor(tensor, "a Buffer is made of")
        self._layout = _Layout(str(tensor.dtype), tuple(tensor.shape), tensor.numel() * tensor.element_size())
        if tensor.device.type == "cuda":
            self._region: Region | _CudaRegion = _publish_cuda(tensor)
        elif tensor.device.type == "cpu":
            self._region = _publish_shared(tensor, self._layout.nbytes)
        else:
            raise TransferError(f"a Buffer is made of a CPU or CUDA tensor, and this one is on {tensor.device}")
        # keeps the storage of a temporary tensor alive as long as this object
        self._storage: Any = tensor.untyped_storage()

    @staticmethod
    def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized CPU tensor in shared memory, like `torch.empty`.

        A `Buffer` of it, or of a part of it, moves nothing. Its size is not limited by /dev/shm.

        Raises:
            TransferError: there is not enough memory.
        """
        import torch

        dtype = dtype or torch.get_default_dtype()
        nbytes = prod(shape) * dtype.itemsize
        fd = create_memory_file(max(nbytes, 1))
        try:
            new_storage: Any = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # not in its stubs
            storage = new_storage(fd, max(nbytes, 1))  # duplicates the descriptor
        finally:
            os.close(fd)
        return torch.empty(0, dtype=torch.uint8).set_(storage)[:nbytes].view(dtype).view(shape)

    # ---------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def size(self) -> int:
        """Return the number of bytes. Monarch's name for `nbytes`."""
        return self._layout.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layout.shape

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self._layout.dtype.removeprefix("torch."))  # type: ignore[no-any-return]

    @property
    def backend(self) -> str:
        """How the memory is read: "shared memory" or "cuda ipc"."""
        return "shared memory" if isinstance(self._region, Region) else "cuda ipc"

    @property
    def owner(self) -> str:
        """The process that owns the memory."""
        return f"process {self._region.pid}"

    # ---------------------------------------------------------------------------------------------

    def read_into(self, dst: Any, *, offset: int | None = None, timeout: float = 60) -> Future[None]:
        """Copy from the buffer into `dst`: `buffer.read_into(t).get()`, or `await` it. The owner does no work.

        Args:
            dst: a contiguous tensor (CPU or CUDA) of the buffer's dtype, or of uint8 for its bytes; or any writable
                object with the buffer protocol (bytearray, numpy array). Its size must fit, its shape does not matter.
            offset: number of bytes of the buffer to skip. `dst` is then filled; without it, the complete buffer is read
                and `dst` may be longer.
            timeout: accepted for compatibility with Monarch: a copy waits for no other process.

        Raises:
            TransferError: at once, if `dst` does not fit. From the future: the buffer was dropped, its owner has
                exited, or it is on another machine.
        """
        memory = _LocalMemory.of(dst, self._layout, writable=True, offset=offset, verb="read")
        return _start_copy(memory.nbytes, lambda: self._copy(memory, reading=True))

    def write_from(self, src: Any, *, offset: int | None = None, timeout: float = 60) -> Future[None]:
        """Copy `src` into the buffer, from its start or from byte `offset` on.

        The counterpart of `read_into`; `src` may be shorter than the buffer.
        """
        memory = _LocalMemory.of(src, self._layout, writable=False, offset=offset, verb="write")
        return _start_copy(memory.nbytes, lambda: self._copy(memory, reading=False))

    def drop(self) -> Future[None]:
        """Invalidate the buffer for all processes and release the shared region.

        Any process that holds the buffer may drop it; a second drop has no effect.
        """
        self._storage = None
        if isinstance(self._region, Region):
            if self._region.pid == os.getpid():
                _published.drop(self._region)
            else:
                _reader.drop(self._region)
        else:
            _drop_cuda(self._region)
        return Future.of(None)

    def _copy(self, memory: _LocalMemory, *, reading: bool) -> None:
        if not isinstance(self._region, Region):
            try:
                _copy_cuda(self._region, memory, reading=reading)
            except TransferError:
                # dropped, or its owner has exited: unmap it
                _opened_cuda_storages.pop(self._region.marker, None)
                raise
            return
        with _reader.map_region(self._region) as address:
            address += memory.offset
            if memory.address is not None:
                ends = (memory.address, address) if reading else (address, memory.address)
                ctypes.memmove(*ends, memory.nbytes)  # releases the GIL
                return
            import torch

            remote_bytes = torch.frombuffer((ctypes.c_ubyte * memory.nbytes).from_address(address), dtype=torch.uint8)
            local_bytes = memory.as_bytes()
            (local_bytes if reading else remote_bytes).copy_(remote_bytes if reading else local_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_buffer, (self._region, self._layout)

    def __repr__(self) -> str:
        what = f"{list(self._layout.shape)}, {self._layout.dtype}, {self._layout.nbytes:,} bytes"
        return f"Buffer({what}, {self.backend} of {self.owner})"


RDMABuffer = Buffer  # Monarch's name


def _rebuild_buffer(region: Region | _CudaRegion, layout: _Layout) -> Buffer:
    buffer = object.__new__(Buffer)
    buffer._region = region
    buffer._layout = layout
    buffer._storage = None
    return buffer


# Published and mapped regions belong to the process, like its descriptors and its address space: actors of several
# meshes in one process share them.
_published = RegionPublisher()
_reader = RegionReader()


class _Layout(NamedTuple):
    dtype: str  # "torch.float32"
    shape: tuple[int, ...]
    nbytes: int


class _LocalMemory(NamedTuple):
    """The local source or target of a copy, and the part of the buffer that it corresponds to."""

    keep_alive: Any  # owner of the memory, kept alive during the copy
    address: int | None  # None: not on the CPU
    nbytes: int  # to copy
    offset: int  # in the buffer

    @staticmethod
    def of(thing: Any, layout: _Layout, *, writable: bool, offset: int | None, verb: str) -> _LocalMemory:
        """Describe the memory of a tensor or buffer-protocol object for a copy.

        Raises:
            TransferError: it does not fit; the message says why.
        """
        preposition = "into" if writable else "from"
        if _is_tensor(thing):
            _check_tensor(thing, f"a buffer is {verb if verb == 'read' else 'written'} {preposition}")
            if str(thing.dtype) != layout.dtype and "torch.uint8" not in (str(thing.dtype), layout.dtype):
                raise TransferError(
                    f"the buffer has {layout.dtype} and this tensor {thing.dtype}; bytes are copied as they are, so "
                    f"give a tensor of {layout.dtype}, or .view(torch.uint8) for the bare bytes"
                )
            local_nbytes = thing.numel() * thing.element_size()
            address = thing.data_ptr() if thing.device.type == "cpu" else None
            keep_alive = thing
        else:
            keep_alive, address, local_nbytes = _buffer_protocol_memory(thing, writable)
        start = offset or 0
        available = layout.nbytes - start
        if start < 0 or available < 0:
            raise TransferError(f"offset {start:,} is outside this buffer of {layout.nbytes:,} bytes")
        nbytes = available if writable and offset is None else local_nbytes
        if nbytes > (local_nbytes if writable and offset is None else available):
            raise TransferError(
                f"the buffer has {layout.nbytes:,} bytes{f', {available:,} from offset {start:,} on' if start else ''} "
                f"({layout.dtype}, {list(layout.shape)}), and what it is {verb if verb == 'read' else 'written'} "
                f"{preposition} has {local_nbytes:,}"
            )
        return _LocalMemory(keep_alive, address, nbytes, start)

    def as_bytes(self) -> torch.Tensor:
        import torch

        flat: torch.Tensor = self.keep_alive.detach().view(-1).view(torch.uint8)
        return flat[: self.nbytes]


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "untyped_storage") and hasattr(thing, "is_contiguous")


def _check_tensor(tensor: Any, use: str) -> None:
    """Check that a tensor has memory that can be copied as one block.

    Raises:
        TransferError: it is not a plain tensor, not contiguous, or empty.
    """
    if not _is_tensor(tensor):
        raise TransferError(
            f"{use} a tensor, and this is a {type(tensor).__name__}; torch.as_tensor(...) makes one of an array"
        )
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise TransferError(
            f"{use} a plain tensor, and this is a {type(tensor).__name__} ({tensor.layout}); "
            f"of a DTensor give .to_local(), of a sparse tensor its values and indices"
        )
    if not tensor.is_contiguous():
        raise TransferError(
            f"{use} a contiguous tensor, and this one has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}; .contiguous() makes a copy that is"
        )
    if tensor.numel() == 0:
        raise TransferError(f"{use} a tensor that has elements, and this one has shape {list(tensor.shape)}")


def _buffer_protocol_memory(thing: Any, writable: bool) -> tuple[Any, int, int]:
    """Return an owner to keep alive, the address, and the bytes of an object with the buffer protocol."""
    try:
        view = memoryview(thing)
    except TypeError:
        raise TransferError(
            f"a tensor, or something with the buffer protocol (bytearray, numpy array), is needed here, not a "
            f"{type(thing).__name__}"
        ) from None
    if not view.c_contiguous:
        raise TransferError(f"a contiguous {type(thing).__name__} is needed here; copy it")
    if view.readonly and writable:
        raise TransferError(f"this {type(thing).__name__} is read-only; give a bytearray, a writable array or a tensor")
    if view.readonly:  # ctypes takes the address of writable memory only
        import numpy as np

        array = np.frombuffer(view, dtype=np.uint8)
        return array, int(array.ctypes.data), view.nbytes
    first = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
    return first, ctypes.addressof(first), view.nbytes


# ---------------------------------------------------------------------------------------------------------------------
# Copies, inline or on background threads


_copy_executor: ThreadPoolExecutor | None = None
_copy_executor_lock = threading.Lock()
# held while a storage moves into shared memory: two threads may move the same one at the same time
_move_lock = threading.Lock()


def _start_copy(nbytes: int, copy: Callable[[], None]) -> Future[None]:
    """Start a copy and return its future.

    A copy of up to `INLINE_BYTES` is done on return; larger ones run on a thread, so that an event loop is not blocked.
    """
    future: Future[None] = Future("the copy")

    def work() -> None:
        try:
            copy()
        except Exception as error:
            future.fail(error)
        else:
            future.resolve(lambda: None)

    if nbytes > INLINE_BYTES:
        _get_copy_executor().submit(work)
    else:
        work()
    return future


def _get_copy_executor() -> ThreadPoolExecutor:
    global _copy_executor
    with _copy_executor_lock:
        if _copy_executor is None:
            # Two: memory bandwidth limits a copy, not the CPU.
            _copy_executor = ThreadPoolExecutor(2, thread_name_prefix="meshbook-copy")
        return _copy_executor


def _reset_after_fork() -> None:
    """In a forked child: reset the executor and the locks.

    Threads do not survive a fork, and an inherited lock may be held forever.
    """
    global _copy_executor, _copy_executor_lock, _move_lock
    _copy_executor, _copy_executor_lock, _move_lock = None, threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


# ---------------------------------------------------------------------------------------------------------------------
# Shared memory


def _publish_shared(tensor: torch.Tensor, nbytes: int) -> Region:
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
    return _published.publish(fd, int(tensor.storage_offset()) * tensor.element_size(), nbytes, storage)


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


# ---------------------------------------------------------------------------------------------------------------------
# CUDA IPC


class _CudaRegion(NamedTuple):
    """The location of a CUDA tensor's memory, as `UntypedStorage._share_cuda_` describes it.

    `marker` is a region of one byte in the owner's slot table that shows whether the memory is still published.
    """

    pid: int
    marker: Region
    handle: tuple[Any, ...]
    offset: int  # bytes in the storage


_opened_cuda_storages: dict[Region, Any] = {}  # storages of other processes, mapped here


def _publish_cuda(tensor: torch.Tensor) -> _CudaRegion:
    storage = tensor.untyped_storage()
    handle = storage._share_cuda_()  # type: ignore[no-untyped-call]
    marker = _published.publish_token(storage)
    return _CudaRegion(os.getpid(), marker, tuple(handle), int(tensor.storage_offset()) * tensor.element_size())


def _copy_cuda(region: _CudaRegion, memory: _LocalMemory, *, reading: bool) -> None:
    import torch

    with _reader.map_region(region.marker):
        if region.pid == os.getpid():
            raise TransferError("this buffer is this process's own CUDA memory: copy from the tensor it was made of")
        storage = _opened_cuda_storages.get(region.marker)
        if storage is None:
            storage = torch.UntypedStorage._new_shared_cuda(*region.handle)
            _opened_cuda_storages[region.marker] = storage
        start = region.offset + memory.offset
        remote_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[
            start : start + memory.nbytes
        ]
        if memory.address is None:
            local_bytes = memory.as_bytes()
        else:
            local_bytes = torch.frombuffer(
                (ctypes.c_ubyte * memory.nbytes).from_address(memory.address), dtype=torch.uint8
            )
        (local_bytes if reading else remote_bytes).copy_(remote_bytes if reading else local_bytes)
        torch.cuda.synchronize(storage.device)  # the future resolves only after the bytes have arrived


def _drop_cuda(region: _CudaRegion) -> None:
    _opened_cuda_storages.pop(region.marker, None)
    if region.pid == os.getpid():
        _published.drop(region.marker)
    else:
        _reader.drop(region.marker)
