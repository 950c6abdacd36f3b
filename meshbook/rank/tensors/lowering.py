"""Lower a recorded step from DTensor operations to local ones: straight-line Python, run with one call.

Each DTensor operation costs 5 to 20 us before any arithmetic. What it runs on this rank, the local operations and the
collectives between them, is the same in every step with the same shapes and placements. `Lowering` traces these in one
run of the step; `compile` generates a function from them, in which all-reduces are merged if no result is needed in
between.

This module handles local tensors and operations only. `rank/tensors/replay.py` and `tensors/recording.py` know which
tensor belongs to which handle, and whether a step equals the recorded one.

What cannot be traced (random numbers, whose streams DTensor advances outside of operations; Meshbook's own operations)
is an *opaque* call: the operation itself is called again, on newly wrapped tensors. Floats that may differ
from step to step are inputs if the operation passes them on unchanged; any other float must be equal for the function
to be valid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.rank.tensors.lowering_codegen import Lowered, generate
from meshbook.rank.tensors.lowering_passes import (
    ALL_REDUCE,
    MAYBE_IDENTITY_VIEWS,
    CallNode,
    FloatRef,
    TensorRef,
    drop_redundant_views,
    eliminate_dead_code,
    merge_all_reduces,
)
from meshbook.rank.tensors.watched_ops import is_whole_view


class CannotLower(Exception):
    """The step must be replayed operation by operation; the message says why."""


class Lowering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces a step while it runs: `with lowering:`, and inside `with lowering.operation(…)` for each operation."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._token = object()
        self._nodes: list[CallNode] = []
        self._num_values = 0
        self._op_index = 0
        self._first_slot = 0
        self._floats: list[float] = []
        self._nodes_with_floats: list[tuple[int, list[float]]] = []  # calls of the current operation that have floats
        self._variable_floats: set[int] = set()
        self._failure_reason: str | None = None
        self._named_inputs: list[torch.Tensor] = []  # inputs, from which the names are removed later
        self._num_inputs = len(inputs)
        self._input_storages = frozenset(_storage_id(tensor) for tensor in inputs)
        for index, tensor in enumerate(inputs):
            assert self._name_of(tensor) is None, "two inputs are one object"
            self._set_name(tensor, f"a{index}")
            self._named_inputs.append(tensor)

    # ---- tracing

    @contextlib.contextmanager
    def operation(self, op_index: int, first_slot: int, floats: Sequence[float]) -> Iterator[None]:
        """Attribute calls in this context to recorded operation `op_index`; its floats' slots begin at `first_slot`."""
        self._op_index, self._first_slot, self._floats = op_index, first_slot, list(floats)
        self._nodes_with_floats = []
        yield
        self._match_floats()

    def opaque_call(
        self,
        call: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        function: str,
        *,
        mutates: Sequence[int] = (),
        is_view: bool = False,
    ) -> None:
        """Record the current operation as one call: `call(locals, floats)` returns its local results.

        Outputs that are inputs are recognized as such.

        Args:
            function: its name.
            mutates: indices of inputs.
        """
        input_names = [self._name_of_input(tensor) for tensor in inputs]
        output_names = [self._name_output(tensor) for tensor in outputs]
        slots = [FloatRef(self._first_slot + index) for index in range(len(self._floats))]
        args = ([TensorRef(name) for name in input_names], slots)
        mutated_storages = frozenset(_storage_id(tensor) for tensor in inputs)
        self._nodes.append(
            CallNode(
                call,
                args,
                {},
                output_names,
                input_names,
                False,
                self._op_index,
                op_name="opaque",
                mutated_storages=mutated_storages,
                template=function,
                mutated=[input_names[position] for position in mutates],
                is_view=is_view,
                result_bytes=sum(tensor.nbytes for tensor in outputs),
            )
        )
        self._variable_floats.update(slot.slot for slot in slots)
        self._nodes_with_floats, self._floats = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it is dispatched again, as operations on local tensors
        kwargs = kwargs or {}
        name = func._schema.name
        leaves = pytree.tree_leaves((args, kwargs))
        mutated = list(_mutated_tensors(func, args, kwargs)) if _is_mutating(func) else []
        mutated_storages = frozenset(map(_storage_id, mutated))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._failure_reason = f"{name} draws random numbers"
        if func.namespace == "c10d":  # the caller waits for it, which is no traced operation
            self._failure_reason = f"{name} is not waited for by an operation"
        node = CallNode(func, (), {}, [], [], False, self._op_index, op_name=name, mutated_storages=mutated_storages)
        floats = [leaf for leaf in leaves if type(leaf) is float]

        def to_ref(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                node.inputs.append(self._name_of_input(leaf))
                return TensorRef(node.inputs[-1])
            return leaf

        node.args, node.kwargs = pytree.tree_map(to_ref, (args, kwargs))
        if name == ALL_REDUCE:
            tensor = args[0]
            node.input_storage, node.nbytes = _storage_id(tensor), tensor.numel() * tensor.element_size()
            node.merge_key = (*args[1:], tensor.dtype, tensor.device)
        out = func(*args, **kwargs)
        node.returns_one = isinstance(out, torch.Tensor)
        self._note_results(node, func, args, pytree.tree_leaves(out), mutated)
        node.is_identity = name in MAYBE_IDENTITY_VIEWS and _has_same_layout(out, args[0])
        for leaf in pytree.tree_leaves(out):
            node.outputs.append(self._name_output(leaf) if isinstance(leaf, torch.Tensor) else None)
            if isinstance(leaf, (bool, int, float, complex)):  # may differ in the next step
                self._failure_reason = f"{name} gives a number to Python"
        if floats:
            self._nodes_with_floats.append((len(self._nodes), floats))
        self._nodes.append(node)
        return out

    def _note_results(
        self, node: CallNode, func: Any, args: Any, results: Sequence[Any], mutated: Sequence[torch.Tensor]
    ) -> None:
        """Note what is needed to know which results a sentinel looks at."""
        tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        node.mutated, node.is_view = list(map(self._name_of_input, mutated)), func.is_view
        if func.is_view:
            node.is_whole_view = is_whole_view(func._opname, args[0], tensors)
        elif not mutated:
            node.result_bytes = sum(tensor.nbytes for tensor in tensors)

    def _match_floats(self) -> None:
        """Find the operation's floats in its calls. If exactly one call took exactly these, they become inputs."""
        if not self._floats:
            return
        matching = [index for index, floats in self._nodes_with_floats if _are_same_numbers(floats, self._floats)]
        if len(self._nodes_with_floats) != len(matching) or len(matching) != 1:
            return
        node, count = self._nodes[matching[0]], self._first_slot

        def to_ref(leaf: Any) -> Any:
            nonlocal count
            if type(leaf) is float:
                count += 1
                return FloatRef(count - 1)
            return leaf

        node.args, node.kwargs = pytree.tree_map(to_ref, (node.args, node.kwargs))
        self._variable_floats.update(range(self._first_slot, count))

    # ---- names
    # Names are attributes of the tensor objects, which torch retains for as long as the tensors themselves. So nothing
    # outlives its use in the step, and no name passes to another tensor through a reused address.

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        token, name = tensor.__dict__.get("_meshbook_name", (None, None))
        return name if token is self._token else None

    def _set_name(self, tensor: torch.Tensor, name: str) -> None:
        tensor.__dict__["_meshbook_name"] = (self._token, name)

    def _name_of_input(self, tensor: torch.Tensor) -> str:
        name = self._name_of(tensor)
        if name is None:
            self._failure_reason = (
                self._failure_reason or f"it uses a tensor of {tuple(tensor.shape)} that is no input of it"
            )
            return "?"
        return name

    def _name_output(self, tensor: torch.Tensor) -> str | None:
        if self._name_of(tensor) is not None:
            return None
        name = f"v{self._num_values}"
        self._num_values += 1
        self._set_name(tensor, name)
        return name

    # ---- generated function

    def compile(self, results: Sequence[torch.Tensor], *, merge: bool = True) -> Lowered:
        """Compile a function that repeats what was traced and returns `results`, each from `wait_local_tensor`.

        Raises:
            CannotLower: the step drew random numbers outside of an opaque call, or used a tensor from elsewhere.
        """
        returned = [self._name_of_input(result) for result in results]
        for tensor in [*self._named_inputs, *results]:
            tensor.__dict__.pop("_meshbook_name", None)
        if self._failure_reason is not None:
            raise CannotLower(self._failure_reason)
        nodes, bucket_sizes = merge_all_reduces(self._nodes, self._input_storages) if merge else (self._nodes, ())
        nodes = eliminate_dead_code(drop_redundant_views(nodes, returned), returned)
        return generate(nodes, returned, self._num_inputs, frozenset(self._variable_floats), bucket_sizes)


def wait_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor after waiting for it; while a step is traced, the wait is part of it."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _has_same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.size() == other.size() and one.stride() == other.stride() and one.dtype == other.dtype


def _storage_id(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _is_mutating(func: Any) -> bool:
    return any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)


def _mutated_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_same_number(a: float, b: float) -> bool:
    """Whether one number may replace the other. Zeros must agree in sign, as division by them gives infinities."""
    return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (math.isnan(a) and math.isnan(b))


def _are_same_numbers(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(map(is_same_number, some, others))
