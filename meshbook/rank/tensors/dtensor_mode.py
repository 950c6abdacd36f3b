"""What DTensor computes wrongly without a word, mended or refused while a module's own code runs with DTensors.

Operations on remote tensors are not run in this mode: the controller plans what goes around such places
(`tensors/overrides`, `tensors/placement_rules`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.rank.tensors.lowering import wait_local_tensor

aten = torch.ops.aten


class DTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has each operation of a module's code read sums that are complete, and write where it says."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, DTensor):
                _reduce_partial(leaf)
        for position in _written_positions(func):
            if position < len(args):
                _refuse_copied_view(func, args[position])
        mend = _MENDED.get(func)
        return func(*args, **kwargs) if mend is None else mend(func, args, kwargs)


def _reduce_partial(tensor: DTensor) -> None:
    """Complete a sum that lies in terms on the ranks: DTensor's item() gives a term, and ones_like makes terms of 1."""
    if any(placement.is_partial() for placement in tensor.placements):
        detached: Any = tensor.detach()
        reduced = detached.redistribute(
            placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        )
        tensor._local_tensor, tensor._spec = reduced._local_tensor, reduced._spec


@functools.cache
def _written_positions(func: Any) -> tuple[int, ...]:
    return tuple(
        at
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _refuse_copied_view(func: Any, written: Any) -> None:
    if not isinstance(written, DTensor) or not written._is_view() or not isinstance(written._base, DTensor):
        return
    if not torch._C._is_alias_of(wait_local_tensor(written), wait_local_tensor(written._base)):  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{func._opname} of a part of a tensor that lies in pieces {written._base.placements}: DTensor would write "
            'into a copy. Under "replicate" use torch.where or torch.cat, or give whole inputs; strategy="ddp" and '
            '"fsdp" write as in one process, and so does meshbook.module_to_mesh'
        )


def _nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Divide sums: DTensor averages the means of shards, also where these have other numbers of targets that count."""
    tensor, target, weight, reduction, ignore_index = args
    if reduction != 1:
        return func(*args, **kwargs)
    if weight is None:
        total = (target != ignore_index).to(tensor.dtype).sum()
    else:
        total, _ = func(torch.full_like(tensor, -1.0), target, weight, 2, ignore_index)
    loss, _ = func(tensor, target, weight, 2, ignore_index)
    for made in (loss, total):
        if isinstance(made, DTensor):
            _reduce_partial(made)
    return loss / total, total


def _nll_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, tensor, target, weight, reduction, ignore_index, total = args
    if reduction != 1:
        return func(*args, **kwargs)
    return func(grad / total, tensor, target, weight, 2, ignore_index, total)


def _over_all_dims(func: Any, args: Any, kwargs: Any) -> Any:
    """Name all dims where none is named: DTensor takes the others as not reduced."""
    tensor, dims, *others = (*args, ()) if len(args) == 1 else args
    return func(tensor, dims or list(range(tensor.dim())), *others, **kwargs)


_MENDED: dict[Any, Any] = {
    aten.sum.dim_IntList: _over_all_dims,
    aten.amax.default: _over_all_dims,
    aten.amin.default: _over_all_dims,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    # The number, which DTensor loses.
    aten.__lshift__.Scalar: lambda func, args, kwargs: torch.bitwise_left_shift(*args),
    aten.__rshift__.Scalar: lambda func, args, kwargs: torch.bitwise_right_shift(*args),
}
