"""What plans cost, the table of them, torch code for the same, and the plan that "auto" chooses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, UsageError
from meshbook.rank.tensors.footprints import BlockFootprint, Footprint, TensorShape, measure_footprint
from meshbook.rank.tensors.mesh_speed import SIZES, MeshSpeed
from meshbook.rank.tensors.strategies import Plan
from meshbook.tensors.module_plan import ModulePlan
from meshbook.tensors.plan_estimates import estimate_plan, list_candidates
from meshbook.tensors.planning import PlanComparison
from tests.tensors import models
from tests.tensors.models import close

SAMPLE = ((TensorShape((8, 6), "int64"),), {})


def saved_bytes(module: nn.Module, words: torch.Tensor) -> int:
    """What autograd really saves, but for parameters."""
    storages = {}
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(words)
    total = sum(storage.nbytes() for storage in storages.values())
    del out
    return total


@pytest.mark.parametrize("factory", [models.Llama, models.Bert])
@pytest.mark.parametrize("given", ["factory", "module"])
def test_a_footprint_has_the_bytes_that_a_forward_saves(factory: Any, given: str) -> None:
    module = factory()
    found = measure_footprint(factory if given == "factory" else module, SAMPLE, 2, 1, None, None, False)
    assert found.parameter_bytes == 4 * sum(parameter.numel() for parameter in module.parameters())
    wanted = saved_bytes(module, torch.zeros(4, 6, dtype=torch.long))
    assert found.activation_bytes == pytest.approx(wanted, rel=0.03)
    assert sum(block.activation_bytes for block in found.blocks) < found.activation_bytes
    assert found.flops > 0
    assert found.reduced_bytes == []


def test_a_footprint_in_bf16_saves_half() -> None:
    full = measure_footprint(models.Llama, SAMPLE, 1, 1, None, None, False)
    half = measure_footprint(models.Llama, SAMPLE, 1, 1, None, "bfloat16", True)  # as FSDP2 computes
    assert half.parameter_bytes == full.parameter_bytes
    assert half.activation_bytes < 0.7 * full.activation_bytes
    assert measure_footprint(models.Llama, SAMPLE, 1, 1, None, "bfloat16", False).flops == full.flops


def test_a_footprint_of_cut_layers_has_one_ranks_part() -> None:
    whole = measure_footprint(models.Llama, SAMPLE, 1, 1, None, None, False)
    part = measure_footprint(models.Llama, SAMPLE, 1, 2, None, None, False)
    layer, other = whole.blocks[0].parameter_bytes, part.blocks[0].parameter_bytes
    assert layer / 2 < other < 0.55 * layer
    # Summed are the outputs of o_proj and down_proj, and the gradients of what q, k, v, gate and up are given.
    assert part.reduced_bytes == [8 * 6 * 16 * 4] * 7 * 2
    assert part.flops < 0.6 * whole.flops


SPEED = MeshSpeed(
    {axis: {kind: [1e-3 + size * 1e-9 for size in SIZES] for kind in ("all_reduce", "all_gather", "reduce_scatter")}
     for axis in ("dp", "tp")},
    {"dp": 2e-3, "tp": 2e-3}, {"dp": 3e-3, "tp": 3e-3}, 1e12, 1e10, "cpu", 1 << 30,
)  # fmt: skip
BLOCKS = [BlockFootprint(100 << 20, 50 << 20, 10 << 20)] * 4
FOOTPRINT = Footprint(500 << 20, 500 << 20, 0, BLOCKS, 220 << 20, 5 << 20, 1e12, [1 << 20] * 10)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("plan", "memory"),
    [
        # Parameters, two states, buckets, and gradients, which are more than 220 of activations and 2 x 5 of the loss.
        (Plan(ddp="dp"), 500 + 1000 + 500 + 500),
        # Shards of an eighth; the root's 100 and two blocks gathered, one block's gradients; activations.
        (Plan(fsdp="dp"), 62.5 + 125 + 100 + 3 * 100 + 230),
        # Each block leaves its input of 10, and one is whole while it is computed again.
        (Plan(fsdp="dp", ac="every block"), 62.5 + 125 + 100 + 3 * 100 + (220 - 4 * 40 + 50 + 10)),
        (Plan(fsdp="dp", ac="every 2nd block"), 62.5 + 125 + 100 + 3 * 100 + (220 - 2 * 40 + 50 + 10)),
        (Plan(tp="tp"), 500 + 1000 + 500),
    ],
)
def test_memory_is_the_sum_of_what_a_rank_holds(plan: Plan, memory: float) -> None:
    found = estimate_plan(plan, {"dp": 8, "tp": 2}, FOOTPRINT, [SPEED], overlaps=False)
    assert found.memory_bytes / MIB == pytest.approx(memory)


def test_seconds_are_those_of_computing_and_of_each_collective() -> None:
    found = estimate_plan(Plan(fsdp="dp", tp="tp"), {"dp": 8, "tp": 2}, FOOTPRINT, [SPEED], overlaps=False).seconds
    assert found["compute"] == pytest.approx(1.0)
    assert found["optimizer"] == pytest.approx(20 * 62.5 * MIB / 1e10)
    sent = 1e-9 * (4 * 2 + 1) * (100 * MIB - SIZES[0])
    assert found["all_gather over dp"] == pytest.approx(5 * 3e-3 + sent)
    assert found["all_reduce of activations over tp"] == pytest.approx(10 * (2e-3 + 1e-9 * (MIB - SIZES[0])))
    again = estimate_plan(Plan(ddp="dp", ac="every block"), {"dp": 8}, FOOTPRINT, [SPEED], overlaps=False).seconds
    assert again["compute"] == pytest.approx(1.0 + 0.8 / 3)
    on_gpus = estimate_plan(Plan(ddp="dp"), {"dp": 8}, FOOTPRINT, [SPEED], overlaps=True).seconds
    assert on_gpus["all_reduce of gradients over dp"] == pytest.approx(0.0)  # while backward computes


def test_the_table_says_why_a_plan_is_not_chosen() -> None:
    axes = {"dp": 8}
    plans = [Plan(ddp="dp"), Plan(fsdp="dp"), Plan(fsdp="dp", ac="every block")]
    estimates = [estimate_plan(plan, axes, FOOTPRINT, [SPEED], overlaps=False) for plan in plans]
    chosen = ModulePlan(
        "fsdp over dp=8", Plan(fsdp="dp"), axes, "cpu", {}, [], {}, {}, {}, None, estimates, free_bytes=900 * MIB
    )
    lines = str(chosen).splitlines()
    assert lines[1].split() == ["plan", "memory/rank", "step"]
    assert "← chosen" in lines[2]
    assert "slower" in lines[3]
    assert "does not fit  1.6 GiB are missing; 1.0 GiB for optimizer" in lines[4]
    assert "| fsdp over dp=8 |" in chosen._repr_markdown_()
    comparison = PlanComparison(axes, estimates, {}, [SPEED], 900 * MIB)
    assert [one.plan for one in comparison.fitting()] == [Plan(fsdp="dp")]  # computing again is not needed


def test_candidates_use_all_axes() -> None:
    assert list_candidates({"dp": 4}, None, has_blocks=False) == [Plan(ddp="dp"), Plan(fsdp="dp"), Plan(tp="dp")]
    found = list_candidates({"dp": 2, "tp": 2}, "bf16", has_blocks=True)
    assert found[:2] == [Plan(ddp="dp", fsdp="tp", precision="bf16"), Plan(fsdp="dp", tp="tp", precision="bf16")]
    assert all(plan.ac == "every block" for plan in found[2:])


def test_code_does_what_the_plan_does(mesh22: Mesh) -> None:
    torch.manual_seed(3)
    alone = models.Llama()
    plan = Plan(fsdp="dp", tp="tp", ac="every 2nd block")
    model = meshbook.distribute(copy.deepcopy(alone), mesh22, strategy=plan)
    assert "for name in [f'layers.{i}.attn.q_proj' for i in range(0, 2)]:" in model.plan.code()
    assert "layers.0.attn.k_proj is cut colwise (recognised)" in model.plan.explain("layers.0.attn")
    assert "embed is whole over tp: neither in attention nor in an MLP" in model.plan.explain("embed")
    assert "its forward runs again in backward" in model.plan.explain("layers.1")
    assert "runs again" not in model.plan.explain("layers.0")
    with pytest.raises(UsageError, match="there are no parameters of 'layer'; there are those of embed"):
        model.plan.explain("layer")
    (words, following), *_ = models.batches(1)
    mesh22.push(model_=copy.deepcopy(alone), words_=words, following_=following, code_=model.plan.code())
    found = mesh22.run(
        "exec(code_)\n"
        "model_ = distribute(model_)\n"
        "first, size = mesh['dp'].get_local_rank() * 4, 4\n"
        "loss_ = torch.nn.functional.cross_entropy(\n"
        "    model_(words_[first:first + size]).flatten(0, 1), following_[6 * first:6 * (first + size)])\n"
        "loss_.backward()\n"
        "dist.all_reduce(loss_.detach(), group=mesh.get_group('dp'))\n"
        "norm_ = torch.nn.utils.clip_grad_norm_(\n"
        "    [p for name, p in model_.named_parameters() if '.mlp.' in name and 'weight' in name], 9.0).full_tensor()\n"
        "loss_.item() / 2, norm_.item()"
    ).values[0]
    wanted = nn.functional.cross_entropy(alone(words).flatten(0, 1), following)
    wanted.backward()
    weights = [p for name, p in alone.named_parameters() if ".mlp." in name and "weight" in name]
    norm = torch.nn.utils.clip_grad_norm_(weights, 9.0)
    close(found, (wanted.item(), norm.item()))


def test_auto_runs_the_best_two_and_leaves_no_trace_of_it(mesh2: Mesh) -> None:
    (words, _), *_ = models.batches(1)
    torch.manual_seed(5)
    alone, after = models.Llama(), torch.rand(1)
    torch.manual_seed(5)
    model = meshbook.distribute(models.Llama, mesh2, strategy="auto", sample=words)
    assert torch.equal(torch.rand(1), after)
    measured = [one for one in model.plan.estimates if one.measured_s is not None]
    assert len(measured) >= 2
    assert model.plan.strategy in [one.plan for one in measured]
    assert "← chosen" in str(model.plan)
    for name, tensor in model.state_dict(full=True).items():
        assert torch.equal(tensor, alone.state_dict()[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    data = models.batches(2)
    close(models.trained(model, mesh2.feed(data)), models.trained(alone, data))


def test_what_cannot_be_planned_is_said(mesh2: Mesh) -> None:
    (words, _), *_ = models.batches(1)
    with pytest.raises(UsageError, match=r"(?s)no plan fits into the 0.00 MiB.*fsdp over dp=2, .*missing.*What would"):
        meshbook.distribute(models.Llama, mesh2, strategy="auto", sample=words, memory=1000)
    with pytest.raises(CellError, match="forward"):
        meshbook.distribute(models.Llama, mesh2, strategy="auto", sample=(words, words, words))
    with pytest.raises(UsageError, match="memory= is what plans are compared with"):
        meshbook.distribute(models.Llama, mesh2, memory=1 << 30)
    model = meshbook.distribute(models.Llama, mesh2, strategy="ddp", sample=words[:7])
    assert "the sample has 7 rows, and 7 = 3 x 2 + 1 cannot be cut evenly" in str(model.plan)
