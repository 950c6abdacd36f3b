"""The geometry of shards: which box of a tensor each rank holds, and the strides of its shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from meshbook.mesh_axes import MeshAxes
from meshbook.placement import Replicate, Shard, Span, local_spans


class Spec(Protocol):
    """What is known of a tensor without its data. `placements`: torch's, one per axis; None: each rank has its own."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def stride(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def placements(self) -> tuple[Any, ...] | None: ...
    @property
    def has_partial(self) -> bool: ...
    @property
    def is_inexact(self) -> bool: ...


def is_sharded(placement: Any) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def spans_of(shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes, rank: int) -> tuple[Span, ...]:
    """Return the box of a rank, as (start, stop) for each dim."""
    mesh_placements = [Shard(placement.dim) if is_sharded(placement) else Replicate() for placement in placements]
    return local_spans(shape, mesh_placements, axes.shape, tuple(axes.point(rank).values()))


def local_shape(shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes, rank: int) -> tuple[int, ...]:
    """Return the shape of the shard of a rank."""
    return tuple(stop - start for start, stop in spans_of(shape, placements, axes, rank))


def empty_shard_dims(spec: Spec, axes: MeshAxes) -> set[int]:
    """Return the dims along which some rank has an empty shard: the last one has, if any."""
    placements, mesh_shape = spec.placements or (), axes.shape
    sharded = {
        placement.dim
        for placement, size in zip(placements, mesh_shape, strict=True)
        if is_sharded(placement) and size > 1
    }
    if not sharded:
        return set()
    last_shape = local_shape(spec.shape, placements, axes, axes.ranks[-1])
    return {dim for dim in sharded if last_shape[dim] == 0}


def dense_strides(local: Sequence[int], spec: Spec) -> tuple[int, ...]:
    """Return dense strides of a shard of this shape, with the dims in the global tensor's order."""
    order = sorted(range(len(local)), key=lambda dim: (-spec.stride[dim], -(spec.shape[dim] != 1), dim))
    strides, step = [0] * len(local), 1
    for dim in reversed(order):
        if spec.stride[dim] == 0 and local[dim] != 1:
            continue
        strides[dim] = step
        step *= max(local[dim], 1)
    return tuple(strides)


def actual_strides(tensor: DTensor) -> tuple[int, ...]:
    """Return the global strides, in the order of the local tensor's.

    DTensor sometimes reports others; torch would then allow views here that the ranks cannot make.
    """
    reported, local = tensor.stride(), tensor._local_tensor
    dims = [dim for dim in range(local.dim()) if local.shape[dim] > 1]
    order = sorted(dims, key=local.stride, reverse=True)
    if all(reported[one] >= reported[other] for one, other in itertools.pairwise(order)):
        return tuple(reported)
    strides, step = [0] * local.dim(), 1
    for dim in reversed([dim for dim in range(local.dim()) if dim not in dims] + order):
        strides[dim] = step if dim not in dims or local.stride(dim) else 0
        step *= max(tensor.shape[dim], 1) if strides[dim] else 1
    return tuple(strides)
