"""A batch that arrives on a rank: its own rows of it, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.placement import shard_spans


def part_of(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any], device: str | torch.device) -> DTensor:
    """A tensor of the whole mesh, of one that came whole and contiguous; at most one axis cuts it, along dim 0."""
    point = mesh.get_coordinate()
    cuts = [(point[axis], mesh.size(axis)) for axis, placement in enumerate(placements) if placement.is_shard()]
    place, num_places = cuts[0] if cuts else (0, 1)
    mine = own_rows(tensor, place, num_places, device)
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def own_rows(batch: Any, place: int, num_places: int, device: str | torch.device) -> Any:
    """This rank's part of a batch that came whole: views of the shared memory on the CPU, copies on another device.

    Leaves with rows are cut along dim 0 as torch.chunk would; arrays become tensors; all else stays as it is.
    """

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensor = leaf
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            tensor = torch.as_tensor(leaf)
        else:
            return leaf
        if tensor.dim():
            start, stop = shard_spans(len(tensor), num_places)[place]
            tensor = tensor[start:stop]
        return tensor.to(device, non_blocking=True)

    return _mapped(batch, take)


def _mapped(batch: Any, take: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _mapped(value, take) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, take) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_mapped(value, take) for value in batch)
    return take(batch)
