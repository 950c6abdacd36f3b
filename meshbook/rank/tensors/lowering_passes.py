"""The calls of a traced step, and the passes that reduce them before code is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Maximum bytes of merged all-reduces: the flat copy is memory that the step needs in addition.
BUCKET_BYTES = 256 << 20

ALL_REDUCE = "_c10d_functional::all_reduce"
WRAP = "_c10d_functional::_wrap_tensor_autograd"
WAIT = "_c10d_functional::wait_tensor"

# Meshbook's functions around a step of an optimizer.
BEGIN, END = "meshbook::begin_step", "meshbook::end_step"

# Views that equal their input if they have its size, strides and dtype, and all views that are made from sizes alone.
MAYBE_IDENTITY_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::expand", "aten::alias", "aten::detach")
_VIEW_OPS = (
    *MAYBE_IDENTITY_VIEWS,
    "aten::t",
    "aten::transpose",
    "aten::permute",
    "aten::unsqueeze",
    "aten::select",
    "aten::slice",
)


@dataclass(frozen=True)
class TensorRef:
    """A tensor, in the arguments of a call."""

    name: str


@dataclass(frozen=True)
class FloatRef:
    """A float of the step, by its index among all of them."""

    slot: int


@dataclass
class CallNode:
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
    template: str = ""  # of an opaque call: the function of the recorded operation
    mutated: list[str] = field(default_factory=list)  # names of the inputs that it mutates
    is_view: bool = False
    is_whole_view: bool = False  # its results have all numbers of its first argument
    result_bytes: int = 0  # of new results

    @property
    def called(self) -> str:
        """The name of the operation: "aten::mm"."""
        return self.template or self.op_name


def merge_all_reduces(nodes: list[CallNode], input_storages: frozenset[int]) -> tuple[list[CallNode], tuple[int, ...]]:
    """Merge all-reduces of one group that are issued before any of their results is used, at the last one's position.

    An all-reduce may not move past a call that mutates its input. One that reduces an input of the step itself stays in
    place: another step's inputs may share memory in other ways.

    Returns:
        The calls, and the number of all-reduces in each merged one.
    """
    buckets = [bucket for bucket in _find_buckets(nodes, input_storages) if len(bucket) > 1]
    merged_at: dict[int, list[CallNode]] = {}  # what replaces the last member of each bucket
    dropped = {index for bucket in buckets for index in bucket}
    for bucket in buckets:
        members = [nodes[index] for index in bucket]
        names = {member.outputs[0] for member in members}
        wraps = [
            index for index in range(bucket[-1]) if nodes[index].op_name == WRAP and nodes[index].inputs[0] in names
        ]
        dropped.update(wraps)
        merged_at[bucket[-1]] = [_merged_call(members), *(nodes[index] for index in wraps)]
    result: list[CallNode] = []
    for index, node in enumerate(nodes):
        if index in merged_at:
            result += merged_at[index]
        elif index not in dropped:
            result.append(node)
    return result, tuple(map(len, buckets))


def _find_buckets(nodes: Sequence[CallNode], input_storages: frozenset[int]) -> list[list[int]]:
    """Return the indices of all-reduces that may run as one, in order; most are alone."""
    first_use = _first_uses(nodes)
    buckets: list[list[int]] = []
    limit, nbytes, merge_key, storages = 0, 0, (), set[int]()  # of the last bucket
    for index, node in enumerate(nodes):
        if node.mutated_storages & storages:
            limit = min(limit, index)
        if node.op_name != ALL_REDUCE or node.input_storage in input_storages:
            continue
        used_at = first_use.get(node.outputs[0] or "", len(nodes))
        if index < limit and node.merge_key == merge_key and nbytes + node.nbytes <= BUCKET_BYTES:
            buckets[-1].append(index)
            limit = min(limit, used_at)
        else:
            buckets.append([index])
            limit, nbytes, merge_key, storages = used_at, 0, node.merge_key, set()
        nbytes += node.nbytes
        storages.add(node.input_storage)
    return buckets


def _first_uses(nodes: Sequence[CallNode]) -> dict[str, int]:
    """Return the index of the first call that uses each value, itself or wrapped."""
    found: dict[str, int] = {}
    source_of: dict[str, str] = {}  # of wrapped values
    for index, node in enumerate(nodes):
        if node.op_name == WRAP:
            source_of.update({name: node.inputs[0] for name in node.outputs if name is not None})
            continue
        for name in node.inputs:
            found.setdefault(name, index)
            found.setdefault(source_of.get(name, name), index)
    return found


def _merged_call(members: Sequence[CallNode]) -> CallNode:
    first, last = members[0], members[-1]
    return CallNode(
        flat_all_reduce,
        ([member.args[0] for member in members], *first.args[1:]),
        {},
        [member.outputs[0] for member in members],
        [member.inputs[0] for member in members],
        False,
        last.op_index,
        op_name="flat_all_reduce",
    )


def flat_all_reduce(tensors: Sequence[torch.Tensor], op: str, group: Any) -> list[torch.Tensor]:
    """Reduce many tensors with one collective."""
    ops = torch.ops._c10d_functional
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = ops.wait_tensor.default(ops.all_reduce_.default(flat, op, group))
    return [
        piece.view(tensor.shape)
        for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
    ]


def drop_redundant_views(nodes: list[CallNode], returned: Sequence[str]) -> list[CallNode]:
    """Remove views that exist already (a full slice, a view and its inverse, a repeated view) and repeated waits.

    Autograd's backward is full of them, and each costs as much as a small operation. Each result of the step remains a
    tensor object of its own.
    """
    if any(torch.Tag.inplace_view in getattr(node.function, "tags", ()) for node in nodes):
        return nodes
    views, waited_for, result = _KnownViews(frozenset(returned)), set[str](), list[CallNode]()
    for node in nodes:
        views.replace_inputs(node)
        if node.op_name == "flat_all_reduce":
            waited_for.update(filter(None, node.outputs))
        elif node.op_name == WAIT and not any(node.outputs):
            if node.inputs[0] in waited_for:
                continue
            waited_for.add(node.inputs[0])
        elif views.is_redundant(node):
            continue
        result.append(node)
    return result


class _KnownViews:
    """The views that a step has made so far."""

    def __init__(self, returned: frozenset[str]) -> None:
        self._returned = returned
        self._replacements: dict[str, str] = {}  # of redundant views, by name
        self._made: dict[tuple[Any, ...], str] = {}  # by operation and arguments; inverses of views too

    def replace_inputs(self, node: CallNode) -> None:
        """Have a call use the tensors that redundant views were replaced by."""
        if not self._replacements.keys().isdisjoint(node.inputs):
            node.args, node.kwargs = pytree.tree_map(_ref_replacer(self._replacements), (node.args, node.kwargs))
            node.inputs = [self._replacements.get(name, name) for name in node.inputs]
            node.mutated = [self._replacements.get(name, name) for name in node.mutated]

    def is_redundant(self, node: CallNode) -> bool:
        """Record a view; return whether another tensor replaces it."""
        out = node.outputs[0] if len(node.outputs) == 1 else None
        if out is None or node.op_name not in _VIEW_OPS or len(node.inputs) != 1 or node.kwargs:
            return False
        source, key = node.inputs[0], (node.op_name, repr(node.args))
        existing = source if node.is_identity else self._made.get(key)
        if existing is not None and out not in self._returned:
            self._replacements[out] = existing
            return True
        self._made[key] = out
        if node.op_name in ("aten::t", "aten::transpose"):
            inverse = pytree.tree_map(_ref_replacer({source: out}), node.args)
            self._made.setdefault((node.op_name, repr(inverse)), source)
        return False


def _ref_replacer(replacements: Mapping[str, str]) -> Callable[[Any], Any]:
    return lambda leaf: TensorRef(replacements.get(leaf.name, leaf.name)) if isinstance(leaf, TensorRef) else leaf


def eliminate_dead_code(nodes: list[CallNode], returned: Sequence[str]) -> list[CallNode]:
    """Remove calls whose results are unused, if they have no side effect."""
    live = set(returned)
    live_nodes: list[CallNode] = []
    for node in reversed(nodes):
        has_effect = node.mutated_storages or not any(node.outputs)  # an assertion returns nothing, and may raise
        has_effect = (
            has_effect or node.op_name.startswith(("_c10d", "c10d")) or node.op_name in ("opaque", "flat_all_reduce")
        )
        has_effect = has_effect and node.op_name != WRAP  # it only creates an object
        if has_effect or any(name in live for name in node.outputs):
            live.update(node.inputs)
            live_nodes.append(node)
    return live_nodes[::-1]
