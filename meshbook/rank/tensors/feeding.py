"""A batch that arrives on a rank: its own rows of it, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.placement import shard_spans
from meshbook.rank.tensors.calls import FUNCTIONS

# Batches that have come and have not been asked for, by number; with the operations that ask for their tensors, the
# main thread's alone.
WAITING: dict[int, list[torch.Tensor]] = {}


def put(number: int, batch: Any, place: int, num_places: int, device: Any) -> None:
    """Keep this rank's part of a batch until operations ask for it."""
    mine = own_rows(batch, place, num_places, device)
    WAITING[number] = [leaf for leaf in pytree.tree_leaves(mine) if isinstance(leaf, torch.Tensor)]


def drop(numbers: Sequence[int]) -> None:
    for number in numbers:
        WAITING.pop(number, None)


def fed(
    number: float, mesh: Any, placements: Sequence[Any], shapes: Sequence[Any], strides: Sequence[Any]
) -> list[DTensor]:
    """A batch as tensors of the whole mesh, which the engine keeps from now on."""
    return [
        DTensor.from_local(local, mesh, list(places), run_check=False, shape=torch.Size(shape), stride=stride)
        for local, places, shape, stride in zip(WAITING.pop(int(number)), placements, shapes, strides, strict=True)
    ]


FUNCTIONS["fed"] = fed


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
