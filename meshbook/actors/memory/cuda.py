"""Read and write CUDA tensors of other processes of this machine, by CUDA IPC.

A message may arrive before the kernels that its sender had enqueued have run. So an owner records an event of its
device with each message that it sends and at the end of each call of its rank, and a copy waits for it on the device:
what a thread had enqueued before it sent anything is read. In the copying process, a copy comes after what the calling
thread had enqueued for its own tensor.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from meshbook.actors.memory.local import LocalMemory
from meshbook.actors.memory.sharing import published, reader
from meshbook.actors.runtime import payloads, rank_hooks
from meshbook.errors import TransferError
from meshbook.wire.regions import Region

if TYPE_CHECKING:
    import torch


class CudaRegion(NamedTuple):
    """The location of a CUDA tensor's memory, as `UntypedStorage._share_cuda_` describes it.

    `marker` is a region of one byte in the owner's slot table that shows whether the memory is still published.
    """

    pid: int
    marker: Region
    handle: tuple[Any, ...]
    offset: int  # bytes in the storage
    event: bytes  # of what the owner has enqueued on the device


class _Shared:
    """A storage of this process that others may open.

    One for all its buffers. torch counts who may open it, and keeps the memory until all have let go. Here the owner
    decides, so the count is taken back at once.
    """

    def __init__(self, storage: Any) -> None:
        import torch

        self.handle: tuple[Any, ...] = tuple(storage._share_cuda_())
        counter_file, counter_offset = self.handle[4:6]
        if unlink_files not in rank_hooks.exit_callbacks:
            rank_hooks.exit_callbacks.append(unlink_files)
        _counter_files.add(os.fsdecode(counter_file))
        torch.UntypedStorage._release_ipc_counter_cuda(counter_file, counter_offset)
        self.storage = weakref.ref(storage)
        enqueued = _enqueued.get(storage.device)
        if enqueued is None:
            enqueued = _enqueued[storage.device] = _Enqueued(storage.device)
            if record_enqueued not in payloads.handover_callbacks:
                payloads.handover_callbacks.append(record_enqueued)
        self.enqueued = enqueued


class _Enqueued:
    """What this process has enqueued on a device. One event for all buffers: readers wait for its last record."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        event_class: Any = torch.cuda.Event
        self.event = event_class(interprocess=True)
        self.event.record(torch.cuda.current_stream(device))
        self.handle: bytes = self.event.ipc_handle()
        self._lock = threading.Lock()

    def record(self) -> None:
        """Have later copies wait for what the calling thread has enqueued until now, and for all of before."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            return  # it runs when the graph is replayed
        stream: Any = torch.cuda.current_stream(self._device)
        with self._lock:
            stream.wait_event(self.event)  # perhaps of another stream
            self.event.record(stream)


def record_enqueued() -> None:
    """Have later copies wait for what the calling thread has enqueued until now. Does not block, nor raise."""
    for enqueued in list(_enqueued.values()):
        with contextlib.suppress(RuntimeError):  # the context is dead, which whoever reads learns
            enqueued.record()


class _Opened:
    """A storage of another process, mapped here."""

    def __init__(self, region: CudaRegion) -> None:
        import torch

        torch.cuda.init()  # type: ignore[no-untyped-call]  # else opening it is a segmentation fault
        self.storage = torch.UntypedStorage._new_shared_cuda(*region.handle)
        self.event = _events.get((region.pid, region.event))
        if self.event is None:
            event_class: Any = torch.cuda.Event
            self.event = event_class.from_ipc_handle(self.storage.device, region.event)
            _events[region.pid, region.event] = self.event


_lock = threading.Lock()
_shared: dict[int, _Shared] = {}  # by address of the storage object
_by_marker: dict[Region, _Shared] = {}
_enqueued: dict[Any, _Enqueued] = {}  # by device
_opened: dict[tuple[int, tuple[Any, ...]], _Opened] = {}  # by process and handle
_events: weakref.WeakValueDictionary[tuple[int, bytes], Any] = weakref.WeakValueDictionary()  # by process and handle
_counter_files: set[str] = set()  # shared memory of torch's counts


def _reset_after_fork() -> None:
    """In a forked child: CUDA does not survive a fork, and an inherited lock may be held forever."""
    global _lock
    _lock = threading.Lock()
    _shared.clear()
    _by_marker.clear()
    _enqueued.clear()
    _opened.clear()
    _events.clear()
    _counter_files.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def unlink_files() -> None:
    """Remove the shared memory of torch's counts and of the driver's events; this process is about to exit.

    A rank exits without the destructors that would. What others have opened stays valid.
    """
    if not _counter_files:
        return
    events = f"/dev/shm/cuda.shm.{os.getuid():x}.{os.getpid():x}.*"
    for path in [*(f"/dev/shm/{name.lstrip('/')}" for name in _counter_files), *glob.glob(events)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _counter_files.clear()


def publish_cuda(tensor: torch.Tensor) -> CudaRegion:
    storage = tensor.untyped_storage()
    key = storage._cdata
    with _lock:
        shared = _shared.get(key)
        if shared is None or shared.storage() is not storage:
            shared = _shared[key] = _Shared(storage)
            weakref.finalize(storage, _forget, key, shared).atexit = False
    shared.enqueued.record()
    marker = published.publish_token(storage)
    _by_marker[marker] = shared
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return CudaRegion(os.getpid(), marker, shared.handle, offset, shared.enqueued.handle)


def _forget(key: int, shared: _Shared) -> None:
    if _shared.get(key) is shared:
        del _shared[key]
    for marker in [marker for marker, other in list(_by_marker.items()) if other is shared]:
        _by_marker.pop(marker, None)


def enqueued_for(memory: LocalMemory) -> Any:
    """Return an event after what the calling thread has enqueued for a CUDA tensor; None for other memory."""
    if not getattr(memory.keep_alive, "is_cuda", False):
        return None
    import torch

    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(memory.keep_alive.device))
    return event


def copy_cuda(region: CudaRegion, memory: LocalMemory, after: Any, *, reading: bool) -> None:
    """Copy; the bytes have arrived when this returns. `after`: as returned by `enqueued_for`."""
    key = region.pid, region.handle
    try:
        with reader.map_region(region.marker):
            shared = _by_marker.get(region.marker) if region.pid == os.getpid() else None
            storage = None if shared is None else shared.storage()
            if shared is not None and storage is not None:  # this process's own
                _copy(storage, region, memory, (shared.enqueued.event, after), reading=reading)
                return
            opened = _opened.get(key)
            if opened is None:
                opened = _opened[key] = _Opened(region)
            _copy(opened.storage, region, memory, (opened.event, after), reading=reading)
    except TransferError:  # dropped, or its owner has exited: unmap it
        _opened.pop(key, None)
        raise


def copy_to_device(memory: LocalMemory, other: torch.Tensor, after: Any, *, reading: bool) -> None:
    """Copy between CPU memory and a CUDA tensor; the bytes have arrived when this returns."""
    _on_side_stream(memory.keep_alive.device, memory, other, (after,), reading=reading)


def _copy(storage: Any, region: CudaRegion, memory: LocalMemory, events: tuple[Any, ...], *, reading: bool) -> None:
    import torch

    start = region.offset + memory.offset
    there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start : start + memory.nbytes]
    _on_side_stream(storage.device, memory, there, events, reading=reading)


def _on_side_stream(
    device: Any, memory: LocalMemory, other: torch.Tensor, events: tuple[Any, ...], *, reading: bool
) -> None:
    import torch

    with torch.cuda.device(device):
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one of torch's pool
        for event in events:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            memory.copy(other, reading=reading)
        stream.synchronize()


def drop_cuda(region: CudaRegion) -> None:
    _opened.pop((region.pid, region.handle), None)
    _by_marker.pop(region.marker, None)
    if region.pid == os.getpid():
        published.drop(region.marker)
    else:
        reader.drop(region.marker)
