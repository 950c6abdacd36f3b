"""Operations that DTensor has no rule for, or gives wrong numbers for, made of others that it does well.

Each is a function of (operation, args, kwargs) as torch's dispatcher has them; `MENDS` says of which operation. All run
below autograd: what is here is forward or backward, never both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from meshbook.rank.tensors import calls
from meshbook.tensors.remote import RemoteTensor, Special, call, dispatch_as_is, treat

aten = torch.ops.aten


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    return bool((one == other).all().item())


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    """DTensor has no rule for filling with a tensor; it has one for numbers, and for copies."""
    target, value = args
    if not isinstance(value, RemoteTensor):
        return target.fill_(value.item())
    return target.copy_(value.expand(target.shape))


def _fill_with_number(func: Any, args: Any, kwargs: Any) -> Any:
    """DTensor fills each rank's part of a sum."""
    target, value = args
    if not any(place.is_partial() for place in target._spec.placements or ()):
        return dispatch_as_is(func, args, kwargs)
    return target.copy_(torch.tensor(value, dtype=target.dtype, device="cpu"))


def _put(func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask] = value`. DTensor takes a mask for indices, and every rank all of it."""
    filled: Any = (*args, *(None, False)[len(args) - 3 :])
    tensor, indices, value, accumulate = filled[:4]
    accumulate = kwargs.get("accumulate", accumulate)
    given = [index for index in indices if index is not None]
    if not any(index.dtype == torch.bool for index in given):
        return dispatch_as_is(func, args, kwargs)
    mask = given[0]
    before = next(at for at, index in enumerate(indices) if index is not None)
    rest = tensor.dim() - before - mask.dim()
    if len(given) > 1 or value.dim() > rest:
        if len(given) > 1 or value.numel() != 1:
            return _refused(_MASK)(func, args, kwargs)
        value = value.reshape(())
    mask = mask.reshape((1,) * before + tuple(mask.shape) + (1,) * rest)
    filled = torch.where(mask, tensor + value if accumulate else value.to(tensor.dtype), tensor)
    return tensor.copy_(filled) if func in _IN_PLACE else filled


def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    """DTensor takes rows of the index for rows of the tensor, also where it has fewer of them."""
    tensor, dim, index = args[:3]
    if not tensor.dim() or index.dim() != tensor.dim():  # a single number, or no index at all
        return dispatch_as_is(func, args, kwargs)
    for at, length in enumerate(index.shape):
        if at != dim % tensor.dim() and length != tensor.shape[at]:
            tensor = tensor.narrow(at, 0, length)
    return dispatch_as_is(func, (tensor, dim, index, *args[3:]), kwargs)


def _by_torchs_own(func: Any, args: Any, kwargs: Any) -> Any:
    """Made of other operations, as torch's compiler has it. DTensor takes the mean of each shard's elements for that of
    all, also where shards differ in size, and tells a shard the sizes of the whole."""
    from torch._decomp import decomposition_table  # takes a while to import

    made = decomposition_table[func](*args, **kwargs)
    if func in _OF_THE_FIRSTS_DTYPE and isinstance(made, torch.Tensor):
        made = made.to(args[0].dtype)
    return made


_OF_THE_FIRSTS_DTYPE = (aten.huber_loss.default, aten.soft_margin_loss.default)


def _from_the_front(func: Any, args: Any, kwargs: Any) -> Any:
    """DTensor takes a dim that is counted from the end for no dim of the gradient's."""
    grad, sizes, dim, *rest = args
    return dispatch_as_is(func, (grad, sizes, dim % len(sizes), *rest), kwargs)


def _resolved(func: Any, args: Any, kwargs: Any) -> Any:
    """torch marks a tensor as conjugated, or negated, and has each operation see to it. DTensor loses the mark, and a
    RemoteTensor has none."""
    return _RESOLVED[func](args[0])


_RESOLVED = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}


_IN_PLACE = (aten.index_put_.default, aten._index_put_impl_.default)


def _same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


def _decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    return func.decompose(*args, **kwargs)


def _foreach_copy(func: Any, args: Any, kwargs: Any) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source)


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """What a GradScaler does before a step. It asks here at once whether it may take it, so this waits."""
    grads, found, scale = args
    if torch.stack([(grad - grad).sum().isnan() for grad in grads]).any().item():  # inf - inf is NaN too
        found.fill_(1.0)
    for grad in grads:
        grad.mul_(scale)


def _not_fused(func: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{func._opname}: this optimizer has no fused step on a mesh (Adam and AdamW have); leave fused=True out, or "
        "say foreach=True"
    )


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """`x.to("meta")` is no remote tensor: torch's own code asks so for the shape of a result, and wants no data."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "meta":
        return dispatch_as_is(func, args, kwargs)
    (tensor,) = args
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kwargs.get("dtype") or tensor.dtype, device="meta")


def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """A shape that changes in place: that of the view, which the tensor then is."""
    tensor = args[0]
    name = func._opname
    # Autograd would make its views anew, of the new shape.
    if tensor.requires_grad and tensor._handle.changes is not None:
        raise NotImplementedError(
            f"{name} of a tensor with a gradient, that is a view or has views: use the one that makes a view, "
            f"x = x.{name.removesuffix('_')}(...)"
        )
    view = getattr(torch, name.removesuffix("_"))(*args, **kwargs)
    torch.Tensor.data.__set__(tensor, view)  # type: ignore[attr-defined]
    tensor._handle = view._handle
    return tensor


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Where DTensor cuts channels, and it may do so with any tensor that is cut, it notes their statistics in copies of
    the buffers, or each rank those of its own."""
    tensor, weight, bias, mean, var, training, momentum, eps = args
    cut = any(not place.is_replicate() for place in tensor._spec.placements or ())
    if not (cut and training) or mean is None:
        return dispatch_as_is(func, args, kwargs)
    made = dispatch_as_is(func, (tensor, weight, bias, None, None, training, momentum, eps), kwargs)
    number = tensor.numel() // tensor.shape[1]
    mean.lerp_(made[1].to(mean.dtype), momentum)
    var.lerp_(((made[2] ** -2 - eps) * (number / max(number - 1, 1))).to(var.dtype), momentum)
    return made


def _median(func: Any, args: Any, kwargs: Any) -> Any:
    """torch's CPU kernel (2.13) reads and writes beside the memory of a tensor that is expanded along the dim: wrong
    numbers, or a process that ends with a damaged heap."""
    tensor = args[0]
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return dispatch_as_is(func, (tensor, *args[1:]), kwargs)


def _allclose(func: Any, args: Any, kwargs: Any) -> bool:
    filled: Any = (*args, *(1e-5, 1e-8, False)[len(args) - 2 :])
    one, other, rtol, atol, equal_nan = filled
    named = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan} | kwargs
    return bool(torch.isclose(one, other, **named).all().item())


def _nll(func: Any, args: Any, kwargs: Any) -> Any:
    """The mean of means is not that of all, where shards differ in size, or in how many of their targets count."""
    tensor, target, weight, reduction, ignored = args
    if reduction != 1 or _everywhere(tensor, target):
        return dispatch_as_is(func, args, kwargs)
    if weight is None:
        total = (target != ignored).to(tensor.dtype).sum()
    else:  # of the targets' weights
        total, _ = dispatch_as_is(func, (torch.full_like(tensor, -1.0), target, weight, 2, ignored), kwargs)
    total = _summed(total)  # once: backward divides by it too
    loss, _ = dispatch_as_is(func, (tensor, target, weight, 2, ignored), kwargs)
    return loss / total, total


def _nll_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, weight, reduction, ignored, total = args
    if reduction != 1 or _everywhere(tensor, target):
        return dispatch_as_is(func, args, kwargs)
    return dispatch_as_is(func, (grad / total, tensor, target, weight, 2, ignored, total), kwargs)


def _summed(tensor: Any) -> Any:
    """Without parts of a sum."""
    places = getattr(tensor, "placements", None)  # none, where the targets are here
    if places is None:
        return tensor
    whole = tuple(Replicate() if place.is_partial() else place for place in places)
    return tensor if whole == places else call(calls.redistribute, tensor.engine, tensor, whole)


def _everywhere(*tensors: Any) -> bool:
    """Whether every rank has all of these, or each its own."""
    return all(
        tensor._spec.placements is None or all(place.is_replicate() for place in tensor._spec.placements)
        for tensor in tensors
        if isinstance(tensor, RemoteTensor)
    )


def _shift(func: Any, args: Any, kwargs: Any) -> Any:
    """DTensor forgets the number."""
    return _SHIFTS[func](*args)


_SHIFTS = {
    aten.__lshift__.Scalar: torch.bitwise_left_shift,
    aten.__rshift__.Scalar: torch.bitwise_right_shift,
}


def _all_even(tensor: RemoteTensor) -> bool:
    return tensor._spec.placements is None or all(
        _even(tensor, place, axis) for axis, place in enumerate(tensor._spec.placements)
    )


def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    """A mean over shards that differ in size."""
    tensor = args[0]
    if _all_even(tensor):
        return dispatch_as_is(func, args, kwargs)
    dtype = kwargs.get("dtype")
    if func is aten.mean.default:
        return tensor.sum(dtype=dtype) / tensor.numel()
    dims = args[1] if len(args) > 1 and args[1] else list(range(tensor.dim()))
    keepdim = bool(args[2]) if len(args) > 2 else False
    count = 1
    for dim in dims:
        count *= tensor.shape[dim]
    return tensor.sum(dims, keepdim, dtype=dtype) / count


def _even(tensor: RemoteTensor, place: Any, axis: int) -> bool:
    if place.is_replicate() or place.is_partial():
        return True
    return bool(tensor.shape[place.dim] % tensor.engine.planner.mesh.size(axis) == 0)


def _refused(way: str) -> Callable[..., Any]:
    def refuse(func: Any, args: Any, kwargs: Any) -> Any:
        name = calls.name_of(func).partition("::")[2].partition(".")[0]
        raise NotImplementedError(
            f"{name}: the shape of its result depends on the data, which is on the ranks. {way}, or take the whole "
            f"tensor here: x.full_tensor()"
        )

    return refuse


_MASK = "Use torch.where(mask, x, other) or x * mask, which keep the shape"
_HERE = "Run it where the data is: mesh.execute(fn, x)"

MENDS: dict[Any, Special] = {
    aten._conj.default: _resolved,
    aten._neg_view.default: _resolved,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten.native_batch_norm.default: _batch_norm,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss2d_backward.default: _nll_backward,
    aten.fill_.Tensor: _fill,
    aten.fill_.Scalar: _fill_with_number,
    aten.gather.default: _gather,
    aten.index_put.default: _put,
    aten.index_put_.default: _put,
    aten._index_put_impl_.default: _put,
    aten.select_backward.default: _from_the_front,
    aten.slice_backward.default: _from_the_front,
    aten.__lshift__.Scalar: _shift,
    aten.__rshift__.Scalar: _shift,
    aten.is_same_size.default: _same_size,
    aten._has_same_storage_numel.default: _same_size,
    aten._has_compatible_shallow_copy_type.default: lambda func, args, kwargs: True,
    aten._to_copy.default: _to_copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._fused_sgd_.default: _not_fused,
    aten._fused_sgd_.tensor_lr: _not_fused,
    aten._fused_adagrad_.default: _not_fused,
    aten._fused_adagrad_.tensor_lr: _not_fused,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.median.dim: _median,
    aten.nanmedian.dim: _median,
    aten.nonzero.default: _refused(_HERE),
    aten.masked_select.default: _refused(_MASK),
    aten._unique2.default: _refused(_HERE),
    aten.unique_dim.default: _refused(_HERE),
    aten.unique_consecutive.default: _refused(_HERE),
    aten.bincount.default: _refused(_HERE),
}
MENDS |= dict.fromkeys(
    (
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.native_group_norm_backward.default, aten.mse_loss.default, aten.mse_loss_backward.default,
        aten.huber_loss.default, aten.huber_loss_backward.default, aten.soft_margin_loss.default,
        aten.soft_margin_loss_backward.default, aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default,
    ),
    _by_torchs_own,
)  # fmt: skip
for _packets, _mend in (
    ((aten.to,), _decomposed),
    ((aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_), _reshaped),
):
    MENDS |= {getattr(packet, name): _mend for packet in _packets for name in packet.overloads()}  # type: ignore[no-untyped-call]
treat(MENDS)
