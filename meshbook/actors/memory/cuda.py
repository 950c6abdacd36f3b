"""Read and write CUDA tensors of other processes of this machine, by CUDA IPC."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from meshbook.actors.memory.local import LocalMemory
from meshbook.actors.memory.sharing import published, reader
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


_opened_cuda_storages: dict[Region, Any] = {}  # storages of other processes, mapped here


def publish_cuda(tensor: torch.Tensor) -> CudaRegion:
    storage = tensor.untyped_storage()
    handle = storage._share_cuda_()  # type: ignore[no-untyped-call]
    marker = published.publish_token(storage)
    return CudaRegion(os.getpid(), marker, tuple(handle), int(tensor.storage_offset()) * tensor.element_size())


def copy_cuda(region: CudaRegion, memory: LocalMemory, *, reading: bool) -> None:
    import torch

    if region.pid == os.getpid():
        raise TransferError("this buffer is this process's own CUDA memory: copy from the tensor it was made of")
    try:
        with reader.map_region(region.marker):
            storage = _opened_cuda_storages.get(region.marker)
            if storage is None:
                storage = torch.UntypedStorage._new_shared_cuda(*region.handle)
                _opened_cuda_storages[region.marker] = storage
            start = region.offset + memory.offset
            remote_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            memory.copy(remote_bytes[start : start + memory.nbytes], reading=reading)
            torch.cuda.synchronize(storage.device)  # the future resolves only after the bytes have arrived
    except TransferError:  # dropped, or its owner has exited: unmap it
        _opened_cuda_storages.pop(region.marker, None)
        raise


def drop_cuda(region: CudaRegion) -> None:
    _opened_cuda_storages.pop(region.marker, None)
    if region.pid == os.getpid():
        published.drop(region.marker)
    else:
        reader.drop(region.marker)
