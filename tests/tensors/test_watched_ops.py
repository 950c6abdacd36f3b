"""What a sentinel does for each operation on remote tensors, while all is well."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshbook.rank.differences.hooks import TrainingHooks
from meshbook.rank.differences.remote_ops import Held, NaNReader, PlaceNames, RemoteOps, flow_of, unread_of
from meshbook.rank.tensors.engine import CurrentOp
from meshbook.rank.tensors.operators import TENSOR, TemplateMessage
from meshbook.rank.tensors.templates import CompiledTemplate
from meshbook.rank.tensors.watched_ops import unread
from meshbook.wire.messages import Frame


def template_of(name: str, num_in: int, *, is_view: bool = False, mutates: tuple[int, ...] = ()) -> CompiledTemplate:
    returns, outputs = ("one", (-1,)) if not mutates else ("one", (0,))
    if name == "aten::native_layer_norm.default":
        args: tuple[Any, ...] = (TENSOR, [4], None, None, 1e-5)
        returns, outputs = "many", (-1, -1, -1)
    elif name == "aten::cat.default":
        args = ([TENSOR] * num_in,)
    else:
        args = (TENSOR,) * num_in
    message = TemplateMessage(
        1, name, args, {}, outputs, returns, mutates, communicates=False, seeded=False, is_view=is_view
    )
    return CompiledTemplate(message, None, torch.device("cpu"))


TEMPLATES = [
    template_of("aten::mm.default", 2),
    template_of("aten::add.Tensor", 2),
    template_of("aten::div.Tensor", 2),
    template_of("aten::gelu.default", 1),
    template_of("aten::maximum.default", 2),  # carries nothing
    template_of("aten::t.default", 1, is_view=True),
    template_of("aten::native_layer_norm.default", 1),
    template_of("aten::relu_.default", 1, mutates=(0,)),
]


def random_window(seed: int) -> Iterator[Held]:
    draw, tensors, num_collectives = random.Random(seed), [torch.rand(4, 4) for _ in range(3)], 0
    for _ in range(60):
        template = draw.choice(TEMPLATES)
        inputs = [draw.choice(tensors[-6:]) for _ in range(template.num_in)]
        result = template.run(inputs, [])
        before, num_collectives = num_collectives, num_collectives + (draw.random() < 0.1)
        yield template, inputs, [], result, 0, before, num_collectives, set() if template.mutates else None
        tensors.append(result[0] if isinstance(result, tuple) else result)


def ids_of_results(held: Held) -> set[int]:
    _, _, _, result, *_ = held
    return {id(tensor) for tensor in pytree.tree_leaves(result)}


def test_what_is_looked_at_is_what_the_flows_of_operations_leave_unread() -> None:
    for seed in range(50):
        window = list(random_window(seed))
        assert list(map(id, unread_of(window))) == unread(map(flow_of, window))
        draw = random.Random(seed)
        given = {key for held in window if draw.random() < 0.5 for key in ids_of_results(held)}  # to a step
        others = [held for held in window if held[5] == held[6] or not given.issuperset(ids_of_results(held))]
        assert list(map(id, unread_of(window, frozenset(given)))) == unread(map(flow_of, others))


class Batch:
    def current_op(self, number: int | None = None) -> CurrentOp:
        return CurrentOp("aten.add", None, {}, {})


def num_calls(act: Callable[[], Any]) -> int:
    """How many functions are called, of Python's and of C's."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def test_an_operation_that_is_watched_costs_few_calls_more() -> None:
    ops = RemoteOps(Batch(), lambda: True, lambda: 0, lambda *_: None, TrainingHooks().guarded, NaNReader())
    add, x, count = template_of("aten::add.Tensor", 2), torch.ones(4, 4), 96  # which is no whole window

    def run(run_one: Callable[..., Any]) -> None:
        result = x
        for number in range(count):
            result = run_one(add, [result, x], [], number)

    def run_watched() -> None:
        with ops:
            run(ops.run)

    with torch.no_grad():
        plain, watched = num_calls(lambda: run(lambda *given: given[0].run(*given[1:3]))), num_calls(run_watched)
    added = (watched - plain) / count
    assert added < 20, added


def test_the_line_of_a_collective_is_named_when_it_is_told_though_another_operation_runs_then() -> None:
    lines = iter([Frame("train.py", 3, "step"), Frame("train.py", 9, "step")])
    places = PlaceNames(lambda file: None)
    assert places.note_remote()() == ""
    places.remote_op = lambda: CurrentOp("aten.sum", next(lines), {}, {})
    named = places.note_remote()
    assert places.name_remote() == "train.py, line 9 in step"
    assert named() == "train.py, line 3 in step"
