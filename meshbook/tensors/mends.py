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


def _mse(func: Any, args: Any, kwargs: Any) -> Any:
    """The mean of each shard's elements is not the mean of all when shards differ in size."""
    filled: Any = (*args, 1)[:3]
    tensor, target, reduction = filled
    return _reduced((tensor - target).square(), reduction)


def _reduced(losses: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == 0:
        return losses
    return losses.sum() / losses.numel() if reduction == 1 else losses.sum()


def _share(grad: torch.Tensor, elements: int, reduction: int) -> torch.Tensor:
    """The gradient that reaches each element's loss."""
    return grad / elements if reduction == 1 else grad


def _bce(func: Any, args: Any, kwargs: Any) -> Any:
    filled: Any = (*args, *(None, 1)[len(args) - 2 :])
    tensor, target, weight, reduction = filled
    losses = -(target * tensor.log().clamp(min=-100.0) + (1.0 - target) * (1.0 - tensor).log().clamp(min=-100.0))
    return _reduced(losses if weight is None else losses * weight, reduction)


def _bce_backward(func: Any, args: Any, kwargs: Any) -> Any:
    filled: Any = (*args, *(None, 1)[len(args) - 3 :])
    grad, tensor, target, weight, reduction = filled
    slope = (tensor - target) / ((1.0 - tensor) * tensor).clamp(min=1e-12)  # torch's own epsilon
    slope = slope * _share(grad, _numel(tensor, target), reduction)
    return slope if weight is None else slope * weight


def _group_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """torch's is told sizes of the whole batch, which are not those of a shard of it."""
    grad, tensor, mean, rstd, weight, batch, channels, spatial, groups, wanted = args
    grouped = (batch, groups, channels // groups, spatial)
    mean, rstd = mean.view(batch, groups, 1, 1), rstd.view(batch, groups, 1, 1)
    normal = (tensor.reshape(grouped) - mean) * rstd
    parts = grad.reshape(grouped)
    scaled = parts if weight is None else parts * weight.view(1, groups, channels // groups, 1)
    to_input = None
    if wanted[0]:
        level = scaled.mean((2, 3), keepdim=True)
        slope = (scaled * normal).mean((2, 3), keepdim=True)
        to_input = (rstd * (scaled - level - normal * slope)).reshape(tensor.shape)
    to_weight = (parts * normal).sum((0, 3)).reshape(channels) if wanted[1] else None
    to_bias = parts.sum((0, 3)).reshape(channels) if wanted[2] else None
    return to_input, to_weight, to_bias


def _allclose(func: Any, args: Any, kwargs: Any) -> bool:
    filled: Any = (*args, *(1e-5, 1e-8, False)[len(args) - 2 :])
    one, other, rtol, atol, equal_nan = filled
    named = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan} | kwargs
    return bool(torch.isclose(one, other, **named).all().item())


def _nll(func: Any, args: Any, kwargs: Any) -> Any:
    """The mean over shards of different size: over the whole."""
    if args[3] != 1 or _all_even(args[0]):
        return dispatch_as_is(func, args, kwargs)
    return dispatch_as_is(func, tuple(_whole(arg) for arg in args), kwargs)


def _nll_backward(func: Any, args: Any, kwargs: Any) -> Any:
    if args[4] != 1 or _all_even(args[1]):
        return dispatch_as_is(func, args, kwargs)
    return dispatch_as_is(func, tuple(_whole(arg) for arg in args), kwargs)


def _whole(arg: Any) -> Any:
    if not isinstance(arg, RemoteTensor) or arg._spec.placements is None:
        return arg
    whole = (Replicate(),) * len(arg._spec.placements)
    return arg if arg._spec.placements == whole else call(calls.redistribute, arg.engine, arg, whole)


def _all_even(tensor: RemoteTensor) -> bool:
    return tensor._spec.placements is None or all(
        _even(tensor, place, axis) for axis, place in enumerate(tensor._spec.placements)
    )


def _mse_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, reduction = args
    return (tensor - target) * (2.0 * _share(grad, _numel(tensor, target), reduction))


def _huber(func: Any, args: Any, kwargs: Any) -> Any:
    filled: Any = (*args, *(1, 1.0)[len(args) - 2 :])
    tensor, target, reduction, delta = filled
    off = (tensor - target).abs()
    return _reduced(torch.where(off < delta, 0.5 * off * off, delta * (off - 0.5 * delta)), reduction)


def _huber_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, reduction, delta = args
    off = tensor - target
    return off.clamp(-delta, delta) * _share(grad, _numel(tensor, target), reduction)


def _smooth_l1(func: Any, args: Any, kwargs: Any) -> Any:
    filled: Any = (*args, *(1, 1.0)[len(args) - 2 :])
    tensor, target, reduction, beta = filled
    off = (tensor - target).abs()
    losses = torch.where(off < beta, off * off * (0.5 / beta), off - 0.5 * beta) if beta else off
    return _reduced(losses, reduction)


def _smooth_l1_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, reduction, beta = args
    off = tensor - target
    slope = (off / beta).clamp(-1.0, 1.0) if beta else off.sign()
    return slope * _share(grad, _numel(tensor, target), reduction)


def _numel(tensor: torch.Tensor, target: torch.Tensor) -> int:
    return int(torch.broadcast_shapes(tensor.shape, target.shape).numel())  # type: ignore[no-untyped-call]


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
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten.binary_cross_entropy.default: _bce,
    aten.binary_cross_entropy_backward.default: _bce_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss2d_backward.default: _nll_backward,
    aten.fill_.Tensor: _fill,
    aten.mse_loss.default: _mse,
    aten.mse_loss_backward.default: _mse_backward,
    aten.huber_loss.default: _huber,
    aten.huber_loss_backward.default: _huber_backward,
    aten.smooth_l1_loss.default: _smooth_l1,
    aten.smooth_l1_loss_backward.default: _smooth_l1_backward,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.nonzero.default: _refused(_HERE),
    aten.masked_select.default: _refused(_MASK),
    aten._unique2.default: _refused(_HERE),
    aten.unique_dim.default: _refused(_HERE),
    aten.unique_consecutive.default: _refused(_HERE),
    aten.bincount.default: _refused(_HERE),
}
treat(MENDS)
