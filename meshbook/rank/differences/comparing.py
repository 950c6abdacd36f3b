"""Tensors of ranks compared element by element: one rank sends its own, the others count what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshbook.rank.differences.forward import tensors_of_forward
from meshbook.rank.differences.state import tensors_behind
from meshbook.rank.state.modules import local_part
from meshbook.wire.messages import Comparison, TensorDifference

# Elements that are sent at a time.
_CHUNK = 1 << 22


def compare_tensors(
    rank: int, comparisons: Sequence[Comparison], namespace: dict[str, Any], forward: str = ""
) -> list[TensorDifference]:
    """Take this rank's part in comparisons, in their order, which is equal on all ranks. Sends and receives.

    Args:
        forward: what is compared is what modules take and give in this expression, which is run; empty: names.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    if forward:
        tensors = tensors_of_forward(forward, namespace, {comparison.path for comparison in comparisons})
    differences = []
    for comparison in comparisons:
        if rank != comparison.source and rank not in comparison.targets:
            continue
        if comparison.name not in tensors:
            tensors[comparison.name] = tensors_behind(comparison.name, namespace)
        flat = local_part(tensors[comparison.name][comparison.path]).contiguous().reshape(-1)
        if rank == comparison.source:
            for target in comparison.targets:
                for chunk in torch.split(flat, _CHUNK):
                    dist.send(chunk.view(torch.uint8), target)
        else:
            differences.append(_receive_and_compare(comparison, flat))
    return differences


def _receive_and_compare(comparison: Comparison, mine: torch.Tensor) -> TensorDifference:
    num_differing, largest = 0, 0.0
    for chunk in torch.split(mine, _CHUNK):
        theirs = torch.empty_like(chunk)
        dist.recv(theirs.view(torch.uint8), comparison.source)
        differing = chunk != theirs
        if chunk.is_floating_point() or chunk.is_complex():
            differing &= ~(chunk.isnan() & theirs.isnan())
        num_differing += int(differing.sum())
        if differing.any():
            wide = torch.complex128 if chunk.is_complex() else torch.float64
            found = float((chunk[differing].to(wide) - theirs[differing].to(wide)).abs().max())  # NaN stays NaN
            largest = found if found != found or found > largest else largest
    return TensorDifference(comparison.path, num_differing, mine.numel(), largest)
