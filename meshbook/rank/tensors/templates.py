"""Templates on a rank: how each kind of operation is executed, with which function and arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.errors import PlacementError
from meshbook.rank.tensors import dtensor_patches
from meshbook.rank.tensors.operators import FLOAT, MESH, TENSOR, TemplateMessage, find_function
from meshbook.rank.tensors.results import leaves_of
from meshbook.rank.tensors.watched_ops import kind_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Caller = Callable[[list[Any], Sequence[float]], Any]  # of an operation's tensors and floats


class CompiledTemplate:
    """How one kind of operation is executed."""

    __slots__ = (
        "_call",
        "_new_outputs",
        "_placements",
        "communicates",
        "constants",
        "default_dtype",
        "is_view",
        "kind",
        "mutates",
        "name",
        "num_floats",
        "num_in",
        "num_new",
        "overwrites",
        "returns_one",
        "seeded",
    )  # fmt: skip

    def __init__(self, message: TemplateMessage, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.name, self.kind = message.function, kind_of(message.function)
        self.default_dtype = None if message.default_dtype is None else getattr(torch, message.default_dtype)
        function = _find_or_defer(message.function)
        if self.default_dtype is not None:
            function = _with_default_dtype(function, self.default_dtype)
        self.mutates = message.mutates
        self.communicates, self.seeded, self.overwrites = message.communicates, message.seeded, message.overwrites
        self.is_view = message.is_view
        self._new_outputs = [index for index, output in enumerate(message.outputs) if output == -1]
        self.num_new = len(self._new_outputs)
        self.returns_one = message.returns == "one" and self.num_new == 1
        self._placements: tuple[Any, ...] | None = message.placements  # None: not to be checked, or checked

        def fill_placeholder(leaf: Any) -> Any:
            if leaf is MESH:
                return mesh
            return device if isinstance(leaf, torch.device) else leaf

        leaves_of((message.args, message.kwargs))  # dataclasses become nodes, as where the message was written
        args, kwargs = pytree.tree_map(fill_placeholder, (message.args, message.kwargs))
        self.constants = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is float]
        self.num_in, self.num_floats, self._call = _make_caller(function, args, kwargs)
        if self.seeded:
            self.num_floats += 1
            self._call = _with_seed(self._call)

    def run(self, ins: list[Any], floats: Sequence[float]) -> Any:
        """Run one operation of this kind; return what its function returns."""
        result = self._call(ins, floats)
        if self._placements is not None:
            self._check_placements(result)
        if self.returns_one and result.__class__ is DTensor:
            meta = result._spec.tensor_meta
            if meta is not None and meta.dtype is not result._local_tensor.dtype:
                return dtensor_patches.with_actual_dtype(result)
        return result

    def _check_placements(self, result: Any) -> None:
        """Check the first results of this kind against the controller's plan: later operations are planned by it.

        Raises:
            PlacementError: they are placed otherwise.
        """
        planned, self._placements = self._placements, None
        tensors = [result] if self.returns_one else [result[index] for index in self._new_outputs]
        for number, (tensor, expected) in enumerate(zip(tensors, planned or (), strict=True)):
            actual = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
            if tensor is not None and actual != expected:  # None: a gradient that its mask does not ask for
                self._placements = planned  # each operation of this kind fails
                raise PlacementError(
                    f"{display_name(self.name)}: result {number} is placed {_format_placements(actual)} here, and "
                    f"{_format_placements(expected)} was planned in the notebook: torch differs there, or this is an "
                    "error of Meshbook's; bring the operands to placements that leave no choice: "
                    "x.redistribute([Replicate(), ...])"
                )

    def store(self, result: Any, ids: Sequence[int], values: MutableMapping[int, Any]) -> None:
        """Store the new tensors of a result that is several."""
        for id, index in zip(ids, self._new_outputs, strict=True):
            values[id] = result[index]


def _format_placements(placements: Sequence[Any] | None) -> str:
    return "per rank" if placements is None else f"({', '.join(map(str, placements))})"


def _find_or_defer(name: str) -> Callable[..., Any]:
    """Return the function of that name, or one that looks it up when called and raises if it is still unknown."""
    try:
        return find_function(name)
    except AttributeError:
        pass

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            function = find_function(name)
        except AttributeError:
            raise NotImplementedError(
                f"the operator {display_name(name)} is registered in the notebook's process and not on the ranks; run "
                "the cell that defines it there too, or import its module in a cell, and do this again"
            ) from None
        return function(*args, **kwargs)

    return call


def _with_default_dtype(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return the function wrapped so that new floating-point tensors get this dtype, as on the controller."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return call


def _make_caller(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, int, _Caller]:
    """Return the numbers of tensors and floats among the arguments, and the caller that puts them there."""
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [at for at, leaf in enumerate(leaves) if leaf is TENSOR]
    floats = [at for at, leaf in enumerate(leaves) if leaf is FLOAT]
    is_flat = not kwargs and all(not isinstance(arg, (list, tuple, dict)) for arg in args)
    # Operations on many tensors at once (`_foreach_`) have lists of them: pytree takes longer than some of these.
    spans, num_args = _spans_of_lists([*args, *kwargs.values()]), len(args)

    def call(ins: list[Any], numbers: Sequence[float]) -> Any:
        filled = leaves.copy()
        for at, tensor in zip(tensors, ins, strict=True):
            filled[at] = tensor
        for at, number in zip(floats, numbers, strict=False):
            filled[at] = number
        if is_flat:
            return function(*filled)
        if spans is not None:
            values = [filled[span] for span in spans]
            return function(*values[:num_args], **dict(zip(kwargs, values[num_args:], strict=True)))
        filled_args, filled_kwargs = pytree.tree_unflatten(filled, tree)
        return function(*filled_args, **filled_kwargs)

    if is_flat and len(tensors) == len(args):
        return len(tensors), 0, lambda ins, numbers: function(*ins)
    return len(tensors), len(floats), call


def _spans_of_lists(args: Iterable[Any]) -> list[int | slice] | None:
    """Return where the leaves of each argument are, of a list a slice; None: there are other containers than lists."""
    spans: list[int | slice] = []
    at = 0
    for arg in args:
        leaves = pytree.tree_leaves(arg)
        if len(leaves) == 1 and leaves[0] is arg:
            spans.append(at)
        elif type(arg) is list and len(leaves) == len(arg) and all(map(operator.is_, leaves, arg)):
            spans.append(slice(at, at + len(arg)))
        else:
            return None
        at += len(leaves)
    return spans


def _with_seed(call: _Caller) -> _Caller:
    """Return the caller wrapped so that the last float seeds it; shards draw different numbers, replicas the same."""

    def call_seeded(ins: list[Any], numbers: Sequence[float]) -> Any:
        tracker, seed = dtensor_patches.RNG_TRACKER, int(numbers[-1])
        first = next((tensor for tensor in ins if isinstance(tensor, DTensor)), None)
        if first is not None:
            tracker.seed = seed
            try:
                # Seed here, as DTensor calls the tracker for some operations only.
                index = dtensor_patches.shard_index_of(first._spec)
                with dtensor_patches.fork_rng_with_seed(dtensor_patches.mix_seed(seed, index)):
                    return call(ins, numbers)
            finally:
                tracker.seed = None
        position = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        with dtensor_patches.fork_rng_with_seed(dtensor_patches.mix_seed(seed, position)):
            return call(ins, numbers)

    return call_seeded


def display_name(function: str) -> str:
    """Return a template's function name for display: "aten.mm"."""
    return function.removeprefix("whole::").removeprefix("reduced::").replace("::", ".").removesuffix(".default")
