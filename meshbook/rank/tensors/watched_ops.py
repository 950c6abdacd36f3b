"""Which results of operations must be looked at to know that the numbers of all are finite.

A number that is not finite in an operation's input is in its result too, for most operations. So operations are looked
at together, a window of some dozens, and in it only those results that no other operation of it carries on.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from meshbook.rank.tensors.lowering_passes import BEGIN, END, WAIT, CallNode, TensorRef

# Operations whose results have a bad number if these of their arguments have one (how many, from the first).
_CARRIES = {
    "mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3, "add": 2, "sub": 2, "mul": 2, "div": 1, "neg": 1, "sum": 1, "mean": 1,
    "cat": 1, "stack": 1, "clone": 1, "_to_copy": 1, "_unsafe_view": 1, "sqrt": 1, "gelu": 1, "gelu_backward": 1,
    "silu": 1, "native_layer_norm": 1, "native_layer_norm_backward": 1, "_log_softmax": 1, "_softmax": 1,
    "_softmax_backward_data": 1, "_log_softmax_backward_data": 1, "slice_backward": 1, "select_backward": 1,
    "flat_all_reduce": 1,
}  # fmt: skip
# Of these not -inf, which masks put there, and which is none of their faults.
_BUT_NEGATIVE_INFINITY = "_softmax"
# Operations whose other results (a mean, a deviation) make the first ones bad if they are.
_MAIN_RESULTS = {"native_layer_norm": 1, "_fused_rms_norm": 1}
_TAKE_LISTS = ("cat", "stack")
# Views that may have as many numbers as their base, and not all of them.
_PARTIAL_VIEWS = ("as_strided", "unfold")
# Meshbook's own functions that compute nothing, or are looked at from within.
_UNWATCHED = ("module", "replay", "forget_", "set_", "begin_step", "end_step", "adopt", "take_", "collect_", "load_")

# A window ends after so many operations, or when what it holds is so large; of a recorded step by what it holds alone.
MAX_OPS = 128
MAX_BYTES = 64 << 20


class OpKind(NamedTuple):
    """What is known of an operation by the name of its function."""

    name: str  # "mm"
    num_carried: int
    takes_list: bool
    num_results: int | None  # that have the bad numbers of the others; None: all of them
    is_watched: bool


@functools.cache
def kind_of(function: str) -> OpKind:
    """Return the kind of "aten::mm.default", of "whole::aten::mm.default" or of "meshbook::redistribute"."""
    namespace, _, whole_name = function.rpartition("::")
    name = whole_name.partition(".")[0]
    is_watched = namespace != "meshbook" or not name.startswith(_UNWATCHED)
    base = name.rstrip("_")
    return OpKind(name, _CARRIES.get(base, 0), base in _TAKE_LISTS, _MAIN_RESULTS.get(base), is_watched)


class Flow(NamedTuple):
    """What an operation does with the numbers of its tensors, which are given by keys."""

    kind: OpKind
    is_view: bool
    carried: Sequence[Hashable]  # inputs whose bad numbers are in its results too
    results: Sequence[Hashable]


def is_whole_view(name: str, base: torch.Tensor, views: Iterable[torch.Tensor]) -> bool:
    """Whether views have all numbers of their base."""
    return name not in _PARTIAL_VIEWS and sum(view.numel() for view in views) == base.numel()


def unread(flows: Iterable[Flow]) -> list[Hashable]:
    """Return the results that are to be looked at: no other operation carries them on."""
    found: dict[Hashable, None] = {}
    for flow in flows:
        if flow.is_view:
            if flow.carried and flow.carried[0] in found:
                del found[flow.carried[0]]
                found.update(dict.fromkeys(flow.results))
            continue
        for key in flow.carried:
            found.pop(key, None)
        found.update(dict.fromkeys(flow.results))
    return list(found)


def known_finite(flows: Sequence[Flow]) -> set[Hashable]:
    """Return the results of a window that are finite if those of `unread` are."""
    dropped = {key for flow in flows if flow.kind.name == _BUT_NEGATIVE_INFINITY for key in flow.carried}
    return {key for flow in flows if not flow.is_view for key in flow.results} - dropped


# ---------------------------------------------------------------------------------------------------------------------
# Recorded steps


class RecordedWatcher(Protocol):
    """What a lowered step calls while it runs. It raises nothing."""

    def totals(self, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Return their sums: taken when they have just been made, they are read from a processor's cache."""

    def are_bad(self, *totals: torch.Tensor) -> bool:
        """Whether one of a window's sums is not finite. Waits for a GPU."""

    def find_first(self, window: Window, values: dict[str, Any], /) -> None:
        """Find the first bad operation of a window; its values by their names."""

    def kinds_before(self, known: Sequence[torch.Tensor], others: Sequence[torch.Tensor], /) -> set[str]:
        """Return the kinds of bad numbers in what is about to be overwritten; see `Window`."""

    def num_collectives(self) -> int:
        """Return how many this rank has begun."""


@dataclass
class Window:
    """Calls of a lowered step that are looked at together, after the last of them.

    Until then what they read of earlier values is held, and what cannot be computed again: the rest is, to find the
    first bad one.

    Attributes:
        unread: names of the values that are looked at.
        known, others: names of the inputs of a call that overwrites something, which is alone in its window: of those
            that the window before it has found finite, and of the others.
    """

    nodes: list[CallNode] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    known: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    first: int = 0  # index of its first call
    last: int = 0

    @property
    def overwrites(self) -> bool:
        return bool(self.nodes[0].mutated)


def windows_of(nodes: Sequence[CallNode]) -> Iterator[Window]:
    """Yield the windows of a lowered step. What an optimizer's step does is in none.

    What collectives have brought and a step of the optimizer reads, at once, is not looked at: it is in the parameters
    then, which are looked at after the step.
    """
    current, is_in_step, origins = Window(), False, _Origins()
    for index, node in enumerate(nodes):
        kind = kind_of(node.called)
        is_in_step = (is_in_step or node.called == BEGIN) and node.called != END
        is_left_out = is_in_step or not kind.is_watched or (bool(node.mutated) and kind.name.startswith("_foreach_"))
        if current.nodes and (is_left_out or node.mutated):
            yield _ended(current, index - 1, node.inputs if node.called == BEGIN else ())
            previous, current = current, Window()
        else:
            previous = Window()
        if not current.nodes:
            current.first = index
            origins.begin_window()
        origins.add(node)
        if is_left_out:
            continue
        current.nodes.append(node)
        if node.mutated:
            known = known_finite([_flow_of(each) for each in previous.nodes])
            current.known = [name for name in node.inputs if name in known]
            current.others = [name for name in node.inputs if name not in known]
        if node.mutated or origins.num_held_bytes >= MAX_BYTES:
            yield _ended(current, index)
            current = Window()
    if current.nodes:
        yield _ended(current, len(nodes) - 1)


class _Origins:
    """How much memory a window holds: what it reads of earlier values, and what cannot be computed again."""

    def __init__(self) -> None:
        self._origin: dict[str, int] = {}  # of values, the call that made their memory: views have their base's
        self._sizes: list[int] = []
        self._held: set[int] = set()
        self._first = 0
        self.num_held_bytes = 0

    def begin_window(self) -> None:
        self._first, self._held, self.num_held_bytes = len(self._sizes), set(), 0

    def add(self, node: CallNode) -> None:
        own = len(self._sizes)
        self._sizes.append(node.result_bytes)
        read = {self._origin[name] for name in node.inputs if name in self._origin}
        kept = {origin for origin in read if origin < self._first}
        if not can_repeat(node):
            kept.add(own)
        self.num_held_bytes += sum(self._sizes[origin] for origin in kept - self._held)
        self._held |= kept
        for name in filter(None, node.outputs):
            self._origin[name] = self._origin.get(node.inputs[0], own) if node.is_view else own


def _ended(window: Window, last: int, step_inputs: Sequence[str] = ()) -> Window:
    given = set(step_inputs)
    flows = [
        _flow_of(node) for node in window.nodes if not (may_bring_numbers(node) and given.issuperset(results_of(node)))
    ]
    window.last, window.unread = last, {str(name) for name in unread(flows)}
    return window


def _flow_of(node: CallNode) -> Flow:
    kind = kind_of(node.called)
    if node.is_view:
        return Flow(kind, True, node.inputs[:1] if node.is_whole_view else (), results_of(node))
    carried = node.inputs if node.called == WAIT else names_in(node.args[: kind.num_carried])
    return Flow(kind, False, carried, results_of(node)[: kind.num_results])


def results_of(node: CallNode) -> list[str]:
    """Return the names of a call's results that have their numbers when it has ended."""
    if node.called == WAIT:
        return node.inputs
    if is_begun_collective(node):
        return []
    return [*filter(None, node.outputs), *node.mutated]


def is_begun_collective(node: CallNode) -> bool:
    """Whether a later call waits for its numbers."""
    return node.called.startswith("_c10d_functional") and node.called != WAIT


def may_bring_numbers(node: CallNode) -> bool:
    """Whether results may have numbers of other ranks."""
    return node.called in (WAIT, "flat_all_reduce") or not isinstance(node.function, torch._ops.OpOverload)


def can_repeat(node: CallNode) -> bool:
    """Whether a call gives the same again: it meets no other rank, draws no random numbers and changes nothing."""
    return not (may_bring_numbers(node) or is_begun_collective(node) or node.mutated)


def names_in(arguments: Any) -> list[str]:
    return [leaf.name for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, TensorRef)]
