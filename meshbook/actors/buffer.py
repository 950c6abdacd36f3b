"""Bulk data between actors: a tensor stays in its owner's memory, and other processes copy from it and into it.

The owner creates a `Buffer` of a tensor and sends it to other actors; as a message it has a few bytes. A reader's
`read_into` is one copy out of the owner's live memory, without any work of its actors. This works because

- a CPU tensor's storage is moved into shared memory when the first `Buffer` of it is created. All tensors and
  parameters that share the storage move with it. Arrays and pointers taken earlier (`t.numpy()`, DLPack) do not: they
  retain the storage's original memory, which is freed together with the storage;
- a CUDA tensor is read on the same machine through CUDA IPC;
- on another machine a thread of the owner's process reads or writes for the reader, beside what its actors do.

The memory belongs to the owner: a buffer of it can be read until `drop`, and as long as the owner holds the tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Any

from meshbook.actors.memory import cuda
from meshbook.actors.memory.local import Layout, LocalMemory, bytes_at, check_tensor
from meshbook.actors.memory.sharing import publish_shared, published, reader
from meshbook.actors.mesh import ActorMesh, process_mesh
from meshbook.actors.runtime.faults import ActorError, SupervisionError
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.transport import has_local_transport, local_transport
from meshbook.errors import MeshTimeout, TransferError
from meshbook.wire.messages import NodeAddress
from meshbook.wire.regions import Region, create_memory_file, machine_id

if TYPE_CHECKING:
    import torch

# Up to this size a copy takes less time (some 50 us) than a round trip to another thread.
INLINE_BYTES = 256 << 10
_DROP_TIMEOUT_S = 60.0  # on another machine
# A copy from or to another machine: the bytes of a part, and how many are on their way.
_PART_BYTES = 4 << 20
_MAX_OPEN_PARTS = 4


class Buffer:
    """A tensor's memory that other processes read and write without work of its owner's actors.

        class Trainer(Actor):
            @endpoint
            def weights(self) -> Buffer:
                return Buffer(self.model.fc.weight)     # 1 GB: moved to shared memory once, some bytes from then on

        class Generator(Actor):
            @endpoint
            async def sync(self, weights: Buffer) -> None:
                await weights.read_into(self.model.fc.weight.data)

    Access is one-sided: it reads the current content, even in the middle of the owner's `optimizer.step()`. The program
    decides by messages when to read: after an owner's answer, message or cell a copy has what the owner had enqueued on
    its GPU until then, on the stream that was current.

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
        check_tensor(tensor, "a Buffer is made of")
        self._layout = Layout(str(tensor.dtype), tuple(tensor.shape), tensor.numel() * tensor.element_size())
        if tensor.device.type == "cuda":
            self._region: Region | cuda.CudaRegion = cuda.publish_cuda(tensor)
        elif tensor.device.type == "cpu":
            self._region = publish_shared(tensor, self._layout.nbytes)
        else:
            raise TransferError(f"a Buffer is made of a CPU or CUDA tensor, and this one is on {tensor.device}")
        # keeps the storage of a temporary tensor alive as long as this object
        self._storage: Any = tensor.untyped_storage()
        self._owner: NodeAddress | None = None  # known where it has been sent to

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
        """How the memory is read: "shared memory", "cuda ipc", or by "messages" to its owner's machine."""
        if self._is_elsewhere:
            return "messages"
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
            timeout: seconds that the owner has to answer, if it is on another machine, for each part of some MiB; on
                the same machine a copy waits for no other process.

        Raises:
            TransferError: at once, if `dst` does not fit. From the future: the buffer was dropped, its owner has
                exited, or does not answer.
        """
        memory = LocalMemory.of(dst, self._layout, writable=True, offset=offset, verb="read")
        return self._start(memory, reading=True, timeout_s=timeout)

    def write_from(self, src: Any, *, offset: int | None = None, timeout: float = 60) -> Future[None]:
        """Copy `src` into the buffer, from its start or from byte `offset` on.

        The counterpart of `read_into`; `src` may be shorter than the buffer.
        """
        memory = LocalMemory.of(src, self._layout, writable=False, offset=offset, verb="write")
        return self._start(memory, reading=False, timeout_s=timeout)

    def drop(self) -> Future[None]:
        """Invalidate the buffer for all processes and release the shared region.

        Any process that holds the buffer may drop it; a second drop has no effect.
        """
        self._storage = None
        if self._is_elsewhere:
            return self._drop_elsewhere()
        if isinstance(self._region, Region):
            if self._region.pid == os.getpid():
                published.drop(self._region)
            else:
                reader.drop(self._region)
        else:
            cuda.drop_cuda(self._region)
        return Future.of(None)

    @property
    def _is_elsewhere(self) -> bool:
        region = self._region if isinstance(self._region, Region) else self._region.marker
        return region.machine != machine_id()

    def _start(self, memory: LocalMemory, *, reading: bool, timeout_s: float) -> Future[None]:
        after = cuda.enqueued_for(memory)  # by this thread, which may not be the one that copies
        if self._is_elsewhere:
            return _start_copy(lambda: self._copy_elsewhere(memory, after, reading=reading, timeout_s=timeout_s))
        inline = memory.nbytes <= INLINE_BYTES
        return _start_copy(lambda: self._copy(memory, after, reading=reading), inline=inline)

    def _copy(self, memory: LocalMemory, after: Any, *, reading: bool) -> None:
        if not isinstance(self._region, Region):
            cuda.copy_cuda(self._region, memory, after, reading=reading)
            return
        with reader.map_region(self._region) as address:
            address += memory.offset
            if memory.address is not None:
                ends = (memory.address, address) if reading else (address, memory.address)
                ctypes.memmove(*ends, memory.nbytes)  # releases the GIL
                return
            shared = bytes_at(address, memory.nbytes)
            if after is None:
                memory.copy(shared, reading=reading)
            else:
                cuda.copy_to_device(memory, shared, after, reading=reading)

    def _copy_elsewhere(self, memory: LocalMemory, after: Any, *, reading: bool, timeout_s: float) -> None:
        """Copy from or to another machine: in parts, some at a time, which threads of the owner read and write."""
        process, region, layout = self._owner_process(), self._region, self._layout
        if memory.address is None:  # on a GPU of this machine: by way of the CPU
            import torch

            here = torch.empty(memory.nbytes, dtype=torch.uint8)
            if not reading:
                cuda.copy_to_device(memory, here, after, reading=False)
        else:
            here = bytes_at(memory.address, memory.nbytes)
        view: Any = memoryview(here.numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12
        parts: deque[tuple[slice, Future[Any]]] = deque()

        def finish_first() -> None:
            part, future = parts.popleft()
            answer = future.get(timeout_s)
            if reading:
                view[part] = answer

        try:
            for at in range(0, memory.nbytes, _PART_BYTES):
                part = slice(at, min(at + _PART_BYTES, memory.nbytes))
                place = region, layout, memory.offset + at
                if reading:
                    parts.append((part, process._run(_read_part, *place, part.stop - at)))
                else:
                    parts.append((part, process._run(_write_part, *place, bytes(view[part]))))
                if len(parts) == _MAX_OPEN_PARTS:
                    finish_first()
            while parts:
                finish_first()
        except SupervisionError as error:
            raise TransferError(f"this buffer of {memory.nbytes:,} bytes cannot be copied: {error}") from None
        except ActorError as error:
            raise (error.exception if isinstance(error.exception, TransferError) else error) from None
        except MeshTimeout:
            raise TransferError(
                f"{self.owner} on another machine, whose memory this buffer of {memory.nbytes:,} bytes is, has not "
                f"answered within {timeout_s:.0f} s; read_into(…, timeout=) waits longer"
            ) from None
        if memory.address is None and reading:
            cuda.copy_to_device(memory, here, after, reading=True)

    def _drop_elsewhere(self) -> Future[None]:
        process, region, layout = self._owner_process(), self._region, self._layout

        def drop() -> None:
            with contextlib.suppress(SupervisionError):  # with its owner the memory is gone
                process._run(_drop, region, layout).get(_DROP_TIMEOUT_S)

        return _start_copy(drop)

    def _owner_process(self) -> ActorMesh[Any]:
        if self._owner is None:
            raise TransferError(
                f"this buffer of {self.nbytes:,} bytes is in the memory of {self.owner} on another machine, and did "
                "not come by a message between actors; return it from an endpoint, or pass it to one"
            )
        return process_mesh(self.owner, (self._owner,))

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self._region, Region):
            cuda.record_enqueued()  # it may also leave by other ways than a message between actors
        is_own = not self._is_elsewhere and self._owner is None and has_local_transport()
        return _rebuild_buffer, (self._region, self._layout, local_transport().address if is_own else self._owner)

    def __repr__(self) -> str:
        what = f"{list(self._layout.shape)}, {self._layout.dtype}, {self._layout.nbytes:,} bytes"
        return f"Buffer({what}, {self.backend} of {self.owner})"


RDMABuffer = Buffer  # Monarch's name


def _rebuild_buffer(region: Region | cuda.CudaRegion, layout: Layout, owner: NodeAddress | None = None) -> Buffer:
    buffer = object.__new__(Buffer)
    buffer._region = region
    buffer._layout = layout
    buffer._storage = None
    buffer._owner = owner
    return buffer


# What a thread of the owner's process does for one on another machine.


def _read_part(region: Region | cuda.CudaRegion, layout: Layout, offset: int, nbytes: int) -> bytearray:
    part = bytearray(nbytes)
    buffer = _rebuild_buffer(region, layout)
    buffer._copy(LocalMemory.of(part, layout, writable=True, offset=offset, verb="read"), None, reading=True)
    return part


def _write_part(region: Region | cuda.CudaRegion, layout: Layout, offset: int, part: bytes) -> None:
    buffer = _rebuild_buffer(region, layout)
    buffer._copy(LocalMemory.of(part, layout, writable=False, offset=offset, verb="write"), None, reading=False)


def _drop(region: Region | cuda.CudaRegion, layout: Layout) -> None:
    _rebuild_buffer(region, layout).drop()


# ---------------------------------------------------------------------------------------------------------------------
# Copies, inline or on background threads


_copy_executor: ThreadPoolExecutor | None = None
_copy_executor_lock = threading.Lock()


def _start_copy(copy: Callable[[], None], *, inline: bool = False) -> Future[None]:
    """Start a copy and return its future.

    An inline one is done on return; others run on a thread, so that an event loop is not blocked.
    """
    future: Future[None] = Future("the copy")

    def work() -> None:
        try:
            copy()
        except Exception as error:
            future.fail(error)
        else:
            future.resolve(lambda: None)

    if inline:
        work()
    else:
        _get_copy_executor().submit(work)
    return future


def _get_copy_executor() -> ThreadPoolExecutor:
    global _copy_executor
    with _copy_executor_lock:
        if _copy_executor is None:
            # Two: memory bandwidth limits a copy, not the CPU.
            _copy_executor = ThreadPoolExecutor(2, thread_name_prefix="meshbook-copy")
        return _copy_executor


def _reset_after_fork() -> None:
    """In a forked child: threads do not survive a fork, and an inherited lock may be held forever."""
    global _copy_executor, _copy_executor_lock
    _copy_executor, _copy_executor_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
