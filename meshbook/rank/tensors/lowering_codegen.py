"""Generate the function of a lowered step: Python source with one call a line."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshbook.rank.tensors import watched_ops
from meshbook.rank.tensors.lowering_passes import WAIT, WRAP, CallNode, FloatRef, TensorRef
from meshbook.rank.tensors.watched_ops import Window
from meshbook.wire.messages import RECORDED_STEP_FILE

GENERATED_FILE = RECORDED_STEP_FILE  # file name of the generated source in tracebacks


@dataclass(frozen=True)
class Lowered:
    """A step as a function of its local input tensors and its floats.

    Attributes:
        run: called with the inputs, the floats and, of `watched`, a `RecordedWatcher`; returns the local results. The
            caller must disable gradients.
        variable_floats: floats that may differ in each call; all others must be unchanged.
        op_index_by_line: recorded operation of each source line, for errors.
        bucket_sizes: number of all-reduces in each merged one.
        collective_order: its collectives, in order; if ranks differ in it, they deadlock.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    variable_floats: frozenset[int]
    source: str
    op_index_by_line: dict[int, int]
    num_ops: int
    bucket_sizes: tuple[int, ...] = ()
    collective_order: tuple[tuple[str, int, int], ...] = ()
    make_watched: Callable[[], Lowered] | None = None

    @functools.cached_property
    def watched(self) -> Lowered:
        """The same step, with results looked at in between."""
        return self if self.make_watched is None else self.make_watched()

    def op_index_of(self, error: BaseException) -> int | None:
        """Return the recorded operation in which an exception arose, if it was raised in this function."""
        found, tb = None, error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == GENERATED_FILE:
                found = self.op_index_by_line.get(tb.tb_lineno)
            tb = tb.tb_next
        return found


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
        if isinstance(thing, TensorRef):
            return thing.name
        if isinstance(thing, FloatRef):
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


def generate(
    nodes: list[CallNode],
    returned: Sequence[str],
    num_inputs: int,
    variable_floats: frozenset[int],
    bucket_sizes: tuple[int, ...],
    *,
    is_watched: bool = False,
) -> Lowered:
    windows = list(watched_ops.windows_of(nodes)) if is_watched else []
    window_at = {index: window for window in windows for index in range(window.first, window.last + 1)}
    dead_after = _dead_after(nodes, returned, window_at)
    source = _SourceBuilder()
    inputs = "".join(f"a{index}, " for index in range(num_inputs))
    source.lines = ["def step(A, F, W=None):", f"    {inputs}= A" if inputs else "    pass"]
    op_index_by_line: dict[int, int] = {}
    for index, node in enumerate(nodes):
        window = window_at.get(index)
        if window is not None and window.overwrites:
            source.lines.append(f"    before = W.kinds_before({_tuple(window.known)}, {_tuple(window.others)})")
        source.lines.append(f"    {_call_text(source, node)}")
        op_index_by_line[len(source.lines)] = node.op_index
        if window is not None:
            source.lines += _looking_lines(source, window, index, node)
        if names := dead_after.get(index):
            source.lines.append(f"    del {', '.join(names)}")
    source.lines.append(f"    return ({''.join(f'{name}, ' for name in returned)})")
    text = "\n".join(source.lines)
    namespace = dict(source.globals)
    exec(compile(text, GENERATED_FILE, "exec"), namespace)
    collective_order = tuple((node.op_name, node.op_index, len(node.inputs)) for node in nodes if _is_collective(node))
    return Lowered(
        namespace["step"],
        variable_floats,
        text,
        op_index_by_line,
        len(nodes),
        bucket_sizes,
        collective_order,
        functools.partial(generate, nodes, returned, num_inputs, variable_floats, bucket_sizes, is_watched=True),
    )


def _call_text(source: _SourceBuilder, node: CallNode) -> str:
    argument_texts = [source.literal(argument) for argument in node.args]
    argument_texts += [f"{name}={source.literal(value)}" for name, value in node.kwargs.items()]
    call = f"{source.name_function(node.function)}({', '.join(argument_texts)})"
    if not any(node.outputs):
        return call
    if node.returns_one:
        return f"{node.outputs[0]} = {call}"
    return "".join(f"{name or '_'}, " for name in node.outputs) + f"= {call}"


def _dead_after(
    nodes: list[CallNode], returned: Sequence[str], window_at: Mapping[int, Window]
) -> dict[int, list[str]]:
    """Return the values that nothing needs after each call. What a window holds lives as long as it does."""
    last_use: dict[str, int] = {}
    repeated: dict[str, int] = {}  # values that are made again to find a bad one, with the first call of their window
    for index, node in enumerate(nodes):
        for name in (*node.inputs, *filter(None, node.outputs)):
            last_use[name] = index
        if (window := window_at.get(index)) is not None and watched_ops.can_repeat(node):
            repeated.update(dict.fromkeys(filter(None, node.outputs), window.first))
    dead_after: dict[int, list[str]] = collections.defaultdict(list)
    for name, index in last_use.items():
        if name[0] == "v" and name not in returned:
            window = window_at.get(index)
            is_held = window is not None and repeated.get(name) != window.first
            dead_after[window.last if window is not None and is_held else index].append(name)
    return dead_after


def _looking_lines(source: _SourceBuilder, window: Window, index: int, node: CallNode) -> list[str]:
    """Return the lines after a call of a window: what a `RecordedWatcher` is asked."""
    lines = []
    if watched_ops.may_bring_numbers(node):
        lines.append(f"    n{index} = W.num_collectives()")
    if unread := [name for name in watched_ops.results_of(node) if name in window.unread]:
        lines.append(f"    t{index} = W.totals({_tuple(unread)})")
    if index == window.last and window.unread:
        totals = [
            f"*t{at}"
            for at, each in enumerate(window.nodes, window.first)
            if window.unread.intersection(watched_ops.results_of(each))
        ]
        lines.append(f"    if W.are_bad({', '.join(totals)}): W.find_first({source.literal(window)}, locals())")
    return lines


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _is_collective(node: CallNode) -> bool:
    return node.op_name == "flat_all_reduce" or (node.op_name.startswith("_c10d") and node.op_name not in (WAIT, WRAP))
