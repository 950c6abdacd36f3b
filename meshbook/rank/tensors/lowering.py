"""Lower a recorded step from DTensor operations to local ones: straight-line Python, run with one call.

Each DTensor operation costs 5 to 20 us before any arithmetic. What it runs on this rank, the local operations and the
collectives between them, is the same in every step with the same shapes and placements. `Lowering` traces these in one
run of the step; `compile` generates a function from them, in which all-reduces are merged if no result is needed in
between.

This module handles local tensors and operations only. `rank/tensors/replay.py` and `tensors/recording.py` know which
tensor belongs to which handle, and whether a step equals the recorded one.

What cannot be traced (random numbers, whose streams DTensor advances outside of operations; Meshbook's own operations)
is an *opaque* call ("island"): the operation itself is called again, on newly wrapped tensors. Floats that may differ
from step to step are inputs if the operation passes them on unchanged; any other float must be equal for the function
to be valid.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.wire.messages import RECORDED_STEP_FILE

GENERATED_FILE = RECORDED_STEP_FILE  # file name of the generated source in tracebacks

# Maximum bytes of merged all-reduces: the flat copy is memory that the step needs in addition.
BUCKET_BYTES = 256 << 20

_ALL_REDUCE = "_c10d_functional::all_reduce"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
_WAIT = "_c10d_functional::wait_tensor"

# Views that equal their input if they have its size, strides and dtype, and all views that are made from sizes alone.
_MAYBE_IDENTITY_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::expand", "aten::alias", "aten::detach")
_VIEW_OPS = (
    *_MAYBE_IDENTITY_VIEWS,
    "aten::t",
    "aten::transpose",
    "aten::permute",
    "aten::unsqueeze",
    "aten::select",
    "aten::slice",
)


class CannotLower(Exception):
    """The step must be replayed operation by operation; the message says why."""


@dataclass(frozen=True)
class _TensorRef:
    """A tensor, in the arguments of a call."""

    name: str


@dataclass(frozen=True)
class _FloatRef:
    """A float of the step, by its index among all of them."""

    slot: int


@dataclass
class _CallNode:
    """One call of the generated function."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: list[str | None]  # None: no tensor, or one that has a name already
    inputs: list[str]
    returns_one: bool  # it returns a tensor, not several
    op_index: int  # the recorded operation that it belongs to
    op_name: str = ""
    mutated_storages: frozenset[int] = frozenset()  # storages that it mutates
    input_storage: int = 0  # of an all-reduce: storage of its input
    nbytes: int = 0
    merge_key: tuple[Any, ...] = ()  # of an all-reduce: equal for those that can be merged
    is_identity: bool = False  # its result has the size, the strides and the dtype of its first argument


@dataclass(frozen=True)
class Lowered:
    """A step as a function of its local input tensors and its floats.

    Attributes:
        run: called with the inputs and the floats; returns the local results. The caller must disable gradients.
        variable_floats: floats that may differ in each call; all others must be unchanged.
        op_index_by_line: recorded operation of each source line, for errors.
        bucket_sizes: number of all-reduces in each merged one.
        collective_order: its collectives, in order; if ranks differ in it, they deadlock.
    """

    run: Callable[[Sequence[torch.Tensor], Sequence[float]], tuple[torch.Tensor, ...]]
    variable_floats: frozenset[int]
    source: str
    op_index_by_line: dict[int, int]
    num_ops: int
    bucket_sizes: tuple[int, ...] = ()
    collective_order: tuple[tuple[str, int, int], ...] = ()

    def op_index_of(self, error: BaseException) -> int | None:
        """Return the recorded operation in which an exception arose, if it was raised in this function."""
        found, tb = None, error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == GENERATED_FILE:
                found = self.op_index_by_line.get(tb.tb_lineno)
            tb = tb.tb_next
        return found


class Lowering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces a step while it runs: `with lowering:`, and inside `with lowering.operation(…)` for each operation."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._token = object()
        self._nodes: list[_CallNode] = []
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
        self, call: Callable[..., Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Record the current operation as one call: `call(locals, floats)` returns its local results.

        Outputs that are inputs are recognized as such.
        """
        input_names = [self._name_of_input(tensor) for tensor in inputs]
        output_names = [self._name_output(tensor) for tensor in outputs]
        slots = [_FloatRef(self._first_slot + index) for index in range(len(self._floats))]
        args = ([_TensorRef(name) for name in input_names], slots)
        mutated_storages = frozenset(_storage_id(tensor) for tensor in inputs)
        self._nodes.append(
            _CallNode(
                call,
                args,
                {},
                output_names,
                input_names,
                False,
                self._op_index,
                op_name="island",
                mutated_storages=mutated_storages,
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
        mutated_storages = (
            frozenset(_storage_id(tensor) for tensor in _mutated_tensors(func, args, kwargs))
            if _is_mutating(func)
            else frozenset()
        )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._failure_reason = f"{name} draws random numbers"
        if func.namespace == "c10d":  # the caller waits for it, which is no traced operation
            self._failure_reason = f"{name} is not waited for by an operation"
        node = _CallNode(func, (), {}, [], [], False, self._op_index, op_name=name, mutated_storages=mutated_storages)
        floats = [leaf for leaf in leaves if type(leaf) is float]

        def to_ref(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                node.inputs.append(self._name_of_input(leaf))
                return _TensorRef(node.inputs[-1])
            return leaf

        node.args, node.kwargs = pytree.tree_map(to_ref, (args, kwargs))
        if name == _ALL_REDUCE:
            tensor = args[0]
            node.input_storage, node.nbytes = _storage_id(tensor), tensor.numel() * tensor.element_size()
            node.merge_key = (*args[1:], tensor.dtype, tensor.device)
        out = func(*args, **kwargs)
        node.returns_one = isinstance(out, torch.Tensor)
        node.is_identity = name in _MAYBE_IDENTITY_VIEWS and _has_same_layout(out, args[0])
        for leaf in pytree.tree_leaves(out):
            node.outputs.append(self._name_output(leaf) if isinstance(leaf, torch.Tensor) else None)
            if isinstance(leaf, (bool, int, float, complex)):  # may differ in the next step
                self._failure_reason = f"{name} gives a number to Python"
        if floats:
            self._nodes_with_floats.append((len(self._nodes), floats))
        self._nodes.append(node)
        return out

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
                return _FloatRef(count - 1)
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
        bucket_sizes: list[int] = []
        nodes = _merge_all_reduces(self._nodes, bucket_sizes, self._input_storages) if merge else self._nodes
        nodes = _eliminate_dead_code(_drop_redundant_views(nodes, returned), returned)
        return _generate(nodes, returned, self._num_inputs, frozenset(self._variable_floats), tuple(bucket_sizes))


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


# ---------------------------------------------------------------------------------------------------------------------
# Passes over the calls


def _merge_all_reduces(
    nodes: list[_CallNode], bucket_sizes: list[int], input_storages: frozenset[int]
) -> list[_CallNode]:
    """Merge all-reduces of one group that are issued before any of their results is used, at the last one's position.

    An all-reduce may not move past a call that mutates its input. One that reduces an input of the step itself stays in
    place: another step's inputs may share memory in other ways.
    """
    wrapped_as = {
        node.inputs[0]: node.outputs[0] for node in nodes if node.op_name == _WRAP and node.outputs[0] is not None
    }
    first_use_of: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.op_name != _WRAP:
            for name in node.inputs:
                first_use_of.setdefault(name, index)

    def first_use(name: str | None) -> int:
        uses = [first_use_of[known] for known in (name, wrapped_as.get(name or "")) if known in first_use_of]
        return min(uses, default=len(nodes))

    buckets: list[list[int]] = []
    current: list[int] = []
    limit, nbytes, group, storages = 0, 0, (), set[int]()
    for index, node in enumerate(nodes):
        if current and node.mutated_storages & storages:
            limit = min(limit, index)
        if node.op_name != _ALL_REDUCE or node.input_storage in input_storages:
            continue
        if current and index < limit and node.merge_key == group and nbytes + node.nbytes <= BUCKET_BYTES:
            current.append(index)
            limit = min(limit, first_use(node.outputs[0]))
        else:
            current = [index]
            buckets.append(current)
            limit, nbytes, group, storages = first_use(node.outputs[0]), 0, node.merge_key, set()
        nbytes += node.nbytes
        storages.add(node.input_storage)
    bucket_ending_at = {bucket[-1]: bucket for bucket in buckets if len(bucket) > 1}
    dropped = {index for bucket in bucket_ending_at.values() for index in bucket}
    moved: dict[int, list[_CallNode]] = collections.defaultdict(list)
    for last, bucket in bucket_ending_at.items():
        names = {nodes[index].outputs[0] for index in bucket}
        for index, node in enumerate(nodes):
            if node.op_name == _WRAP and node.inputs[0] in names and index < last:
                dropped.add(index)
                moved[last].append(node)
    result: list[_CallNode] = []
    for index, node in enumerate(nodes):
        if (found := bucket_ending_at.get(index)) is not None:
            members = [nodes[position] for position in found]
            tensors = [member.args[0] for member in members]
            args = (tensors, *members[0].args[1:])
            output_names = [member.outputs[0] for member in members]
            input_names = [member.inputs[0] for member in members]
            result.append(
                _CallNode(
                    flat_all_reduce,
                    args,
                    {},
                    output_names,
                    input_names,
                    False,
                    node.op_index,
                    op_name="flat_all_reduce",
                )
            )
            result.extend(moved[index])
            bucket_sizes.append(len(found))
        elif index not in dropped:
            result.append(node)
    return result


def flat_all_reduce(tensors: Sequence[torch.Tensor], op: str, group: Any) -> list[torch.Tensor]:
    """Reduce many tensors with one collective."""
    ops = torch.ops._c10d_functional
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = ops.wait_tensor.default(ops.all_reduce_.default(flat, op, group))
    return [
        piece.view(tensor.shape)
        for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
    ]


def _drop_redundant_views(nodes: list[_CallNode], returned: Sequence[str]) -> list[_CallNode]:
    """Remove views that exist already (a full slice, a view and its inverse, a repeated view) and repeated waits.

    Autograd's backward is full of them, and each costs as much as a small operation. Each result of the step remains a
    tensor object of its own.
    """
    if any(torch.Tag.inplace_view in getattr(node.function, "tags", ()) for node in nodes):
        return nodes
    replacements: dict[str, str] = {}
    views_made: dict[tuple[Any, ...], str] = {}
    inverse_views: dict[tuple[Any, ...], str] = {}
    waited_for: set[str] = set()
    returned_names = set(returned)
    result: list[_CallNode] = []

    def replace_ref(leaf: Any) -> Any:
        return (
            _TensorRef(replacements[leaf.name]) if isinstance(leaf, _TensorRef) and leaf.name in replacements else leaf
        )

    for node in nodes:
        if not replacements.keys().isdisjoint(node.inputs):
            node.args, node.kwargs = pytree.tree_map(replace_ref, (node.args, node.kwargs))
            node.inputs = [replacements.get(name, name) for name in node.inputs]
        if node.op_name == "flat_all_reduce":
            waited_for.update(name for name in node.outputs if name is not None)
        elif node.op_name == _WAIT and not any(node.outputs):
            if node.inputs[0] in waited_for:
                continue
            waited_for.add(node.inputs[0])
        elif node.op_name in _VIEW_OPS and node.returns_one and len(node.inputs) == 1 and not node.kwargs:
            (source,), out = node.inputs, node.outputs[0]
            key = (node.op_name, repr(node.args))
            existing = source if node.is_identity else views_made.get(key) or inverse_views.get(key)
            if out is not None and existing is not None and out not in returned_names:
                replacements[out] = existing
                continue
            if out is not None:
                views_made[key] = out
                if node.op_name in ("aten::t", "aten::transpose"):
                    inverse_views[node.op_name, repr(pytree.tree_map(_ref_replacer(source, out), node.args))] = source
        result.append(node)
    return result


def _ref_replacer(source: str, target: str) -> Callable[[Any], Any]:
    return lambda leaf: _TensorRef(target) if isinstance(leaf, _TensorRef) and leaf.name == source else leaf


def _eliminate_dead_code(nodes: list[_CallNode], returned: Sequence[str]) -> list[_CallNode]:
    """Remove calls whose results are unused, if they have no side effect."""
    live = set(returned)
    live_nodes: list[_CallNode] = []
    for node in reversed(nodes):
        has_effect = node.mutated_storages or not any(node.outputs)  # an assertion returns nothing, and may raise
        has_effect = (
            has_effect or node.op_name.startswith(("_c10d", "c10d")) or node.op_name in ("island", "flat_all_reduce")
        )
        has_effect = has_effect and node.op_name != _WRAP  # it only creates an object
        if has_effect or any(name in live for name in node.outputs):
            live.update(node.inputs)
            live_nodes.append(node)
    return live_nodes[::-1]


def _fast_binding(function: Any) -> Any:
    """Return the operator in torch's generated bindings, if there is one.

    They parse arguments in half the time of an overload's call; the gain is largest for lists of tensors.
    """
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return function
    name = function._opname
    if name.startswith("_foreach_") and function._overloadname in ("default", "Scalar", "List", "ScalarList"):
        return getattr(torch, name, function)
    return _FAST_BINDINGS.get(function, function)


_aten = torch.ops.aten
_FAST_BINDINGS: dict[Any, Any] = {
    _aten.view.default: torch.Tensor.view,
    _aten.expand.default: torch.Tensor.expand,
    _aten._unsafe_view.default: torch.Tensor.view,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.clone.default: torch.clone,
    _aten.cat.default: torch.cat,
    _aten.embedding.default: torch.embedding,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten._softmax.default: torch._softmax,
    _aten._log_softmax.default: torch._log_softmax,
    _aten.gelu.default: torch._C._nn.gelu,
}


@dataclass
class _SourceBuilder:
    """The generated source and the objects that its names refer to."""

    lines: list[str] = field(default_factory=list)
    globals: dict[str, Any] = field(default_factory=dict)
    function_names: dict[Any, str] = field(default_factory=dict)

    def name_function(self, function: Any) -> str:
        name = self.function_names.get(function)
        if name is None:
            name = self.function_names[function] = f"f{len(self.function_names)}"
            self.globals[name] = _fast_binding(function)
        return name

    def literal(self, thing: Any) -> str:
        if isinstance(thing, _TensorRef):
            return thing.name
        if isinstance(thing, _FloatRef):
            return f"F[{thing.slot}]"
        if type(thing) is float and not math.isfinite(thing):
            return f"float({str(thing)!r})"
        if thing is None or type(thing) in (int, float, str, bool):
            return repr(thing)
        if isinstance(thing, (list, tuple)):
            inside = ", ".join(map(self.literal, thing))
            return f"[{inside}]" if isinstance(thing, list) else f"({inside},)" if thing else "()"
        name = f"c{len(self.globals)}"
        self.globals[name] = thing
        return name


def _generate(
    nodes: list[_CallNode],
    returned: Sequence[str],
    num_inputs: int,
    variable_floats: frozenset[int],
    bucket_sizes: tuple[int, ...],
) -> Lowered:
    last_use: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in (*node.inputs, *filter(None, node.outputs)):
            last_use[name] = index
    returned_names = set(returned)
    dead_after: dict[int, list[str]] = collections.defaultdict(list)
    for name, index in last_use.items():
        if name[0] == "v" and name not in returned_names:
            dead_after[index].append(name)
    source = _SourceBuilder()
    inputs = "".join(f"a{index}, " for index in range(num_inputs))
    source.lines = ["def step(A, F):", f"    {inputs}= A" if inputs else "    pass"]
    op_index_by_line: dict[int, int] = {}
    for index, node in enumerate(nodes):
        argument_texts = [source.literal(argument) for argument in node.args]
        argument_texts += [f"{name}={source.literal(value)}" for name, value in node.kwargs.items()]
        call = f"{source.name_function(node.function)}({', '.join(argument_texts)})"
        if not any(node.outputs):
            text = call
        elif node.returns_one:
            text = f"{node.outputs[0]} = {call}"
        else:
            text = "".join(f"{name or '_'}, " for name in node.outputs) + f"= {call}"
        source.lines.append(f"    {text}")
        op_index_by_line[len(source.lines)] = node.op_index
        if names := dead_after.get(index):
            source.lines.append(f"    del {', '.join(names)}")
    source.lines.append(f"    return ({''.join(f'{name}, ' for name in returned)})")
    text = "\n".join(source.lines)
    namespace = dict(source.globals)
    exec(compile(text, GENERATED_FILE, "exec"), namespace)
    collective_order = tuple((node.op_name, node.op_index, len(node.inputs)) for node in nodes if _is_collective(node))
    return Lowered(
        namespace["step"], variable_floats, text, op_index_by_line, len(nodes), bucket_sizes, collective_order
    )


def _is_collective(node: _CallNode) -> bool:
    return node.op_name == "flat_all_reduce" or (
        node.op_name.startswith("_c10d") and node.op_name not in (_WAIT, _WRAP)
    )
