"""What is left out of a recorded step on a rank changes nothing of what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshbook.rank.tensors.lowering import Lowering
from meshbook.rank.tensors.lowering_codegen import Lowered
from meshbook.rank.tensors.lowering_passes import (
    ALL_REDUCE,
    BUCKET_BYTES,
    CallNode,
    TensorRef,
    flat_all_reduce,
    merge_all_reduces,
)

aten = torch.ops.aten


def lowered(step: Callable[..., Sequence[torch.Tensor]], *inputs: torch.Tensor) -> tuple[list[Any], Lowered]:
    """What a step gave while it was watched, and the function that was made of it."""
    lowering = Lowering(inputs)
    with torch.no_grad(), lowering, lowering.operation(0, 0, []):
        results = list(step(*inputs))
    return results, lowering.compile(results)


def test_views_there_and_back_whole_or_made_twice_are_made_once() -> None:
    def step(x: Any, w: Any) -> list[Any]:
        there = aten.t.default(aten.t.default(x))
        product = aten.mm.default(aten.view.default(there, [4, 3]), aten.t.default(w))
        again = aten.mm.default(x, aten.t.default(w))
        back = aten.transpose.int(aten.transpose.int(product, 0, 1), 0, 1)
        return [aten.add.Tensor(back, again)]

    x, w = torch.randn(4, 3), torch.randn(5, 3)
    (wanted,), function = lowered(step, x, w)
    assert function.num_ops == 4, function.source  # one view, two products, their sum
    (got,) = function.run([x, w], [])
    assert torch.equal(got, wanted)
    other = torch.randn(4, 3)
    assert torch.equal(function.run([other, w], [])[0], step(other, w)[0])


def test_a_view_that_was_changed_through_another_of_the_same_storage_has_the_change() -> None:
    def step(x: Any) -> list[Any]:
        whole = aten.clone.default(x)
        before = aten.view.default(whole, [6])
        aten.mul_.Tensor(aten.t.default(whole), 2.0)
        after = aten.view.default(whole, [6])
        return [aten.add.Tensor(before, after), aten.view.default(whole, [2, 3]), whole]

    x = torch.randn(2, 3)
    wanted, function = lowered(step, x)
    got = function.run([x], [])
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(got[0], 4 * x.view(6))
    assert got[1] is not got[2]  # each is a tensor of its own, whoever changes its shape in place
    assert got[1].data_ptr() == got[2].data_ptr()


def test_a_step_that_changes_shapes_in_place_keeps_all_its_views() -> None:
    def step(x: Any) -> list[Any]:
        first = aten.view.default(x, [2, 3])
        aten.t_.default(first)
        second = aten.view.default(x, [2, 3])
        return [aten.add.Tensor(second, 1), aten.mul.Tensor(first, 1)]

    x = torch.randn(2, 3)
    wanted, function = lowered(step, x)
    got = function.run([x], [])
    assert [tensor.shape for tensor in got] == [(2, 3), (3, 2)]
    assert all(map(torch.equal, got, wanted))


def test_operators_called_the_quick_way_do_the_same_bit_for_bit() -> None:
    def step(x: Any, w: Any, g: Any) -> list[Any]:
        normal, mean, deviation = aten.native_layer_norm.default(x, [6], g, g, 1e-5)
        product = aten.addmm.default(g, normal, aten.t.default(w), beta=0.5)
        soft = aten._softmax.default(product, -1, False)
        wide = aten.expand.default(aten.view.default(soft, [1, 4, 6]), [2, 4, 6])
        copied = aten._unsafe_view.default(aten.clone.default(wide, memory_format=torch.contiguous_format), [8, 6])
        sums = aten.sub.Tensor(copied, aten.add.Tensor(copied, 3, alpha=2), alpha=0.5)
        parts = [x.clone(), w.clone()]
        aten._foreach_mul_.Scalar(parts, 0.9)
        aten._foreach_add_.List(parts, [x, w], alpha=0.1)
        aten._foreach_addcdiv_.ScalarList(parts, [x, w], [x, w], [0.3, 0.7])
        roots = aten._foreach_sqrt.default(aten._foreach_abs.default(parts))
        return [sums, aten.gelu.default(sums, approximate="tanh"), mean, deviation, *parts, *roots]

    inputs = torch.randn(4, 6), torch.randn(6, 6), torch.randn(6)
    wanted, function = lowered(step, *inputs)
    assert all(map(torch.equal, function.run(inputs, []), wanted))


def call(name: str, inputs: str, output: str, **more: Any) -> CallNode:
    args = [TensorRef(each) for each in inputs.split()]
    settings = {"op_name": name, "merge_key": ("sum", "group") if name == ALL_REDUCE else (), **more}
    return CallNode(name, args, {}, [output], inputs.split(), True, 0, **settings)


def merged(*nodes: CallNode, input_storages: frozenset[int] = frozenset()) -> tuple[list[Any], tuple[int, ...]]:
    """The order of calls by what they give, and the sizes of merged all-reduces."""
    found, sizes = merge_all_reduces(list(nodes), input_storages)
    return [node.outputs if node.function is flat_all_reduce else node.outputs[0] for node in found], sizes


def test_all_reduces_are_one_until_a_result_is_used() -> None:
    nodes = [
        call(ALL_REDUCE, "a", "ra", input_storage=1),
        call(ALL_REDUCE, "b", "rb", input_storage=2),
        call("aten::add", "ra rb", "sum"),
        call(ALL_REDUCE, "c", "rc", input_storage=3),
    ]
    assert merged(*nodes) == ([["ra", "rb"], "sum", "rc"], (2,))
    assert merged(nodes[0], call("aten::neg", "ra", "minus"), *nodes[1:]) == (["ra", "minus", "rb", "sum", "rc"], ())


def test_an_all_reduce_does_not_move_past_a_change_of_its_input_nor_into_another_group() -> None:
    first, second = call(ALL_REDUCE, "a", "ra", input_storage=1), call(ALL_REDUCE, "b", "rb", input_storage=2)
    change = call("aten::zero_", "a", "z", mutated_storages=frozenset((1,)))
    assert merged(first, change, second) == (["ra", "z", "rb"], ())
    elsewhere = call(ALL_REDUCE, "b", "rb", input_storage=2, merge_key=("max", "group"))
    assert merged(first, elsewhere) == (["ra", "rb"], ())
    assert merged(first, second, input_storages=frozenset((2,))) == (["ra", "rb"], ())  # an input of the step
    large = call(ALL_REDUCE, "b", "rb", input_storage=2, nbytes=BUCKET_BYTES + 1)
    assert merged(first, large) == (["ra", "rb"], ())
