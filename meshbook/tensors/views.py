"""Conversions between placements, and between the global and the per-rank view of a tensor. None of them waits.

All are differentiable: each is linear, and its backward consists of the others, so that it may be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from meshbook.errors import MeshShapeError, PlacementError
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import operators
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.dispatch import call_rank_function, upload_grad

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def placements_of(
    shape: Sequence[int], axes: MeshAxes, placements: Any = None, sharding_spec: Any = None
) -> tuple[Any, ...]:
    """Return torch's placements, checked, one per axis; negative dims counted from the start.

    Args:
        placements: one per axis (torch's or Meshbook's), or a single one for a mesh of one axis.
        sharding_spec: per tensor dim the axis that shards it, a tuple of axes, or None.

    Raises:
        PlacementError: they do not fit the tensor or the mesh.
    """
    if placements is not None and sharding_spec is not None:
        raise PlacementError("give placements= or sharding_spec=, not both")
    if sharding_spec is not None:
        return _from_sharding_spec(shape, axes, sharding_spec)
    if placements is None:
        return (Replicate(),) * len(axes.shape)
    if not isinstance(placements, (list, tuple)):
        placements = [placements]
    if len(placements) != len(axes.shape):
        raise PlacementError(
            f"{len(placements)} placements for a mesh of {len(axes.shape)} axes ({axes}); give one per axis, such as "
            f"[{', '.join(['Shard(0)', *['Replicate()'] * (len(axes.shape) - 1)])}]"
        )
    return tuple(_check_placement(placement, shape) for placement in placements)


def _check_placement(placement: Any, shape: Sequence[int]) -> Any:
    name = type(placement).__name__
    if name == "Replicate":
        return Replicate()
    if name == "Partial":
        return placement if isinstance(placement, Partial) else Partial(placement.op)
    if name == "Shard":
        if not -len(shape) <= placement.dim < len(shape):
            raise PlacementError(
                f"Shard({placement.dim}) needs dim {placement.dim}, but a tensor of shape {tuple(shape)} has "
                f"{len(shape)} dims (0-{len(shape) - 1})" if shape else
                f"Shard({placement.dim}) of a tensor without dims; use Replicate()"
            )  # fmt: skip
        return Shard(placement.dim % len(shape))
    raise PlacementError(f"{placement!r} is not a placement; use Shard(dim), Replicate() or Partial(op)")


def _from_sharding_spec(shape: Sequence[int], axes: MeshAxes, spec: Any) -> tuple[Any, ...]:
    if isinstance(spec, str):
        spec = [spec]
    if len(spec) > len(shape):
        raise PlacementError(
            f"sharding_spec {list(spec)} names {len(spec)} dims, the tensor of shape {tuple(shape)} has {len(shape)}; "
            "give an axis or None per tensor dim"
        )
    dim_of_axis: dict[str, int] = {}
    for dim, axes_of_dim in enumerate(spec):
        for axis in (axes_of_dim,) if isinstance(axes_of_dim, str) else axes_of_dim or ():
            axes.size_of(axis)
            if axis in dim_of_axis:
                raise PlacementError(
                    f"axis {axis} is to cut dim {dim_of_axis[axis]} and dim {dim} both; one axis cuts one "
                    "dim of a tensor"
                )
            dim_of_axis[axis] = dim
    return tuple(Shard(dim_of_axis[name]) if name in dim_of_axis else Replicate() for name in axes.names)


def check_even(shape: Sequence[int], placements: Sequence[Any], axes: MeshAxes) -> None:
    """Check that all shards are equal, for operations that need it.

    Raises:
        PlacementError: a sharded dim does not divide evenly.
    """
    remaining = list(shape)
    for axis, (placement, size) in enumerate(zip(placements, axes.shape, strict=True)):
        if isinstance(placement, Shard):
            if remaining[placement.dim] % size:
                raise PlacementError(
                    f"dim {placement.dim} of {shape[placement.dim]} rows cannot be sharded evenly over "
                    f"{axes.names[axis]}={size}: {remaining[placement.dim]} = {size} * "
                    f"{remaining[placement.dim] // size} + {remaining[placement.dim] % size}; pad it, or choose "
                    "another dim"
                )
            remaining[placement.dim] //= size


def _save_for_backward(ctx: Any, result: Any) -> Any:
    """Store the spec of a function's result for its backward; return the result."""
    ctx.spec = result._spec
    return result


def _grad_on_mesh(ctx: Any, grad: Any) -> Any:
    """Return the gradient of that result as a remote tensor.

    torch makes zeros in this process for a tensor that became a mask in place (`gt_`), and for one that is not used.
    """
    return grad if isinstance(grad, MeshTensor) else upload_grad(ctx.spec, grad)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: tuple[Any, ...]) -> Any:
        ctx.before = tensor._spec.placements
        return _save_for_backward(ctx, call_rank_function(operators.redistribute, tensor.engine, tensor, placements))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # A term of a sum has the gradient of the sum, replicated; a Partial gradient stays so where it may.
        placements = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.before)
        return redistribute_to(_grad_on_mesh(ctx, grad), placements), None


def redistribute_to(tensor: Any, placements: tuple[Any, ...]) -> Any:
    """Return the tensor with other placements."""
    if tensor._spec.placements == placements:
        return tensor
    return _Redistribute.apply(tensor, placements)  # type: ignore[no-untyped-call]


def redistribute(tensor: MeshTensor, placements: Any, sharding_spec: Any) -> Any:
    _require_global(tensor, "redistribute")
    requested = placements_of(tensor.shape, tensor.engine.axes, placements, sharding_spec)
    current = tensor._spec.placements
    assert current is not None
    for axis, (before, after) in enumerate(zip(current, requested, strict=True)):
        if after.is_partial() and before != after:
            raise PlacementError(
                f"{tensor.engine.axes.names[axis]}: {before} cannot become {after}; parts of a sum come from "
                "operations, or from t.as_global([Partial()]) of per-rank tensors"
            )
    if requested == current:
        return tensor
    return _Redistribute.apply(tensor, requested)  # type: ignore[no-untyped-call]


class _AsGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: tuple[Any, ...]) -> Any:
        ctx.placements = placements
        sizes = zip(placements, tensor.engine.axes.shape, strict=True)
        ctx.num_copies = math.prod(size for placement, size in sizes if placement.is_replicate())
        result = call_rank_function(operators.as_global, tensor.engine, tensor, operators.MESH, placements)
        return _save_for_backward(ctx, result)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        placements = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.placements)
        local_grad: Any = _AsLocal.apply(redistribute_to(_grad_on_mesh(ctx, grad), placements))  # type: ignore[no-untyped-call]
        # The replicas are tensors of their own, whose gradients add up to that of the one, as `_AsLocal` adds them up.
        return local_grad if ctx.num_copies == 1 else local_grad / ctx.num_copies, None


class _AsLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.placements = tensor._spec.placements
        return _save_for_backward(ctx, call_rank_function(operators.as_local, tensor.engine, tensor))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # Each rank's use of a replica adds to its gradient: together they are a partial sum.
        placements = tuple(Partial() if placement.is_replicate() else placement for placement in ctx.placements)
        placements = tuple(Replicate() if placement.is_partial() and not before.is_replicate() else placement
                       for placement, before in zip(placements, ctx.placements, strict=True))  # fmt: skip
        return _AsGlobal.apply(_grad_on_mesh(ctx, grad), placements)  # type: ignore[no-untyped-call]


def as_global(tensor: MeshTensor, placements: Any) -> Any:
    _require_local(tensor, "as_global")
    wanted = placements_of(tensor.shape, tensor.engine.axes, placements)
    return _AsGlobal.apply(tensor, wanted)  # type: ignore[no-untyped-call]


def as_local(tensor: MeshTensor) -> Any:
    if tensor._spec.placements is None:
        return tensor
    axes = tensor.engine.axes
    check_even(tensor.shape, tensor._spec.placements, axes)  # a per-rank tensor has one shape
    return _AsLocal.apply(tensor)  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, axis: int, op: str) -> Any:
        ctx.axis, ctx.op, ctx.size = axis, op, tensor.engine.axes.shape[axis]
        result = call_rank_function(operators.reduce_local, tensor.engine, tensor, operators.MESH, axis, op)
        return _save_for_backward(ctx, result)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.op not in ("sum", "avg"):
            raise NotImplementedError(f"the gradient of reduce(op={ctx.op!r}); reduce a detached tensor")
        total: Any = _Reduce.apply(_grad_on_mesh(ctx, grad), ctx.axis, "sum")  # type: ignore[no-untyped-call]
        return (total / ctx.size if ctx.op == "avg" else total), None, None


def reduce(tensor: MeshTensor, axis: str, op: str) -> Any:
    _require_local(tensor, "reduce")
    if op not in _REDUCTIONS:
        raise PlacementError(f"{op!r} is not a reduction; use one of {', '.join(_REDUCTIONS)}")
    tensor.engine.axes.size_of(axis)
    at = tensor.engine.axes.names.index(axis)
    return _Reduce.apply(tensor, at, op)  # type: ignore[no-untyped-call]


class _SliceMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, axis: int, position: int) -> Any:
        ctx.axis, ctx.place = axis, position
        result = call_rank_function(operators.slice_local, tensor.engine, tensor, operators.MESH, axis, position)
        return _save_for_backward(ctx, result)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        total = _Reduce.apply(_grad_on_mesh(ctx, grad), ctx.axis, "sum")  # type: ignore[no-untyped-call]
        return _ZeroExceptAt.apply(total, ctx.axis, ctx.place), None, None  # type: ignore[no-untyped-call]


class _ZeroExceptAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, axis: int, position: int) -> Any:
        ctx.axis, ctx.place = axis, position
        result = call_rank_function(operators.zero_except_at, tensor.engine, tensor, operators.MESH, axis, position)
        return _save_for_backward(ctx, result)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _ZeroExceptAt.apply(_grad_on_mesh(ctx, grad), ctx.axis, ctx.place), None, None  # type: ignore[no-untyped-call]


def slice_mesh(tensor: MeshTensor, positions: Mapping[str, int]) -> Any:
    _require_local(tensor, "slice_mesh")
    axes = tensor.engine.axes
    found: Any = tensor
    for axis, position in positions.items():
        size = axes.size_of(axis)
        if not -size <= position < size:
            raise MeshShapeError(f"{axis}={position} is out of range: axis {axis} has size {size} (0-{size - 1})")
        found = _SliceMesh.apply(found, axes.names.index(axis), position % size)  # type: ignore[no-untyped-call]
    return found


def _require_global(tensor: MeshTensor, method: str) -> None:
    if tensor._spec.placements is None:
        raise PlacementError(
            f"{method} is for tensors seen as one; every rank has its own here: t.as_global(placements)"
        )


def _require_local(tensor: MeshTensor, method: str) -> None:
    if tensor._spec.placements is not None:
        raise PlacementError(f"{method} is for per-rank tensors; this one is seen as one: t.as_local().{method}(...)")
