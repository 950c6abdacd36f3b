"""Operations that DTensor has no rule for, or computes wrongly, composed of others that it computes well.

Each override is a function of (operation, args, kwargs) as torch's dispatcher passes them; `OVERRIDES` maps operations
to overrides. All run below autograd: each is a forward or a backward, never both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from meshbook.rank.tensors import attention, dtensor_patches, operators
from meshbook.tensors import values
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.dispatch import (
    MAX_INLINE_OPERAND_BYTES,
    Override,
    call_rank_function,
    dispatch,
    dispatch_without_override,
    upload,
    wrap_handle,
)

aten = torch.ops.aten


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    """Return another Python object for the same tensor: the ranks have nothing to do."""
    tensor = args[0]
    return wrap_handle(tensor._spec, tensor._handle)


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    return values.item(args[0])


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Fetch for a copy_ into a local tensor; send an operation for one into a remote tensor."""
    target, source = args[0], args[1]
    if isinstance(target, MeshTensor):
        if not isinstance(source, MeshTensor) and source.numel() * source.element_size() > MAX_INLINE_OPERAND_BYTES:
            if source.shape != target.shape or target._spec.placements is None:
                source = source.to(target.dtype).expand(target.shape)
            placements = target._spec.placements
            source = upload(target.engine, source.contiguous(), placements)
            args = (target, source, *args[2:])
        return dispatch_without_override(func, args, kwargs)
    target.copy_(source.full_tensor())
    return target


def _dispatch_floats_in_key(func: Any, args: Any, kwargs: Any) -> Any:
    return dispatch_without_override(func, args, kwargs, floats_in_key=True)


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    return bool((one == other).all().item())


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with a tensor: DTensor has rules for filling with numbers, and for copies, only."""
    target, value = args
    if not isinstance(value, MeshTensor):
        return target.fill_(value.item())
    return target.copy_(value.expand(target.shape))


def _fill_scalar(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill a partial sum: DTensor would fill each rank's term."""
    target, value = args
    if not any(placement.is_partial() for placement in target._spec.placements or ()):
        return dispatch_without_override(func, args, kwargs)
    return target.copy_(torch.tensor(value, dtype=target.dtype, device="cpu"))


def _index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `x[mask] = value`. DTensor treats a mask as indices, and has every rank use all of it."""
    filled: Any = (*args, *(None, False)[len(args) - 3 :])
    tensor, indices, value, accumulate = filled[:4]
    accumulate = kwargs.get("accumulate", accumulate)
    given = [index for index in indices if index is not None]
    if not any(index.dtype == torch.bool for index in given):
        return dispatch_without_override(func, args, kwargs)
    mask = given[0]
    num_leading_dims = next(at for at, index in enumerate(indices) if index is not None)
    num_trailing_dims = tensor.dim() - num_leading_dims - mask.dim()
    if len(given) > 1 or value.dim() > num_trailing_dims:
        if len(given) > 1 or value.numel() != 1:
            return _refuse_data_dependent(_MASK_HINT)(func, args, kwargs)
        value = value.reshape(())
    mask = mask.reshape((1,) * num_leading_dims + tuple(mask.shape) + (1,) * num_trailing_dims)
    filled = torch.where(mask, tensor + value if accumulate else value.to(tensor.dtype), tensor)
    return tensor.copy_(filled) if func in _IN_PLACE_INDEX_PUTS else filled


def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Narrow the tensor to the index first: DTensor matches their rows even where the index has fewer."""
    tensor, dim, index = args[:3]
    if not tensor.dim() or index.dim() != tensor.dim():  # a 0-dim tensor, or an empty index
        return dispatch_without_override(func, args, kwargs)
    for at, length in enumerate(index.shape):
        if at != dim % tensor.dim() and length != tensor.shape[at]:
            tensor = tensor.narrow(at, 0, length)
    return dispatch_without_override(func, (tensor, dim, index, *args[3:]), kwargs)


def _with_nonnegative_dim(func: Any, args: Any, kwargs: Any) -> Any:
    """Pass a nonnegative dim: DTensor does not match a negative one to a dim of the gradient."""
    grad, sizes, dim, *rest = args
    return dispatch_without_override(func, (grad, sizes, dim % len(sizes), *rest), kwargs)


def _materialize_view(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute the conjugate or negative values.

    torch only marks a tensor as conjugated or negated, and has each operation apply the mark. DTensor loses the mark,
    and a MeshTensor has none.
    """
    return _MATERIALIZED_VIEWS[func](args[0])


_MATERIALIZED_VIEWS = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}


_IN_PLACE_INDEX_PUTS = (aten.index_put_.default, aten._index_put_impl_.default)


def _same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


def _decompose(func: Any, args: Any, kwargs: Any) -> Any:
    return func.decompose(*args, **kwargs)


def _foreach_copy(func: Any, args: Any, kwargs: Any) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source)


def _amp_unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Unscale gradients before a GradScaler's step. The scaler reads at once whether to step, so this waits."""
    grads, found_inf, scale = args
    if torch.stack([(grad - grad).sum().isnan() for grad in grads]).any().item():  # inf - inf is NaN too
        found_inf.fill_(1.0)
    for grad in grads:
        grad.mul_(scale)


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a meta tensor for `x.to("meta")`: torch's own code uses it for the shape of a result, without data."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "meta":
        return dispatch_without_override(func, args, kwargs)
    (tensor,) = args
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kwargs.get("dtype") or tensor.dtype, device="meta")


def _reshape_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Change the shape in place: the tensor takes over the handle of the view."""
    tensor = args[0]
    name = func._opname
    # Autograd would create its views again, with the new shape.
    if tensor.requires_grad and tensor._handle.version_counter is not None:
        raise NotImplementedError(
            f"{name} of a tensor with a gradient, that is a view or has views: use the one that makes a view, "
            f"x = x.{name.removesuffix('_')}(...)"
        )
    view = getattr(torch, name.removesuffix("_"))(*args, **kwargs)
    torch.Tensor.data.__set__(tensor, view)  # type: ignore[attr-defined]
    tensor._handle = view._handle
    return tensor


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Update the running statistics separately.

    Where DTensor shards channels, as it may for any sharded tensor, it updates copies of the buffers, or each rank
    updates its own.
    """
    tensor, weight, bias, mean, var, training, momentum, eps = args
    is_sharded = any(not placement.is_replicate() for placement in tensor._spec.placements or ())
    if not (is_sharded and training) or mean is None:
        return dispatch_without_override(func, args, kwargs)
    made = dispatch_without_override(func, (tensor, weight, bias, None, None, training, momentum, eps), kwargs)
    count = tensor.numel() // tensor.shape[1]
    mean.lerp_(made[1].to(mean.dtype), momentum)
    var.lerp_(((made[2] ** -2 - eps) * (count / max(count - 1, 1))).to(var.dtype), momentum)
    return made


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Have each rank choose the kernel: torch has chosen that of a CPU here."""
    filled: Any = (*args, *(0.0, False)[len(args) - 3 :])
    query, key, value, dropout, is_causal = filled
    _check_no_dropout(func, dropout)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    return dispatch(attention.forward, (query, key, value, mask, is_causal, scale, needs_grad), None)


def _attention_backward(func: Any, args: Any, kwargs: Any) -> Any:
    *tensors, dropout, is_causal = args
    _check_no_dropout(func, dropout)
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    return dispatch(attention.backward, (*tensors, mask, is_causal, scale), None)


def _check_no_dropout(func: Any, dropout: float) -> None:
    if dropout:
        raise NotImplementedError(
            f"{func._opname} has no dropout; F.scaled_dot_product_attention(..., dropout_p={dropout}) has"
        )


def _median(func: Any, args: Any, kwargs: Any) -> Any:
    """Make expanded tensors contiguous first.

    torch's CPU kernel (2.13) reads and writes outside the memory of a tensor that is expanded along the dim: wrong
    numbers, or a process that ends with a corrupted heap.
    """
    tensor = args[0]
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return dispatch_without_override(func, (tensor, *args[1:]), kwargs)


def _allclose(func: Any, args: Any, kwargs: Any) -> bool:
    filled: Any = (*args, *(1e-5, 1e-8, False)[len(args) - 2 :])
    one, other, rtol, atol, equal_nan = filled
    named = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan} | kwargs
    return bool(torch.isclose(one, other, **named).all().item())


def _nll_loss_forward(func: Any, args: Any, kwargs: Any) -> Any:
    """Divide sums: a mean of means is wrong where shards differ in size, or in how many of their targets count."""
    tensor, target, weight, reduction, ignore_index = args
    if reduction != 1 or _are_replicated(tensor, target):
        return dispatch_without_override(func, args, kwargs)
    if weight is None:
        total = (target != ignore_index).to(tensor.dtype).sum()
    else:  # the sum of the targets' weights
        total, _ = dispatch_without_override(
            func, (torch.full_like(tensor, -1.0), target, weight, 2, ignore_index), kwargs
        )
    total = _reduce_partial(total)  # once: backward divides by it too
    loss, _ = dispatch_without_override(func, (tensor, target, weight, 2, ignore_index), kwargs)
    return loss / total, total


def _nll_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, weight, reduction, ignore_index, total = args
    if reduction != 1 or _are_replicated(tensor, target):
        return dispatch_without_override(func, args, kwargs)
    return dispatch_without_override(func, (grad / total, tensor, target, weight, 2, ignore_index, total), kwargs)


def _reduce_partial(tensor: Any) -> Any:
    """Reduce a tensor that is a partial sum."""
    placements = getattr(tensor, "placements", None)  # None for local targets
    if placements is None:
        return tensor
    reduced = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    return (
        tensor if reduced == placements else call_rank_function(operators.redistribute, tensor.engine, tensor, reduced)
    )


def _are_replicated(*tensors: Any) -> bool:
    """Whether all of these are replicated, or per-rank tensors."""
    return all(
        tensor._spec.placements is None or all(placement.is_replicate() for placement in tensor._spec.placements)
        for tensor in tensors
        if isinstance(tensor, MeshTensor)
    )


def _shift(func: Any, args: Any, kwargs: Any) -> Any:
    """Shift by a number, which DTensor loses."""
    return _SHIFTS[func](*args)


_SHIFTS = {
    aten.__lshift__.Scalar: torch.bitwise_left_shift,
    aten.__rshift__.Scalar: torch.bitwise_right_shift,
}


def _is_evenly_sharded(tensor: MeshTensor) -> bool:
    return tensor._spec.placements is None or all(
        _is_even_along(tensor, placement, axis) for axis, placement in enumerate(tensor._spec.placements)
    )


def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a mean over shards that differ in size."""
    tensor = args[0]
    if _is_evenly_sharded(tensor):
        return dispatch_without_override(func, args, kwargs)
    dtype = kwargs.get("dtype")
    if func is aten.mean.default:
        return tensor.sum(dtype=dtype) / tensor.numel()
    dims = args[1] if len(args) > 1 and args[1] else list(range(tensor.dim()))
    keepdim = bool(args[2]) if len(args) > 2 else False
    count = 1
    for dim in dims:
        count *= tensor.shape[dim]
    return tensor.sum(dims, keepdim, dtype=dtype) / count


def _is_even_along(tensor: MeshTensor, placement: Any, axis: int) -> bool:
    if placement.is_replicate() or placement.is_partial():
        return True
    return bool(tensor.shape[placement.dim] % tensor.engine.axes.shape[axis] == 0)


def _refuse_data_dependent(hint: str) -> Callable[..., Any]:
    def refuse(func: Any, args: Any, kwargs: Any) -> Any:
        name = operators.name_of(func).partition("::")[2].partition(".")[0]
        raise NotImplementedError(
            f"{name}: the shape of its result depends on the data, which is on the ranks. {hint}, or take the whole "
            f"tensor here: x.full_tensor()"
        )

    return refuse


_MASK_HINT = "Use torch.where(mask, x, other) or x * mask, which keep the shape"
_RUN_ON_RANKS_HINT = "Run it where the data is: mesh.execute(fn, x)"

OVERRIDES: dict[Any, Override] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.copy_.default: _copy,
    # The norm's order determines the placement of partial results, and how they are reduced later.
    aten.linalg_vector_norm.default: _dispatch_floats_in_key,
    aten._foreach_norm.Scalar: _dispatch_floats_in_key,
    aten._conj.default: _materialize_view,
    aten._neg_view.default: _materialize_view,
    aten.equal.default: _equal,
    aten.is_pinned.default: lambda func, args, kwargs: False,  # its data is on the ranks
    aten.allclose.default: _allclose,
    aten.native_batch_norm.default: _batch_norm,
    aten.nll_loss_forward.default: _nll_loss_forward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss_forward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.fill_.Tensor: _fill,
    aten.fill_.Scalar: _fill_scalar,
    aten.gather.default: _gather,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.select_backward.default: _with_nonnegative_dim,
    aten.slice_backward.default: _with_nonnegative_dim,
    aten.__lshift__.Scalar: _shift,
    aten.__rshift__.Scalar: _shift,
    aten.is_same_size.default: _same_size,
    aten._has_same_storage_numel.default: _same_size,
    aten._has_compatible_shallow_copy_type.default: lambda func, args, kwargs: True,
    aten._to_copy.default: _to_copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _amp_unscale,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.median.dim: _median,
    aten.nanmedian.dim: _median,
    aten.nonzero.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.masked_select.default: _refuse_data_dependent(_MASK_HINT),
    aten._unique2.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.unique_dim.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.unique_consecutive.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.bincount.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
}
OVERRIDES |= dict.fromkeys(dtensor_patches.DECOMPOSED, dtensor_patches.torch_decomposition)
for _packets, _override in (
    ((aten.to,), _decompose),
    ((aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_), _reshape_in_place),
):
    OVERRIDES |= {getattr(packet, name): _override for packet in _packets for name in packet.overloads()}  # type: ignore[no-untyped-call]
