"""Functions that an operation of a batch may call: torch's operators by name, and a few of Meshbook's own.

The controller sends a template once per kind of operation: the function's name, its arguments with placeholders for
tensors and floats, and what happens to its results. Other modules may add to `FUNCTIONS` when they are imported; the
controller refers to an entry as `meshbook::name`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from meshbook.rank.tensors import dtensor_patches
from meshbook.rank.tensors.lowering import wait_local_tensor

aten = torch.ops.aten


class _Placeholder:
    """A placeholder among a template's arguments; unpickles to the one object of its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _placeholder, (self.name,)

    def __repr__(self) -> str:
        return f"<{self.name}>"


TENSOR, FLOAT, MESH = _Placeholder("tensor"), _Placeholder("float"), _Placeholder("mesh")


def _placeholder(name: str) -> _Placeholder:
    return {"tensor": TENSOR, "float": FLOAT, "mesh": MESH}[name]


@dataclass(frozen=True)
class TemplateMessage:
    """A template as it is sent, pickled.

    Attributes:
        number: its number.
        function: "aten::add.Tensor", or "meshbook::redistribute".
        args, kwargs: with TENSOR, FLOAT and MESH in place of the operation's own values, in the order of the stream.
        outputs: one per result: -1 a new tensor, None nothing, else the index of the input that it is.
        returns: "none", "one", "many".
        mutates: indices of inputs that it mutates.
        communicates: whether ranks wait for each other in it.
        seeded: whether its last float is a seed for the random numbers it draws.
        default_dtype: torch's default dtype, if its result has that dtype and it is not the usual one.
        overwrites: whether it overwrites all of what it mutates.
        is_view: whether its result shares the storage of its first tensor.
        placements: those planned for each new tensor (None: each rank has one of its own); None: they are not checked.
    """

    number: int
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    returns: str
    mutates: tuple[int, ...]
    communicates: bool
    seeded: bool
    default_dtype: str | None = None
    overwrites: bool = False
    is_view: bool = False
    placements: tuple[tuple[Any, ...] | None, ...] | None = None


def find_function(name: str) -> Callable[..., Any]:
    """Return the function of that name.

    Raises:
        AttributeError: this torch has none, and `FUNCTIONS` has none.
    """
    namespace, _, function_name = name.partition("::")
    if namespace in OP_WRAPPERS:
        return OP_WRAPPERS[namespace](find_function(function_name))
    if namespace == "meshbook":
        if function_name not in FUNCTIONS:  # the import registers it
            importlib.import_module(f"meshbook.rank.tensors.{LAZY_FUNCTION_MODULES[function_name]}")
        return FUNCTIONS[function_name]
    operator, _, overload = function_name.rpartition(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    dtensor_patches.include_scalars_in_cache_key(found)
    return StrideTolerantView(found) if found in _VIEW_OPS else found


def name_of(function: Any) -> str:
    """Return the name by which `find_function` finds it."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{function.namespace}::{function._opname}.{function._overloadname}"
    if isinstance(function, (ReplicatedOp, ReducedOp)):
        return f"{function.namespace}::{name_of(function.function)}"
    return f"meshbook::{function.__name__}"


_VIEW_OPS = (aten.view.default, aten._unsafe_view.default)


class StrideTolerantView:
    """A view operator that tolerates wrong strides: a DTensor may report other strides than its shard has and fail."""

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.tags = function, function._schema, function.tags

    def __call__(self, tensor: Any, size: Sequence[int]) -> Any:
        try:
            return self.function(tensor, size)
        except RuntimeError as error:
            if "Cannot view a tensor" not in str(error) or not isinstance(tensor, DTensor):
                raise
        # The controller has planned it for a contiguous tensor of this shape.
        strides = torch.empty(tensor.shape, device="meta").stride()
        local, mesh, placements = wait_local_tensor(tensor), tensor.device_mesh, tensor.placements
        restrided = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=strides)
        return self.function(restrided, size)


class ReplicatedOp:
    """A torch operator on replicated tensors, with which every rank does the same."""

    namespace = "whole"

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.tags = function, function._schema, function.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meshes = []

        def to_local(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            meshes.append(leaf.device_mesh)
            return wait_local_tensor(leaf)

        args, kwargs = pytree.tree_map(to_local, (args, kwargs))
        seed = dtensor_patches.RNG_TRACKER.seed
        with dtensor_patches.fork_rng_with_seed(seed) if seed is not None else contextlib.nullcontext():
            results = self.function(*args, **kwargs)

        def to_replicated(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                return leaf
            return DTensor.from_local(leaf, meshes[0], [Replicate()] * meshes[0].ndim, run_check=False)

        return pytree.tree_map(to_replicated, results)


class ReducedOp:
    """A torch operator whose results are reduced at once.

    DTensor would leave them partial and compute wrong numbers from that: see `may_stay_partial`.
    """

    namespace = "reduced"

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.tags = function, function._schema, function.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function in _MASKED_ROW_OPS:
            _check_indices(self.function, *args[:3])
        is_boolean = self.function._opname in ("any", "all")  # on bytes they return bytes
        return pytree.tree_map(lambda leaf: _reduce_partial(leaf, is_boolean), self.function(*args, **kwargs))


OP_WRAPPERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    kind.namespace: kind for kind in (ReplicatedOp, ReducedOp)
}


def may_stay_partial(placement: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor may have this partial placement.

    DTensor's pointwise rules are correct for sums and means of floating-point numbers. They turn integers into
    fractions and booleans into sums, and sometimes treat maxima and norms as sums.
    """
    if not placement.is_partial():
        return True
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg") and not exact


# Operators for which DTensor uses the rows that a rank has and takes those of others as zeros.
_MASKED_ROW_OPS = (aten.embedding.default, aten.gather.default)


def _check_indices(function: Any, tensor: Any, *args: Any) -> None:
    """Check for an index outside all rows; each rank would take it for another's row and return zeros.

    Raises:
        IndexError: there is one. On a GPU a device-side assertion fails, as in torch.
    """
    dim, indices = (0, args[0]) if function is aten.embedding.default else args
    local, rows = wait_local_tensor(indices), tensor.shape[dim] if tensor.dim() else 1
    if local.is_meta:
        return
    out_of_range = (local < 0) | (local >= rows)
    if local.device.type != "cpu":
        torch._assert_async(~out_of_range.any(), f"index out of range: dim {dim} has {rows} rows")
    elif out_of_range.any():
        raise IndexError(f"index out of range: {int(local[out_of_range][0])}, and dim {dim} has {rows} rows")


def _reduce_partial(tensor: Any, is_boolean: bool) -> Any:
    """Reduce the partial placements of a tensor that may not stay.

    Args:
        is_boolean: whether its values are booleans, whatever its dtype.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [
        placement if may_stay_partial(placement, tensor.dtype) else Replicate() for placement in tensor.placements
    ]
    if placements == list(tensor.placements):
        return tensor
    if tensor.dtype is not torch.bool and not is_boolean:
        return tensor.redistribute(placements=placements)
    current_placements: Any = tensor.placements
    # Booleans cannot be summed.
    partial_placements: list[Any] = [
        Partial("min" if placement.reduce_op in ("product", "min") else "max") if placement.is_partial() else placement
        for placement in current_placements
    ]
    local = wait_local_tensor(tensor).to(torch.uint8)
    counted = DTensor.from_local(
        local, tensor.device_mesh, partial_placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return counted.redistribute(placements=placements).to(tensor.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Meshbook's own functions. Each is called on ranks with real tensors, and on the controller with meta tensors.


def redistribute(tensor: DTensor, placements: Sequence[Any]) -> DTensor:
    return tensor.redistribute(placements=list(placements), async_op=True)


def replicate_partials(tensor: DTensor) -> DTensor:
    """Reduce the partial placements of a tensor, if it has any. Every rank takes part."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    )


def to_partial(tensor: DTensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """Convert replicated axes to partial ones (of a sum, mean or maximum)."""
    local = wait_local_tensor(tensor)
    for axis, (before, after) in enumerate(zip(tensor.placements, placements, strict=True)):
        if before != after and after.reduce_op == "sum" and mesh.get_local_rank(axis) != 0:
            local = torch.zeros_like(local)
    return DTensor.from_local(
        local, mesh, list(placements), run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def as_global(local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """Combine per-rank tensors into one DTensor: the same storage."""
    return DTensor.from_local(local, mesh, list(placements), run_check=False)


def as_local(tensor: DTensor) -> torch.Tensor:
    """Return each rank's own shard: the same storage."""
    local: torch.Tensor = tensor.to_local()
    return local


def reduce_local(local: torch.Tensor, mesh: Any, axis: int, op: str) -> torch.Tensor:
    """Reduce per-rank tensors over one axis of the mesh."""
    partial_placements: list[Any] = [Replicate()] * mesh.ndim
    partial_placements[axis] = Partial(op)
    replicated: list[Any] = [Replicate()] * mesh.ndim
    reduced = DTensor.from_local(local, mesh, partial_placements, run_check=False).redistribute(placements=replicated)
    return reduced.to_local().clone() if mesh.size(axis) == 1 else reduced.to_local()


def slice_local(local: torch.Tensor, mesh: Any, axis: int, position: int) -> torch.Tensor:
    """Return the tensor of the rank at `position` of the axis, on every rank of that axis."""
    if local.is_meta:
        return torch.empty_like(local)
    group = mesh.get_group(axis)
    out = local.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, dist.get_global_rank(group, position), group)
    return out


def zero_except_at(local: torch.Tensor, mesh: Any, axis: int, position: int) -> torch.Tensor:
    """Return the tensor on the ranks at `position` of the axis, zeros on the others."""
    is_mine = local.is_meta or mesh.get_local_rank(axis) == position
    return local.clone() if is_mine else torch.zeros_like(local)


def broadcast_from(tensor: DTensor, mesh: Any, axis: int, position: int) -> None:
    """Overwrite the replicas along an axis with that of the rank at `position`."""
    local, group = wait_local_tensor(tensor), mesh.get_group(axis)
    contiguous = local.contiguous()
    dist.broadcast(contiguous, dist.get_global_rank(group, position), group)
    if contiguous is not local:
        local.copy_(contiguous)


def is_full_span(span: tuple[int | None, int, int, int], length: int) -> bool:
    """Whether a dim of a view covers a complete dim of that length."""
    dim, first, step, count = span
    return dim is not None and (first, step, count) == (0, 1, length)


def write_view(
    tensor: DTensor, view: DTensor, box: Any, size: Sequence[int], stride: Sequence[int], offset: int
) -> None:
    """Write the current values of a view, which is a copy, into this rank's shard of its base. Runs no collective.

    Args:
        view: sharded as the tensor along dims that cover a complete dim of the tensor, and replicated along others.
        box: per dim of the tensor the view's dim, first index, step and count; None: the view is no such box.
        size, stride, offset: those of the view, as if the tensor were contiguous in one process.
    """
    own_piece, view_piece = wait_local_tensor(tensor), wait_local_tensor(view)
    lengths, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if box is None:
        _write_scattered(own_piece, view_piece, tensor.shape, lengths, starts, size, stride, offset)
        return
    order: list[int] = []
    for at, span in enumerate(box):
        dim, first, step, count = span
        if dim is not None:
            order.append(dim)
        if is_full_span(span, tensor.shape[at]):
            continue
        low = max(-((first - starts[at]) // step), 0)  # the view's first row on this rank
        high = min(-((first - starts[at] - lengths[at]) // step), count)
        if low >= high:
            return
        own_piece = own_piece.narrow(at, first + low * step - starts[at], (high - low - 1) * step + 1)
        own_piece = own_piece[(slice(None),) * at + (slice(None, None, step),)]
        if dim is not None:
            view_piece = view_piece.narrow(dim, low, high - low)
    other_dims = [dim for dim in range(view_piece.dim()) if dim not in order]  # dims of length one
    own_piece.copy_(view_piece.permute(order + other_dims).reshape(own_piece.shape))


def _write_scattered(
    own_piece: torch.Tensor,
    view_piece: torch.Tensor,
    shape: Sequence[int],
    lengths: Sequence[int],
    starts: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> None:
    flat = torch.full((), offset, device=view_piece.device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        offsets = torch.arange(length, device=view_piece.device) * step
        flat = flat + offsets.view([-1 if other == dim else 1 for other in range(len(size))])
    is_mine = torch.ones_like(flat, dtype=torch.bool)
    indices = []
    for length, own, start in reversed(list(zip(shape, lengths, starts, strict=True))):
        index = flat % length - start
        flat = flat // length
        is_mine &= (index >= 0) & (index < own)
        indices.append(index)
    own_piece.index_put_(tuple(index[is_mine] for index in reversed(indices)), view_piece[is_mine])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        redistribute, as_global, as_local, reduce_local, slice_local, zero_except_at, to_partial, write_view,
        broadcast_from,
    )
}  # fmt: skip

# Functions that are imported when an operation first names them.
LAZY_FUNCTION_MODULES = {
    "replay": "replay",
    "forget_replay": "replay",
    "module_tensors": "modules",
    "module_forward": "modules",
    "module_first_result": "modules",
    "module_backward": "modules",
    "set_modes": "modes",
    "begin_step": "agreement",
    "end_step": "agreement",
    "set_scaling": "watching",
    "take_snapshot": "loop_snapshots",
    "collect_snapshot": "loop_snapshots",
    "load_snapshot": "loop_snapshots",
    "forget_snapshots": "loop_snapshots",
}

# Operations that overwrite all of their target, which clears a fault of it.
_OVERWRITING_OPS = {
    "aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::bernoulli_",
    "aten::random_", "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_",
    "aten::_foreach_zero_", "aten::_foreach_copy_",
}  # fmt: skip


def overwrites(function: Any) -> bool:
    """Whether an operation overwrites all that it mutates: by its name, or as out= argument."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return False
    if schema.name in _OVERWRITING_OPS:
        return True
    written = [arg for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return bool(written) and all(arg.is_out for arg in written)
