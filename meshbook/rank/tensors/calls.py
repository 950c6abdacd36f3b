"""What an operation of a batch may call: torch's own operators by name, and a few functions that are ours.

A template is what the controller sends once per kind of operation: the function's name, its arguments with
placeholders for tensors and floats, and what becomes of its results. Seams: `FUNCTIONS` may be added to by whoever
imports this; the controller names one of them as `meshbook::name`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from meshbook.rank.tensors import rules
from meshbook.rank.tensors.lowering import settled

aten = torch.ops.aten


class _Mark:
    """A placeholder among a template's arguments; pickles as the one object of its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _mark, (self.name,)

    def __repr__(self) -> str:
        return f"<{self.name}>"


TENSOR, FLOAT, MESH = _Mark("tensor"), _Mark("float"), _Mark("mesh")


def _mark(name: str) -> _Mark:
    return {"tensor": TENSOR, "float": FLOAT, "mesh": MESH}[name]


@dataclass(frozen=True)
class Sent:
    """A template as it travels, pickled.

    Attributes:
        number: its own.
        function: "aten::add.Tensor", or "meshbook::redistribute".
        args, kwargs: with TENSOR, FLOAT and MESH where the operation's own go, in the order of its numbers.
        outputs: one per result: -1 a new tensor, None nothing, else the index of the input that it is.
        returns: "none", "one", "many".
        mutates: indices of inputs that it changes.
        communicates: ranks wait for each other in it.
        seeded: its last float is a seed for the random numbers it draws.
        default: torch's default dtype, where its result is of that and it is not the usual one.
        overwrites: of what it changes it leaves nothing.
        views: what it makes shares the storage of its first tensor.
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
    default: str | None = None
    overwrites: bool = False
    views: bool = False


def find(name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        AttributeError: this torch has none, or nobody added it to FUNCTIONS.
    """
    space, _, rest = name.partition("::")
    if space in WRAPPERS:
        return WRAPPERS[space](find(rest))
    if space == "meshbook":
        if rest not in FUNCTIONS:  # it puts itself there
            importlib.import_module(f"meshbook.rank.tensors.{ELSEWHERE[rest]}")
        return FUNCTIONS[rest]
    operator, _, overload = rest.rpartition(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), operator), overload)
    rules.tell_numbers_apart(found)
    return AsLaidOut(found) if found in _VIEWS else found


def name_of(function: Any) -> str:
    """The name that `find` finds it by."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{function.namespace}::{function._opname}.{function._overloadname}"
    if isinstance(function, (Whole, Reduced)):
        return f"{function.space}::{name_of(function.function)}"
    return f"meshbook::{function.__name__}"


_VIEWS = (aten.view.default, aten._unsafe_view.default)


class AsLaidOut:
    """A view. A DTensor now and then says other strides than its piece has, and refuses a view for them."""

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.tags = function, function._schema, function.tags

    def __call__(self, tensor: Any, size: Sequence[int]) -> Any:
        try:
            return self.function(tensor, size)
        except RuntimeError as error:
            if "Cannot view a tensor" not in str(error) or not isinstance(tensor, DTensor):
                raise
        # The controller has planned it for a tensor that lies as its shape says.
        strides = torch.empty(tensor.shape, device="meta").stride()
        local, mesh, places = settled(tensor), tensor.device_mesh, tensor.placements
        there = DTensor.from_local(local, mesh, places, run_check=False, shape=tensor.shape, stride=strides)
        return self.function(there, size)


class Whole:
    """An operator of torch's on tensors that every rank has all of, and does the same with."""

    space = "whole"

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.tags = function, function._schema, function.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meshes = []

        def local(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            meshes.append(leaf.device_mesh)
            return settled(leaf)

        args, kwargs = pytree.tree_map(local, (args, kwargs))
        seed = getattr(dtensor_random._rng_tracker, "seed", None)
        with rules.numbers_from(seed) if seed is not None else contextlib.nullcontext():
            results = self.function(*args, **kwargs)

        def seen(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                return leaf
            return DTensor.from_local(leaf, meshes[0], [Replicate()] * meshes[0].ndim, run_check=False)

        return pytree.tree_map(seen, results)


class Reduced:
    """An operator of torch's whose results are reduced at once, where DTensor leaves them in parts that it computes
    wrong numbers with: see `may_stay`."""

    space = "reduced"

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.tags = function, function._schema, function.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function in _MASKED:
            _check_indices(self.function, *args[:3])
        truth = self.function._opname in ("any", "all")  # of bytes they are bytes
        return pytree.tree_map(lambda leaf: _reduced(leaf, truth), self.function(*args, **kwargs))


WRAPPERS: dict[str, Callable[[Any], Callable[..., Any]]] = {kind.space: kind for kind in (Whole, Reduced)}


def may_stay(place: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor may be in such parts. DTensor's pointwise rules know sums and means of numbers with fractions;
    of integers they make fractions, of truth values sums, and maxima and norms they take for sums here and there."""
    if not place.is_partial():
        return True
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return type(place) is Partial and place.reduce_op in ("sum", "avg") and not exact


# What DTensor does with the rows that a rank has, and takes the others' for zeros.
_MASKED = (aten.embedding.default, aten.gather.default)


def _check_indices(function: Any, tensor: Any, *args: Any) -> None:
    """An index that is in no rank's rows would be taken for another rank's, and give zeros.

    Raises:
        IndexError: there is one. On a GPU the device says so, as with torch's own.
    """
    dim, indices = (0, args[0]) if function is aten.embedding.default else args
    local, rows = settled(indices), tensor.shape[dim] if tensor.dim() else 1
    if local.is_meta:
        return
    wrong = (local < 0) | (local >= rows)
    if local.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"index out of range: dim {dim} has {rows} rows")
    elif wrong.any():
        raise IndexError(f"index out of range: {int(local[wrong][0])}, and dim {dim} has {rows} rows")


def _reduced(tensor: Any, truth: bool) -> Any:
    """The tensor without the parts that may not stay.

    Args:
        truth: its numbers are truth values, whatever its dtype.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    places = [place if may_stay(place, tensor.dtype) else Replicate() for place in tensor.placements]
    if places == list(tensor.placements):
        return tensor
    if tensor.dtype is not torch.bool and not truth:
        return tensor.redistribute(placements=places)
    places_now: Any = tensor.placements
    # A sum of truth values is none.
    parts: list[Any] = [
        Partial("min" if place.reduce_op in ("product", "min") else "max") if place.is_partial() else place
        for place in places_now
    ]
    local = settled(tensor).to(torch.uint8)
    counted = DTensor.from_local(
        local, tensor.device_mesh, parts, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return counted.redistribute(placements=places).to(tensor.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Ours. Each is called on ranks with real tensors, and on the controller with tensors of the meta device.


def redistribute(tensor: DTensor, placements: Sequence[Any]) -> DTensor:
    return tensor.redistribute(placements=list(placements), async_op=True)


def in_parts(tensor: DTensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """As parts of a sum (or a mean, a maximum) over axes along which it is whole."""
    local = settled(tensor)
    for axis, (before, after) in enumerate(zip(tensor.placements, placements, strict=True)):
        if before != after and after.reduce_op == "sum" and mesh.get_local_rank(axis) != 0:
            local = torch.zeros_like(local)
    return DTensor.from_local(
        local, mesh, list(placements), run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def as_global(local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """Per-rank tensors seen as one: the same storage."""
    return DTensor.from_local(local, mesh, list(placements), run_check=False)


def as_local(tensor: DTensor) -> torch.Tensor:
    """Each rank's own piece: the same storage."""
    local: torch.Tensor = tensor.to_local()
    return local


def reduce_local(local: torch.Tensor, mesh: Any, axis: int, op: str) -> torch.Tensor:
    """Per-rank tensors, reduced over one axis of the mesh."""
    places: list[Any] = [Replicate()] * mesh.ndim
    places[axis] = Partial(op)
    whole: list[Any] = [Replicate()] * mesh.ndim
    reduced = DTensor.from_local(local, mesh, places, run_check=False).redistribute(placements=whole)
    return reduced.to_local().clone() if mesh.size(axis) == 1 else reduced.to_local()


def slice_local(local: torch.Tensor, mesh: Any, axis: int, place: int) -> torch.Tensor:
    """What the rank at `place` of the axis holds, on every rank of that axis."""
    if local.is_meta:
        return torch.empty_like(local)
    group = mesh.get_group(axis)
    out = local.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, dist.get_global_rank(group, place), group)
    return out


def keep_at(local: torch.Tensor, mesh: Any, axis: int, place: int) -> torch.Tensor:
    """The tensor on the ranks at `place` of the axis, zeros on the others."""
    mine = local.is_meta or mesh.get_local_rank(axis) == place
    return local.clone() if mine else torch.zeros_like(local)


def take_from(tensor: DTensor, mesh: Any, axis: int, place: int) -> None:
    """Overwrite the copies along an axis with the one of the rank at that place of it."""
    local, group = settled(tensor), mesh.get_group(axis)
    whole = local.contiguous()
    dist.broadcast(whole, dist.get_global_rank(group, place), group)
    if whole is not local:
        local.copy_(whole)


def is_whole(span: tuple[int | None, int, int, int], length: int) -> bool:
    """Whether a dim of a view is all of a dim of that length."""
    dim, first, step, count = span
    return dim is not None and (first, step, count) == (0, 1, length)


def write_part(
    tensor: DTensor, part: DTensor, box: Any, size: Sequence[int], stride: Sequence[int], offset: int
) -> None:
    """What a view that was copied has now, into this rank's piece of what it is a view of. Ranks do not meet in it.

    Args:
        part: cut as the tensor is along dims that are all of one of the tensor's, and whole along others.
        box: per dim of the tensor the view's dim, the first place, the step and how many; None: no such box.
        size, stride, offset: the view's, as if the tensor lay in one piece.
    """
    mine, piece = settled(tensor), settled(part)
    lengths, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if box is None:
        _write_scattered(mine, piece, tensor.shape, lengths, starts, size, stride, offset)
        return
    order: list[int] = []
    for at, span in enumerate(box):
        dim, first, step, count = span
        if dim is not None:
            order.append(dim)
        if is_whole(span, tensor.shape[at]):
            continue
        low = max(-((first - starts[at]) // step), 0)  # of the view's rows the first that is here
        high = min(-((first - starts[at] - lengths[at]) // step), count)
        if low >= high:
            return
        mine = mine.narrow(at, first + low * step - starts[at], (high - low - 1) * step + 1)
        mine = mine[(slice(None),) * at + (slice(None, None, step),)]
        if dim is not None:
            piece = piece.narrow(dim, low, high - low)
    rest = [dim for dim in range(piece.dim()) if dim not in order]  # of one row each
    mine.copy_(piece.permute(order + rest).reshape(mine.shape))


def _write_scattered(
    mine: torch.Tensor,
    piece: torch.Tensor,
    shape: Sequence[int],
    lengths: Sequence[int],
    starts: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> None:
    flat = torch.full((), offset, device=piece.device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        places = torch.arange(length, device=piece.device) * step
        flat = flat + places.view([-1 if other == dim else 1 for other in range(len(size))])
    here = torch.ones_like(flat, dtype=torch.bool)
    found = []
    for length, own, start in reversed(list(zip(shape, lengths, starts, strict=True))):
        place = flat % length - start
        flat = flat // length
        here &= (place >= 0) & (place < own)
        found.append(place)
    mine.index_put_(tuple(place[here] for place in reversed(found)), piece[here])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        redistribute, as_global, as_local, reduce_local, slice_local, keep_at, in_parts, write_part, take_from,
    )
}  # fmt: skip

# Functions that are imported when an operation first names them.
ELSEWHERE = {
    "replay": "replay",
    "forget_replay": "replay",
    "module_tensors": "modules",
    "module_forward": "modules",
    "module_kept": "modules",
    "module_backward": "modules",
    "set_modes": "modes",
    "begin_step": "agreement",
    "end_step": "agreement",
}

# Operations that leave nothing of what their target was: a fault of it is over with them.
_OVERWRITE = {
    "aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::bernoulli_",
    "aten::random_", "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_",
    "aten::_foreach_zero_", "aten::_foreach_copy_",
}  # fmt: skip


def overwrites(function: Any) -> bool:
    """Whether all that an operation changes is written anew: by its name, or with out=."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return False
    if schema.name in _OVERWRITE:
        return True
    written = [arg for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return bool(written) and all(arg.is_out for arg in written)
