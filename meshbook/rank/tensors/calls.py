"""What an operation of a batch may call: torch's own operators by name, and a few functions that are ours.

A template is what the controller sends once per kind of operation: the function's name, its arguments with
placeholders for tensors and floats, and what becomes of its results. Seams: `FUNCTIONS` may be added to by whoever
imports this; the controller names one of them as `meshbook::name`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

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


def find(name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        AttributeError: this torch has none, or nobody added it to FUNCTIONS.
    """
    space, _, rest = name.partition("::")
    if name in INSTEAD:
        return INSTEAD[name]
    if space == "meshbook":
        if rest not in FUNCTIONS:  # it puts itself there
            importlib.import_module(f"meshbook.rank.tensors.{ELSEWHERE[rest]}")
        return FUNCTIONS[rest]
    operator, _, overload = rest.rpartition(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), operator), overload)
    return found


def name_of(function: Any) -> str:
    """The name that `find` finds it by."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{function.namespace}::{function._opname}.{function._overloadname}"
    return f"meshbook::{function.__name__}"


# ---------------------------------------------------------------------------------------------------------------------
# Ours. Each is called on ranks with real tensors, and on the controller with tensors of the meta device.


def redistribute(tensor: DTensor, placements: Sequence[Any]) -> DTensor:
    return tensor.redistribute(placements=list(placements), async_op=True)


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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (redistribute, as_global, as_local, reduce_local, slice_local, keep_at)
}

# Functions that are imported when an operation first names them.
ELSEWHERE = {
    "replay": "replay",
    "forget_replay": "replay",
    "module_tensors": "modules",
    "module_forward": "modules",
    "module_backward": "modules",
}


def _view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """DTensor now and then lays a shard out otherwise than it says of the whole, and then cannot view it. The shard is
    laid out as it should be first, in the tensor itself, so that the view shares its storage."""
    try:
        return aten.view.default(tensor, size)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if not isinstance(tensor, DTensor) or "view size is not compatible" not in str(error):
            raise
    local = tensor._local_tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    back = [order.index(dim) for dim in range(tensor.dim())]
    tensor._local_tensor = local.permute(order).contiguous().permute(back)
    return aten.view.default(tensor, size)  # type: ignore[no-any-return]


# Operators of torch's in whose place ranks call something of ours.
INSTEAD: dict[str, Callable[..., Any]] = {"aten::view.default": _view}
