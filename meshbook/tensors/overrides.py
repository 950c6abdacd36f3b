"""Operations that the controller does not simply send to the ranks.

Each override is a function of (operation, args, kwargs) as torch's dispatcher passes them; `OVERRIDES` maps operations
to overrides. All run below autograd: each is a forward or a backward, never both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from meshbook.rank.tensors import attention, operators
from meshbook.rank.tensors.composed_ops import COMPOSED, placements_of
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


def _allclose(func: Any, args: Any, kwargs: Any) -> bool:
    filled: Any = (*args, *(1e-5, 1e-8, False)[len(args) - 2 :])
    one, other, rtol, atol, equal_nan = filled
    named = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan} | kwargs
    return bool(torch.isclose(one, other, **named).all().item())


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


class _RemoteOperations:
    """Runs what an operation on remote tensors is composed of."""

    run = staticmethod(dispatch_without_override)
    run_whole = staticmethod(_refuse_data_dependent(_MASK_HINT))

    @staticmethod
    def reduce_partial(tensor: Any) -> Any:
        placements = placements_of(tensor)  # None for local targets
        if placements is None:
            return tensor
        reduced = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
        if reduced == placements:
            return tensor
        return call_rank_function(operators.redistribute, tensor.engine, tensor, reduced)

    @staticmethod
    def mesh_shape(tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.engine.axes.shape)


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
    aten.equal.default: _equal,
    aten.is_pinned.default: lambda func, args, kwargs: False,  # its data is on the ranks
    aten.allclose.default: _allclose,
    aten.fill_.Tensor: _fill,
    aten.fill_.Scalar: _fill_scalar,
    aten.is_same_size.default: _same_size,
    aten._has_same_storage_numel.default: _same_size,
    aten._has_compatible_shallow_copy_type.default: lambda func, args, kwargs: True,
    aten._to_copy.default: _to_copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _amp_unscale,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.nonzero.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.masked_select.default: _refuse_data_dependent(_MASK_HINT),
    aten._unique2.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.unique_dim.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.unique_consecutive.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
    aten.bincount.default: _refuse_data_dependent(_RUN_ON_RANKS_HINT),
}
OVERRIDES |= {
    operation: functools.partial(composition, _RemoteOperations()) for operation, composition in COMPOSED.items()
}
for _packets, _override in (
    ((aten.to,), _decompose),
    ((aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_), _reshape_in_place),
):
    OVERRIDES |= {getattr(packet, name): _override for packet in _packets for name in packet.overloads()}  # type: ignore[no-untyped-call]
