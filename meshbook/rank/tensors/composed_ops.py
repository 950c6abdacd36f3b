"""Operations that DTensor computes wrongly, or not at all, composed of others that it computes well.

They are written for operations on remote tensors, which the controller plans, and for those of a module's own code on a
rank (`dtensor_mode`): both give them what runs an operation as it is. All run below autograd: each is a forward or a
backward, never both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from meshbook.rank.tensors import dtensor_patches

aten = torch.ops.aten


class Operations(Protocol):
    """What runs operations: on a mesh from the notebook, or on a rank."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation as DTensor does it, not composed of others."""

    def run_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on whole tensors.

        Raises:
            NotImplementedError: that cannot be; the text names an alternative.
        """

    def reduce_partial(self, tensor: Any) -> Any:
        """Return a tensor whose ranks hold no terms of it."""

    def mesh_shape(self, tensor: Any) -> tuple[int, ...]: ...


Composition = Callable[[Operations, Any, Any, Any], Any]


def placements_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return the placements of a DTensor or a remote tensor; None: it has none."""
    spec = getattr(tensor, "_spec", None)
    return None if spec is None else spec.placements


_MATERIALIZED_VIEWS = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
_IN_PLACE_INDEX_PUTS = (aten.index_put_.default, aten._index_put_impl_.default)
_SHIFTS = {
    aten.__lshift__.Scalar: torch.bitwise_left_shift,
    aten.__rshift__.Scalar: torch.bitwise_right_shift,
}


def _index_put(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `x[mask] = value`. DTensor treats a mask as indices, and has every rank use all of it."""
    filled: Any = (*args, *(None, False)[len(args) - 3 :])
    tensor, indices, value, accumulate = filled[:4]
    accumulate = kwargs.get("accumulate", accumulate)
    given = [index for index in indices if index is not None]
    if not any(index.dtype == torch.bool for index in given):
        return ops.run(func, args, kwargs)
    mask = given[0]
    num_leading_dims = next(at for at, index in enumerate(indices) if index is not None)
    num_trailing_dims = tensor.dim() - num_leading_dims - mask.dim()
    if len(given) > 1 or value.dim() > num_trailing_dims:
        if len(given) > 1 or value.numel() != 1:
            return ops.run_whole(func, args, kwargs)
        value = value.reshape(())
    mask = mask.reshape((1,) * num_leading_dims + tuple(mask.shape) + (1,) * num_trailing_dims)
    filled = torch.where(mask, tensor + value if accumulate else value.to(tensor.dtype), tensor)
    return tensor.copy_(filled) if func in _IN_PLACE_INDEX_PUTS else filled


def _gather(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Narrow the tensor to the index first: DTensor matches their rows even where the index has fewer."""
    tensor, dim, index = args[:3]
    if not tensor.dim() or index.dim() != tensor.dim():  # a 0-dim tensor, or an empty index
        return ops.run(func, args, kwargs)
    for at, length in enumerate(index.shape):
        if at != dim % tensor.dim() and length != tensor.shape[at]:
            tensor = tensor.narrow(at, 0, length)
    return ops.run(func, (tensor, dim, index, *args[3:]), kwargs)


def _with_nonnegative_dim(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Pass a nonnegative dim: DTensor does not match a negative one to a dim of the gradient."""
    grad, sizes, dim, *rest = args
    return ops.run(func, (grad, sizes, dim % len(sizes), *rest), kwargs)


def _materialize_view(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute the conjugate or negative values.

    torch only marks a tensor as conjugated or negated, and has each operation apply the mark. DTensor loses the mark,
    and a MeshTensor has none.
    """
    return _MATERIALIZED_VIEWS[func](args[0])


def _batch_norm(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Update the running statistics separately.

    Where DTensor shards channels, as it may for any sharded tensor, it updates copies of the buffers, or each rank
    updates its own.
    """
    tensor, weight, bias, mean, var, training, momentum, eps = args
    is_sharded = any(not placement.is_replicate() for placement in placements_of(tensor) or ())
    if not (is_sharded and training) or mean is None:
        return ops.run(func, args, kwargs)
    made = ops.run(func, (tensor, weight, bias, None, None, training, momentum, eps), kwargs)
    count = tensor.numel() // tensor.shape[1]
    mean.lerp_(made[1].to(mean.dtype), momentum)
    var.lerp_(((made[2] ** -2 - eps) * (count / max(count - 1, 1))).to(var.dtype), momentum)
    return made


def _median(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Make expanded tensors contiguous first.

    torch's CPU kernel (2.13) reads and writes outside the memory of a tensor that is expanded along the dim: wrong
    numbers, or a process that ends with a corrupted heap.
    """
    tensor = args[0]
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return ops.run(func, (tensor, *args[1:]), kwargs)


def _nll_loss_forward(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Divide sums: a mean of means is wrong where shards differ in size, or in how many of their targets count."""
    tensor, target, weight, reduction, ignore_index = args
    if reduction != 1 or _are_replicated(tensor, target):
        return ops.run(func, args, kwargs)
    if weight is None:
        total = (target != ignore_index).to(tensor.dtype).sum()
    else:  # the sum of the targets' weights
        total, _ = ops.run(func, (torch.full_like(tensor, -1.0), target, weight, 2, ignore_index), kwargs)
    total = ops.reduce_partial(total)  # once: backward divides by it too
    loss, _ = ops.run(func, (tensor, target, weight, 2, ignore_index), kwargs)
    return loss / total, total


def _nll_loss_backward(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, weight, reduction, ignore_index, total = args
    if reduction != 1 or _are_replicated(tensor, target):
        return ops.run(func, args, kwargs)
    return ops.run(func, (grad / total, tensor, target, weight, 2, ignore_index, total), kwargs)


def _are_replicated(*tensors: Any) -> bool:
    """Whether all of these are replicated, local, or per-rank tensors."""
    return all(placement.is_replicate() for tensor in tensors for placement in placements_of(tensor) or ())


def _shift(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Shift by a number, which DTensor loses."""
    return _SHIFTS[func](*args)


def _is_evenly_sharded(ops: Operations, tensor: Any) -> bool:
    placements, mesh_shape = placements_of(tensor), ops.mesh_shape(tensor)
    return placements is None or all(
        placement.is_replicate() or placement.is_partial() or tensor.shape[placement.dim] % size == 0
        for placement, size in zip(placements, mesh_shape, strict=True)
    )


def _mean(ops: Operations, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a mean over shards that differ in size."""
    tensor = args[0]
    if _is_evenly_sharded(ops, tensor):
        return ops.run(func, args, kwargs)
    dtype = kwargs.get("dtype")
    if func is aten.mean.default:
        return tensor.sum(dtype=dtype) / tensor.numel()
    dims = args[1] if len(args) > 1 and args[1] else list(range(tensor.dim()))
    keepdim = bool(args[2]) if len(args) > 2 else False
    count = 1
    for dim in dims:
        count *= tensor.shape[dim]
    return tensor.sum(dims, keepdim, dtype=dtype) / count


COMPOSED: dict[Any, Composition] = {
    aten._conj.default: _materialize_view,
    aten._neg_view.default: _materialize_view,
    aten.native_batch_norm.default: _batch_norm,
    aten.nll_loss_forward.default: _nll_loss_forward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss_forward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.gather.default: _gather,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.select_backward.default: _with_nonnegative_dim,
    aten.slice_backward.default: _with_nonnegative_dim,
    aten.__lshift__.Scalar: _shift,
    aten.__rshift__.Scalar: _shift,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.median.dim: _median,
    aten.nanmedian.dim: _median,
}
COMPOSED |= dict.fromkeys(dtensor_patches.DECOMPOSED, lambda ops, *call: dtensor_patches.torch_decomposition(*call))
