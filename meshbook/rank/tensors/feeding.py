"""Convert a batch that arrives on a rank to tensors of the rank's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.placement import shard_spans


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
        return tensor.to(device, non_blocking=True)

    return _map_leaves(batch, slice_leaf)


def _map_leaves(batch: Any, function: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _map_leaves(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_leaves(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_map_leaves(value, function) for value in batch)
    return function(batch)
