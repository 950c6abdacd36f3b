"""Convert a batch that arrives on a rank to tensors of the rank's own rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshbook import placement as mesh_placements
from meshbook.data.batches import map_leaves
from meshbook.placement import shard_spans


def own_shard(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """Return this rank's part of a complete tensor as a view, on the tensor's own device.

    torch's `distribute_tensor` moves the complete tensor to the rank's device first, where it may not fit.
    """
    if any(type(placement) not in (Shard, Replicate) for placement in placements):  # strided, of FSDP over cut layers
        whole = tensor.to(mesh.device_type)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    kinds = [
        mesh_placements.Shard(placement.dim) if placement.is_shard() else mesh_placements.Replicate()
        for placement in placements
    ]
    spans = mesh_placements.local_spans(tensor.shape, kinds, mesh.shape, mesh.get_coordinate())
    return tensor[tuple(slice(*span) for span in spans)]


def shard_rows(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any], device: str | torch.device) -> DTensor:
    """Return a DTensor of the mesh from a complete, contiguous tensor; at most one axis shards it, along dim 0."""
    coordinate = mesh.get_coordinate()
    sharded_axes = [
        (coordinate[axis], mesh.size(axis)) for axis, placement in enumerate(placements) if placement.is_shard()
    ]
    shard_index, num_shards = sharded_axes[0] if sharded_axes else (0, 1)
    own_rows_tensor = select_own_rows(tensor, shard_index, num_shards, device)
    return DTensor.from_local(
        own_rows_tensor, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def select_own_rows(batch: Any, shard_index: int, num_shards: int, device: str | torch.device) -> Any:
    """Return this rank's part of a complete batch: views of shared memory on the CPU, copies on another device.

    Leaves with rows are split along dim 0 as by torch.chunk; arrays become tensors; other leaves stay unchanged.
    """

    def slice_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensor = leaf
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            tensor = torch.as_tensor(leaf)
        else:
            return leaf
        if tensor.dim():
            start, stop = shard_spans(len(tensor), num_shards)[shard_index]
            tensor = tensor[start:stop]
        return _copy_beside(tensor, torch.device(device))

    return map_leaves(batch, slice_leaf)


def _copy_beside(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device. A GPU copies it while it computes: what it computes next waits for the copy."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device, non_blocking=True)
    current, copying = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copying):
        copied = tensor.to(device, non_blocking=True)
    current.wait_stream(copying)
    copied.record_stream(current)
    return copied


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
