"""A recorded step, from DTensor operations down to the local ones: straight-line Python, run with one call.

Each DTensor operation costs 5 to 20 us before any arithmetic; what it comes to on this rank, the local operations and
the collectives between them, is the same in every step whose shapes and placements are the same. `Lowering` watches
one step as it runs and writes those down; `compile` makes a function of them, with all-reduces that nobody waits for
in between merged into one.

Knows local tensors and operations only. Which tensor is which handle, and whether a step is the same as the one that
was recorded, is known by others (`rank/tensors/replay.py`, `tensors/recording.py`).

What cannot be written down so (random numbers, whose streams DTensor moves outside of operations; operations of our
own) is an *island*: the operation itself is called again, on tensors wrapped anew. Numbers that may differ from step
to step are inputs where the operation passes them on as they are; any other must be equal for the function to serve.
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

from meshbook.wire.messages import RECORDED_STEP

FILE = RECORDED_STEP  # what a traceback calls the generated source

# Merged all-reduces of at most so many bytes: the flat copy is memory that the step needs besides its own.
BUCKET_BYTES = 256 << 20

_ALL_REDUCE = "_c10d_functional::all_reduce"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
_WAIT = "_c10d_functional::wait_tensor"

# Views that are their tensor itself if they have its size, strides and dtype; and all that are made from sizes alone.
_SAME = ("aten::view", "aten::_unsafe_view", "aten::expand", "aten::alias", "aten::detach")
_VIEWS = (*_SAME, "aten::t", "aten::transpose", "aten::permute", "aten::unsqueeze", "aten::select", "aten::slice")


class CannotLower(Exception):
    """The step has to be replayed operation by operation; the message says why."""


@dataclass(frozen=True)
class _Name:
    """A tensor, in the arguments of a line."""

    name: str


@dataclass(frozen=True)
class _Number:
    """A float of the step, by its place among all of them."""

    slot: int


@dataclass
class _Line:
    """One call of the generated function."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: list[str | None]  # None: what it returns there is known already, or no tensor
    used: list[str]
    single: bool  # it returns a tensor, not several
    step: int  # the recorded operation that it belongs to
    kind: str = ""
    written: frozenset[int] = frozenset()  # storages that it changes
    storage: int = 0  # of an all-reduce: where its input is
    nbytes: int = 0
    group: tuple[Any, ...] = ()  # of an all-reduce: what those that are merged have in common
    same: bool = False  # what it gives has the size, the strides and the dtype of its first argument


@dataclass(frozen=True)
class Lowered:
    """A step as a function of its local input tensors and its floats.

    Attributes:
        run: called with the inputs and the floats; gives the local results. The caller sees to no_grad.
        free: floats that may be different in each call; every other must be as it was.
        steps: recorded operation of each line of the source, for errors.
        merged: how many all-reduces each merged one stands for.
        order: its collectives, one after the other; ranks must have the same ones, or they wait for each other.
    """

    run: Callable[[Sequence[torch.Tensor], Sequence[float]], tuple[torch.Tensor, ...]]
    free: frozenset[int]
    source: str
    steps: dict[int, int]
    num_ops: int
    merged: tuple[int, ...] = ()
    order: tuple[tuple[str, int, int], ...] = ()

    def step_of(self, error: BaseException) -> int | None:
        """The recorded operation in which an exception arose, if it was in this function."""
        found, tb = None, error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == FILE:
                found = self.steps.get(tb.tb_lineno)
            tb = tb.tb_next
        return found


class Lowering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a step while it runs: `with lowering:`, and in it `with lowering.operation(…)` for each operation."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._token = object()
        self._lines: list[_Line] = []
        self._count = 0
        self._step = 0
        self._first_slot = 0
        self._floats: list[float] = []
        self._pending: list[tuple[int, list[float]]] = []  # lines of the current operation that have floats
        self._free: set[int] = set()
        self._strangers: str | None = None
        self._named: list[torch.Tensor] = []  # inputs, to take the names off again
        self._num_inputs = len(inputs)
        self._input_storages = frozenset(_storage(tensor) for tensor in inputs)
        for index, tensor in enumerate(inputs):
            assert self._name_of(tensor) is None, "two inputs are one object"
            self._give_name(tensor, f"a{index}")
            self._named.append(tensor)

    # ---- watching

    @contextlib.contextmanager
    def operation(self, step: int, first_slot: int, floats: Sequence[float]) -> Iterator[None]:
        """What happens inside belongs to recorded operation `step`, whose floats have places from `first_slot` on."""
        self._step, self._first_slot, self._floats = step, first_slot, list(floats)
        self._pending = []
        yield
        self._match_floats()

    def island(self, call: Callable[..., Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """The current operation, not looked into: `call(locals, floats)` gives its local results.

        Outputs that are inputs are known as such.
        """
        used = [self._known(tensor) for tensor in inputs]
        outs = [self._new(tensor) for tensor in outputs]
        slots = [_Number(self._first_slot + index) for index in range(len(self._floats))]
        args = ([_Name(name) for name in used], slots)
        written = frozenset(_storage(tensor) for tensor in inputs)
        self._lines.append(_Line(call, args, {}, outs, used, False, self._step, kind="island", written=written))
        self._free.update(slot.slot for slot in slots)
        self._pending, self._floats = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
        kwargs = kwargs or {}
        name = func._schema.name
        given = pytree.tree_leaves((args, kwargs))
        written = (
            frozenset(_storage(tensor) for tensor in _written(func, args, kwargs)) if _changes(func) else frozenset()
        )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._strangers = f"{name} draws random numbers"
        if func.namespace == "c10d":  # whoever called it waits for it, which is no operation
            self._strangers = f"{name} is not waited for by an operation"
        line = _Line(func, (), {}, [], [], False, self._step, kind=name, written=written)
        floats = [leaf for leaf in given if type(leaf) is float]

        def reference(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                line.used.append(self._known(leaf))
                return _Name(line.used[-1])
            return leaf

        line.args, line.kwargs = pytree.tree_map(reference, (args, kwargs))
        if name == _ALL_REDUCE:
            tensor = args[0]
            line.storage, line.nbytes = _storage(tensor), tensor.numel() * tensor.element_size()
            line.group = (*args[1:], tensor.dtype, tensor.device)
        out = func(*args, **kwargs)
        line.single = isinstance(out, torch.Tensor)
        line.same = name in _SAME and _alike(out, args[0])
        for leaf in pytree.tree_leaves(out):
            line.outs.append(self._new(leaf) if isinstance(leaf, torch.Tensor) else None)
            if isinstance(leaf, (bool, int, float, complex)):  # the next step's is another
                self._strangers = f"{name} gives a number to Python"
        if floats:
            self._pending.append((len(self._lines), floats))
        self._lines.append(line)
        return out

    def _match_floats(self) -> None:
        """Find the operation's floats in what it did. Where exactly one call took exactly these, they are inputs."""
        if not self._floats:
            return
        same = [index for index, floats in self._pending if _equal(floats, self._floats)]
        if len(self._pending) != len(same) or len(same) != 1:
            return
        line, count = self._lines[same[0]], self._first_slot

        def place(leaf: Any) -> Any:
            nonlocal count
            if type(leaf) is float:
                count += 1
                return _Number(count - 1)
            return leaf

        line.args, line.kwargs = pytree.tree_map(place, (line.args, line.kwargs))
        self._free.update(range(self._first_slot, count))

    # ---- names. They are kept on the tensor objects, which torch keeps for as long as the tensors themselves: nothing
    # is held longer than the step holds it, and no name is another tensor's because an address was used again.

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        token, name = tensor.__dict__.get("_meshbook_name", (None, None))
        return name if token is self._token else None

    def _give_name(self, tensor: torch.Tensor, name: str) -> None:
        tensor.__dict__["_meshbook_name"] = (self._token, name)

    def _known(self, tensor: torch.Tensor) -> str:
        name = self._name_of(tensor)
        if name is None:
            self._strangers = self._strangers or f"it uses a tensor of {tuple(tensor.shape)} that is no input of it"
            return "?"
        return name

    def _new(self, tensor: torch.Tensor) -> str | None:
        if self._name_of(tensor) is not None:
            return None
        name = f"v{self._count}"
        self._count += 1
        self._give_name(tensor, name)
        return name

    # ---- the function

    def compile(self, results: Sequence[torch.Tensor], *, merge: bool = True) -> Lowered:
        """A function that does again what was watched, and gives `results`, all of which have been `settled`.

        Raises:
            CannotLower: it drew random numbers outside of an island, or used a tensor from elsewhere.
        """
        returned = [self._known(result) for result in results]
        for tensor in [*self._named, *results]:
            tensor.__dict__.pop("_meshbook_name", None)
        if self._strangers is not None:
            raise CannotLower(self._strangers)
        merged: list[int] = []
        lines = _merged(self._lines, merged, self._input_storages) if merge else self._lines
        lines = _pruned(_without_repeats(lines, returned), returned)
        return _write(lines, returned, self._num_inputs, frozenset(self._free), tuple(merged))


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own piece, arrived; asked for while the step is watched, the waiting belongs to it."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.size() == other.size() and one.stride() == other.stride() and one.dtype == other.dtype


def _storage(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _changes(func: Any) -> bool:
    return any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_same_number(a: float, b: float) -> bool:
    """Whether one may stand for the other: zero has a sign, of which a division makes an infinity."""
    return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (math.isnan(a) and math.isnan(b))


def _equal(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(map(is_same_number, some, others))


# ---------------------------------------------------------------------------------------------------------------------
# Passes over the lines


def _merged(lines: list[_Line], sizes: list[int], inputs: frozenset[int]) -> list[_Line]:
    """All-reduces of one group that are issued before the result of any is used become one, at the last one's place.

    An all-reduce may not move past a line that changes its input. What reduces an input of the step itself stays where
    it is: another step's inputs may share memory in ways that this one's did not.
    """
    alias = {line.used[0]: line.outs[0] for line in lines if line.kind == _WRAP and line.outs[0] is not None}
    used_at: dict[str, int] = {}
    for index, line in enumerate(lines):
        if line.kind != _WRAP:
            for name in line.used:
                used_at.setdefault(name, index)

    def first_use(name: str | None) -> int:
        uses = [used_at[known] for known in (name, alias.get(name or "")) if known in used_at]
        return min(uses, default=len(lines))

    buckets: list[list[int]] = []
    current: list[int] = []
    limit, nbytes, group, storages = 0, 0, (), set[int]()
    for index, line in enumerate(lines):
        if current and line.written & storages:
            limit = min(limit, index)
        if line.kind != _ALL_REDUCE or line.storage in inputs:
            continue
        if current and index < limit and line.group == group and nbytes + line.nbytes <= BUCKET_BYTES:
            current.append(index)
            limit = min(limit, first_use(line.outs[0]))
        else:
            current = [index]
            buckets.append(current)
            limit, nbytes, group, storages = first_use(line.outs[0]), 0, line.group, set()
        nbytes += line.nbytes
        storages.add(line.storage)
    last_of = {bucket[-1]: bucket for bucket in buckets if len(bucket) > 1}
    gone = {index for bucket in last_of.values() for index in bucket}
    moved: dict[int, list[_Line]] = collections.defaultdict(list)
    for last, bucket in last_of.items():
        names = {lines[index].outs[0] for index in bucket}
        for index, line in enumerate(lines):
            if line.kind == _WRAP and line.used[0] in names and index < last:
                gone.add(index)
                moved[last].append(line)
    result: list[_Line] = []
    for index, line in enumerate(lines):
        if (found := last_of.get(index)) is not None:
            members = [lines[place] for place in found]
            tensors = [member.args[0] for member in members]
            args = (tensors, *members[0].args[1:])
            outs = [member.outs[0] for member in members]
            used = [member.used[0] for member in members]
            result.append(_Line(flat_all_reduce, args, {}, outs, used, False, line.step, kind="flat_all_reduce"))
            result.extend(moved[index])
            sizes.append(len(found))
        elif index not in gone:
            result.append(line)
    return result


def flat_all_reduce(tensors: Sequence[torch.Tensor], op: str, group: Any) -> list[torch.Tensor]:
    """Many tensors reduced by one collective."""
    ops = torch.ops._c10d_functional
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = ops.wait_tensor.default(ops.all_reduce_.default(flat, op, group))
    return [
        piece.view(tensor.shape)
        for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
    ]


def _without_repeats(lines: list[_Line], returned: Sequence[str]) -> list[_Line]:
    """Without views that exist already (a whole tensor, there and back, made before) and without second waits.

    Autograd's backward is full of them, and each costs as much as a small operation. What the step returns is a tensor
    object of its own.
    """
    if any(torch.Tag.inplace_view in getattr(line.function, "tags", ()) for line in lines):
        return lines
    instead: dict[str, str] = {}
    made: dict[tuple[Any, ...], str] = {}
    undoes: dict[tuple[Any, ...], str] = {}
    arrived: set[str] = set()
    kept = set(returned)
    result: list[_Line] = []

    def settle(leaf: Any) -> Any:
        return _Name(instead[leaf.name]) if isinstance(leaf, _Name) and leaf.name in instead else leaf

    for line in lines:
        if not instead.keys().isdisjoint(line.used):
            line.args, line.kwargs = pytree.tree_map(settle, (line.args, line.kwargs))
            line.used = [instead.get(name, name) for name in line.used]
        if line.kind == "flat_all_reduce":
            arrived.update(name for name in line.outs if name is not None)
        elif line.kind == _WAIT and not any(line.outs):
            if line.used[0] in arrived:
                continue
            arrived.add(line.used[0])
        elif line.kind in _VIEWS and line.single and len(line.used) == 1 and not line.kwargs:
            (source,), out = line.used, line.outs[0]
            key = (line.kind, repr(line.args))
            known = source if line.same else made.get(key) or undoes.get(key)
            if out is not None and known is not None and out not in kept:
                instead[out] = known
                continue
            if out is not None:
                made[key] = out
                if line.kind in ("aten::t", "aten::transpose"):
                    undoes[line.kind, repr(pytree.tree_map(_replaced(source, out), line.args))] = source
        result.append(line)
    return result


def _replaced(source: str, target: str) -> Callable[[Any], Any]:
    return lambda leaf: _Name(target) if isinstance(leaf, _Name) and leaf.name == source else leaf


def _pruned(lines: list[_Line], returned: Sequence[str]) -> list[_Line]:
    """Without lines whose results nobody uses, if they do nothing else."""
    wanted = set(returned)
    kept: list[_Line] = []
    for line in reversed(lines):
        acts = line.written or not any(line.outs)  # a check makes nothing, and raises
        acts = acts or line.kind.startswith(("_c10d", "c10d")) or line.kind in ("island", "flat_all_reduce")
        acts = acts and line.kind != _WRAP  # which only makes an object
        if acts or any(name in wanted for name in line.outs):
            wanted.update(line.used)
            kept.append(line)
    return kept[::-1]


def _quick(function: Any) -> Any:
    """The same operator through torch's generated bindings, which parse arguments in half the time of an overload's
    call, lists of tensors most of all."""
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return function
    name = function._opname
    if name.startswith("_foreach_") and function._overloadname in ("default", "Scalar", "List", "ScalarList"):
        return getattr(torch, name, function)
    return _QUICK.get(function, function)


_aten = torch.ops.aten
_QUICK: dict[Any, Any] = {
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
class _Source:
    """The generated text and what its names stand for."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    functions: dict[Any, str] = field(default_factory=dict)

    def function(self, function: Any) -> str:
        name = self.functions.get(function)
        if name is None:
            name = self.functions[function] = f"f{len(self.functions)}"
            self.names[name] = _quick(function)
        return name

    def literal(self, thing: Any) -> str:
        if isinstance(thing, _Name):
            return thing.name
        if isinstance(thing, _Number):
            return f"F[{thing.slot}]"
        if type(thing) is float and not math.isfinite(thing):
            return f"float({str(thing)!r})"
        if thing is None or type(thing) in (int, float, str, bool):
            return repr(thing)
        if isinstance(thing, (list, tuple)):
            inside = ", ".join(map(self.literal, thing))
            return f"[{inside}]" if isinstance(thing, list) else f"({inside},)" if thing else "()"
        name = f"c{len(self.names)}"
        self.names[name] = thing
        return name


def _write(
    lines: list[_Line], returned: Sequence[str], num_inputs: int, free: frozenset[int], merged: tuple[int, ...]
) -> Lowered:
    last: dict[str, int] = {}
    for index, line in enumerate(lines):
        for name in (*line.used, *filter(None, line.outs)):
            last[name] = index
    kept = set(returned)
    done: dict[int, list[str]] = collections.defaultdict(list)
    for name, index in last.items():
        if name[0] == "v" and name not in kept:
            done[index].append(name)
    source = _Source()
    inputs = "".join(f"a{index}, " for index in range(num_inputs))
    source.lines = ["def step(A, F):", f"    {inputs}= A" if inputs else "    pass"]
    steps: dict[int, int] = {}
    for index, line in enumerate(lines):
        parts = [source.literal(argument) for argument in line.args]
        parts += [f"{name}={source.literal(value)}" for name, value in line.kwargs.items()]
        call = f"{source.function(line.function)}({', '.join(parts)})"
        if not any(line.outs):
            text = call
        elif line.single:
            text = f"{line.outs[0]} = {call}"
        else:
            text = "".join(f"{name or '_'}, " for name in line.outs) + f"= {call}"
        source.lines.append(f"    {text}")
        steps[len(source.lines)] = line.step
        if names := done.get(index):
            source.lines.append(f"    del {', '.join(names)}")
    source.lines.append(f"    return ({''.join(f'{name}, ' for name in returned)})")
    text = "\n".join(source.lines)
    space = dict(source.names)
    exec(compile(text, FILE, "exec"), space)
    order = tuple((line.kind, line.step, len(line.used)) for line in lines if _speaks(line))
    return Lowered(space["step"], free, text, steps, len(lines), merged, order)


def _speaks(line: _Line) -> bool:
    return line.kind == "flat_all_reduce" or (line.kind.startswith("_c10d") and line.kind not in (_WAIT, _WRAP))
