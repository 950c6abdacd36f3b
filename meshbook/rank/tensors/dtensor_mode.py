"""What DTensor computes wrongly without a word, mended or refused while a module's own code runs with DTensors.

Operations on remote tensors are not run in this mode: the controller plans them, by the same `composed_ops` and
`placement_rules`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import dtensor_errors
from meshbook.rank.tensors import placement_rules as rules
from meshbook.rank.tensors.composed_ops import COMPOSED
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.schemas import expand_reduction_dims, functional_variant, mutated_inputs


class DTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has each operation of a module's code read sums that are complete, and write where it says."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runs_as_it_is = False  # the next operation: it has been composed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composition = None if self._runs_as_it_is else COMPOSED.get(func)
        self._runs_as_it_is = False
        if composition is not None:
            with self:
                return composition(self, func, args, kwargs)
        return _run_placed(func, args, kwargs)

    # ---- for what operations are composed of

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._runs_as_it_is = True
        return func(*args, **kwargs)

    def run_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _run_whole(func, args, kwargs)

    def reduce_partial(self, tensor: Any) -> Any:
        return tensor  # what reads it does so

    def mesh_shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.device_mesh.shape) if isinstance(tensor, DTensor) else ()


@dataclasses.dataclass(frozen=True)
class _Placed:
    """What the rules ask of an operand (`shards.Spec`)."""

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    placements: tuple[Any, ...] | None
    has_partial = False

    @property
    def is_inexact(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


def _run_placed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on operands that are placed as it needs them."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    distributed = [tensor for tensor in inputs if isinstance(tensor, DTensor)]
    if not distributed:
        return func(*args, **kwargs)
    for tensor in distributed:
        _reduce_partial(tensor)
    written = mutated_inputs(func, args, kwargs, inputs)
    for at in written:
        _refuse_copied_view(func, inputs[at])
    args = expand_reduction_dims(func, args)
    if func in _VIEWS and isinstance(args[0], DTensor):
        args = (_contiguous_as_reported(args[0]), *args[1:])
    if all(placement.is_replicate() for tensor in distributed for placement in tensor.placements):
        return _run_or_whole(func, args, kwargs)
    axes = _axes(distributed[0].device_mesh)
    replicated = (Replicate(),) * len(axes.shape)
    specs = [
        _Placed(tensor.shape, tensor.stride(), tensor.dtype, getattr(tensor, "placements", replicated))
        for tensor in inputs
    ]
    if moves := rules.moves_for_op(func, args, specs, axes):
        return _run_moved(func, args, kwargs, inputs, moves)
    try:
        results = _run_or_whole(func, args, kwargs)
    except Exception as error:  # of DTensor's rules, on every rank alike
        if moves := dtensor_errors.moves_after_error(error, specs, len(replicated)):
            return _run_moved(func, args, kwargs, inputs, moves)
        if not written or not dtensor_errors.is_placement_change(error):
            raise
        return _write(func, inputs[written[0]], args, kwargs)
    made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, DTensor)]
    if not written and (moves := rules.moves_for_results(func, specs, made, axes)):
        return _run_moved(func, args, kwargs, inputs, moves)
    return results


# Which need the strides that the tensor reports.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _contiguous_as_reported(tensor: DTensor) -> DTensor:
    """Return a DTensor whose piece is contiguous if it says so: it may report another order of dims than that has."""
    local = wait_local_tensor(tensor)
    if local.is_contiguous() or not tensor.is_contiguous():
        return tensor
    return DTensor(local.contiguous(), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _run_moved(func: Any, args: Any, kwargs: Any, inputs: Sequence[Any], moves: rules.Moves) -> Any:
    """Run an operation again, with inputs brought to other placements first."""
    moved = {
        id(inputs[at]): inputs[at].detach().redistribute(placements=placements)
        for at, placements in moves
        if isinstance(inputs[at], DTensor)
    }
    target = next((inputs[at] for at in mutated_inputs(func, args, kwargs, inputs) if id(inputs[at]) in moved), None)
    new_args, new_kwargs = pytree.tree_map(lambda leaf: moved.get(id(leaf), leaf), (args, kwargs))
    if target is None:
        return _run_placed(func, new_args, new_kwargs)
    return _write(func, target, new_args, new_kwargs)


def _write(func: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Write what the variant of an operation that makes a new tensor gives into the first input."""
    other = functional_variant(func)
    if other is None:
        raise NotImplementedError(f"{func._opname} of a tensor that lies in pieces {target.placements}: {_WAY_ROUND}")
    made = _run_placed(other, args, kwargs)
    return target.copy_(made.redistribute(placements=target.placements) if isinstance(made, DTensor) else made)


def _run_or_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation by DTensor's rule or, if it has none, on whole tensors."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if not dtensor_errors.is_missing_rule(func, error):
            raise
        return _run_whole(func, args, kwargs)


def _run_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Have every rank run an operation on whole tensors: what it gives is replicated."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    mesh = inputs[0].device_mesh
    replicated = [Replicate()] * mesh.ndim
    if written := mutated_inputs(func, args, kwargs, inputs):
        return _write(func, inputs[written[0]], args, kwargs)

    def whole(tensor: DTensor) -> torch.Tensor:
        detached: Any = tensor.detach()
        local = wait_local_tensor(detached.redistribute(placements=replicated))
        if "as_strided" in func._opname and local.stride() != tensor.stride():
            raise NotImplementedError(f"{func._opname} of a tensor that lies in pieces. {_WAY_ROUND}")
        return local

    # A view of a copy of an input is refused when it is written to.
    local_args, local_kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
    made = func(*local_args, **local_kwargs)
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: DTensor.from_local(tensor, mesh, replicated, run_check=False), made
    )


@functools.cache
def _axes_of(names: tuple[str, ...], shape: tuple[int, ...]) -> MeshAxes:
    return MeshAxes.of(dict(zip(names, shape, strict=True)))


def _axes(mesh: Any) -> MeshAxes:
    return _axes_of(tuple(mesh.mesh_dim_names), tuple(mesh.shape))


def _reduce_partial(tensor: DTensor) -> None:
    """Complete a sum that lies in terms on the ranks: DTensor's item() gives a term, and ones_like makes terms of 1."""
    if any(placement.is_partial() for placement in tensor.placements):
        detached: Any = tensor.detach()
        reduced = detached.redistribute(
            placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        )
        tensor._local_tensor, tensor._spec = reduced._local_tensor, reduced._spec


_WAY_ROUND = (
    'Under "replicate" use torch.where or torch.cat, or give whole inputs; strategy="ddp" and "fsdp" compute as in one '
    "process, and so does meshbook.module_to_mesh"
)


def _refuse_copied_view(func: Any, written: Any) -> None:
    if not isinstance(written, DTensor) or not written._is_view() or not isinstance(written._base, DTensor):
        return
    if not torch._C._is_alias_of(wait_local_tensor(written), wait_local_tensor(written._base)):  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{func._opname} of a part of a tensor that lies in pieces {written._base.placements}: DTensor would write "
            f"into a copy. {_WAY_ROUND}"
        )
