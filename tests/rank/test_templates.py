"""Templates of operations as a rank executes them, without a mesh."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _collective_utils

from meshbook.errors import PlacementError
from meshbook.rank.tensors import attention, dtensor_patches
from meshbook.rank.tensors.operators import FLOAT, FUNCTIONS, MESH, TENSOR, TemplateMessage
from meshbook.rank.tensors.replay import RecordedOp, RecordedStep, StepReplayer
from meshbook.rank.tensors.templates import CompiledTemplate

CPU = torch.device("cpu")


def message(function: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **more: Any) -> TemplateMessage:
    settings: dict[str, Any] = {"outputs": (-1,), "returns": "one", "mutates": (), "communicates": False}
    return TemplateMessage(1, function, args, kwargs or {}, **{**settings, "seeded": False, **more})


def run(sent: TemplateMessage, ins: Sequence[Any], floats: Sequence[float] = ()) -> Any:
    template = CompiledTemplate(sent, None, CPU)
    assert (template.num_in, template.num_floats) == (len(ins), len(floats))
    return template.run(list(ins), floats)


def test_tensors_and_floats_come_where_the_template_has_them() -> None:
    x, y = torch.ones(2), torch.arange(2.0)
    assert torch.equal(run(message("aten::add.Tensor", (TENSOR, TENSOR)), [x, y]), x + y)
    assert torch.equal(run(message("aten::mul.Scalar", (TENSOR, FLOAT)), [x], [3.0]), x * 3)
    joined = message("aten::cat.default", ([TENSOR, TENSOR], 0))
    assert torch.equal(run(joined, [x, y]), torch.cat([x, y]))
    added = message("aten::add.Tensor", (TENSOR, TENSOR), {"alpha": FLOAT})
    assert torch.equal(run(added, [x, y], [2.0]), x + 2 * y)


def test_of_several_results_those_that_are_new_tensors_are_given() -> None:
    x = torch.tensor([3.0, 1.0])
    for outputs, wanted in (((-1, -1), {7: 3.0, 8: 0}), ((None, -1), {7: 0})):
        template = CompiledTemplate(message("aten::max.dim", (TENSOR, 0), outputs=outputs, returns="many"), None, CPU)
        values: dict[int, Any] = {}
        template.store(template.run([x], []), list(wanted), values)
        assert {id: value.item() for id, value in values.items()} == wanted


def test_a_seed_gives_the_same_numbers_again_and_leaves_the_generator_alone() -> None:
    drawn = message("aten::bernoulli.p", (TENSOR, FLOAT), seeded=True)
    before = torch.get_rng_state()
    first, again, other = (run(drawn, [torch.ones(64)], [0.5, seed]) for seed in (7.0, 7.0, 8.0))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operator_that_ranks_do_not_have_is_named_when_it_is_called() -> None:
    with pytest.raises(NotImplementedError, match=r"the operator nobody\.knows is registered in the notebook"):
        run(message("nobody::knows.default", (TENSOR,)), [torch.ones(1)])


def test_a_result_has_the_dtype_of_its_data_also_where_a_recorded_step_is_run_operation_by_operation() -> None:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)

    def misreported(local: torch.Tensor, on: Any) -> DTensor:
        """As DTensor's cache does it: another dtype than the data has."""
        result = DTensor.from_local(local, on, [Replicate()], run_check=False)
        result._spec.tensor_meta = result._spec.tensor_meta._replace(dtype=torch.float64)  # type: ignore[union-attr]
        return DTensor(local, result._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def reported(tensor: Any) -> torch.dtype:
        return tensor._spec.tensor_meta.dtype  # type: ignore[no-any-return]

    FUNCTIONS["misreported"] = misreported
    try:
        sent = message("meshbook::misreported", (TENSOR, MESH))
        assert reported(misreported(torch.ones(2), mesh)) == torch.float64
        assert reported(CompiledTemplate(sent, mesh, CPU).run([torch.ones(2)], [])) == torch.float32
        op = RecordedOp(1, (0,), (1,), 0, 0)
        player = StepReplayer(RecordedStep("key", 1, (op,), {1: pickle.dumps(sent)}, (1,)), mesh, CPU, first_call=0)
        player.lowering_failure = "of this test"
        (result,) = player.run(0, [torch.ones(2)], [])
        assert reported(result) == torch.float32
    finally:
        del FUNCTIONS["misreported"]


def test_results_that_are_placed_otherwise_than_planned_are_refused_each_time() -> None:
    mesh1 = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    x = DTensor.from_local(torch.ones(4, 2), mesh1, [Replicate()])
    planned = {"placements": ((Shard(0),),)}
    template = CompiledTemplate(message("aten::neg.default", (TENSOR,), **planned), mesh1, CPU)
    for _ in range(2):
        with pytest.raises(
            PlacementError, match=r"aten.neg: result 0 is placed \(R\) here, and \(S\(0\)\) was planned"
        ):
            template.run([x], [])
    planned = {"placements": ((Replicate(),),)}
    right = CompiledTemplate(message("aten::neg.default", (TENSOR,), **planned), mesh1, CPU)
    assert torch.equal(right.run([x], []).to_local(), -torch.ones(4, 2))


def test_costs_do_not_depend_on_how_many_devices_a_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    dtensor_patches.install()
    monkeypatch.setattr(torch.cpu, "device_count", lambda: 8)
    counted = _collective_utils._mesh_resources.num_devices_per_host  # type: ignore[attr-defined]
    assert [counted("cpu"), counted("cuda")] == [1, 1]


def test_attention_by_torchs_own_choice_gives_the_numbers_of_the_cpu_kernel() -> None:
    torch.manual_seed(1)
    query, key, value, grad = (torch.randn(2, 4, 8, 16) for _ in range(4))
    out, saved = attention._forward_by_torch(query, key, value, None, True, None, True)
    wanted, sums = attention.forward(query, key, value, None, True, None, True)
    assert torch.equal(out, wanted)
    assert not out.requires_grad
    for kept in (saved, torch.empty(())):  # with the graph, and on a rank that has none
        grads = attention._backward_by_torch(grad, query, key, value, out, kept, None, True, None)
        for own, other in zip(
            grads, attention.backward(grad, query, key, value, wanted, sums, None, True, None), strict=True
        ):
            torch.testing.assert_close(own, other)
            assert own.stride() == other.stride()
