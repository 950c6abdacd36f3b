"""Strategies in words: every plan gives the numbers of one process, or says why it cannot."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, PlacementError, UsageError
from meshbook.rank.tensors.strategies import Plan, plan_named
from meshbook.rank.tensors.tensor_parallel import find_cut
from tests.tensors import gpt, models
from tests.tensors.models import compare


def test_hsdp_cuts_batches_over_both_axes_and_parameters_over_the_second(mesh22: Mesh) -> None:
    model = compare(mesh22, models.Llama, "hsdp")
    weight = model.get_parameter("layers.0.mlp.up_proj.weight")
    assert weight.placements == (Replicate(), Shard(0))
    (words, _), *_ = models.batches(1)
    assert model(meshbook.distribute(words, mesh22, [Shard(0), Replicate()])).placements == (Shard(0), Shard(0))
    assert "hsdp over dp=2 x tp=2, 2 blocks" in str(model.plan)
    with pytest.raises(CellError, match="6 rows, which cannot be cut evenly over dp=2 x tp=2"):
        model(meshbook.distribute(words[:6], mesh22, [Shard(0), Replicate()]))


@pytest.mark.parametrize("factory", [models.Llama, models.Bert])
def test_layers_are_cut_over_all_ranks(mesh2: Mesh, factory: Any) -> None:
    model = compare(mesh2, factory, "tp")
    cut = {name for name, parameter in model.named_parameters() if parameter.placements[0].is_shard()}
    assert len(cut) == 20


@pytest.mark.parametrize("given", ["factory", "module"])
def test_layers_are_cut_over_one_axis_and_their_parts_sharded_over_the_other(mesh22: Mesh, given: str) -> None:
    model = compare(mesh22, models.Llama, Plan(fsdp="dp", tp="tp", ac="every 2nd block"), given=given)
    weight = model.get_parameter("layers.0.attn.q_proj.weight")
    assert (weight.placements, weight.local(0).shape) == ((Shard(1), Shard(0)), (8, 8))
    assert "fsdp over dp=2, tp over tp=2, ac every 2nd block, 2 blocks" in str(model.plan)


@pytest.mark.parametrize("strategy", [Plan(ddp="dp", ac="every block"), Plan(fsdp="dp", ac="every block")])
def test_blocks_that_are_computed_again_in_backward_give_the_same_numbers(mesh2: Mesh, strategy: Plan) -> None:
    compare(mesh2, models.Llama, strategy)


def test_a_plan_computes_in_its_precision(mesh22: Mesh) -> None:
    model = meshbook.distribute(models.Llama, mesh22, strategy=Plan(fsdp="dp", tp="tp", precision="bf16"))
    (words, _), *_ = models.batches(1)
    out = model(meshbook.distribute(words, mesh22, [Shard(0), Replicate()]))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(UsageError, match="say it once"):
        meshbook.distribute(models.Llama, mesh22, strategy=Plan(fsdp="dp", precision="bf16"), precision="fp32")


@pytest.mark.parametrize(
    "strategy",
    [
        Plan(fsdp="dp", ac="every block"),
        *(pytest.param(Plan(**{way: "dp"}), marks=pytest.mark.thorough) for way in ("ddp", "tp")),
    ],
    ids=str,
)
def test_compiled_blocks_give_the_same_numbers(mesh2: Mesh, strategy: Plan) -> None:
    model = compare(mesh2, models.Llama, dataclasses.replace(strategy, compile="aot_eager"))
    assert "compiled" in model.plan
    assert "torch.compile" in model.plan.code()


class Branching(models.MLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.sum() > 0 else super().forward(2 * x)


def test_what_torch_leaves_uncompiled_is_told_with_its_line(mesh2: Mesh) -> None:
    model = meshbook.distribute(
        lambda: nn.Sequential(Branching(16), Branching(16)), mesh2, strategy="fsdp", compile="aot_eager"
    )
    with pytest.warns(UserWarning, match=r"has left parts .*: Data-dependent branching.* \(test_strategies\.py:\d+\)"):
        model(torch.ones(4, 3, 16))
    with pytest.raises(CellError, match=r"torch\.compile has no backend 'unknown'; known: .*inductor"):
        meshbook.distribute(models.Llama, mesh2, strategy="fsdp", compile="unknown")


def trained_with_scaler(model: Any) -> list[tuple[float, float]]:
    """Train in float16, with one step whose gradients overflow; return losses and scales."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
    found = []
    for factor in (1.0, 1000.0, 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        loss = ((model(x).float() - y) ** 2).mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((float(loss.detach()), scaler.get_scale()))
    return found


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("ddp", "tp"))]
)
def test_float16_with_a_scaler_skips_and_scales_as_one_process_does(mesh2: Mesh, strategy: str) -> None:
    def factory() -> nn.Module:
        torch.manual_seed(3)  # which every strategy heeds
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    alone = factory()
    alone.forward = torch.autocast("cpu", torch.float16)(alone.forward)
    expected = trained_with_scaler(alone)
    found = trained_with_scaler(meshbook.distribute(factory, mesh2, strategy=strategy, axis="dp", precision="fp16"))
    assert [scale for _, scale in found] == [scale for _, scale in expected]
    assert expected[0][1] > expected[1][1]  # an overflow
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=5e-3)


def normed() -> nn.Module:
    torch.manual_seed(0)
    layers = [norm(nn.Linear(8, 8)) for norm in (parametrizations.weight_norm, parametrizations.spectral_norm)]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = (model(torch.ones(4, 8)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_parametrized_modules_are_made_on_the_ranks_and_not_sent(mesh2: Mesh, strategy: str) -> None:
    assert losses(meshbook.distribute(normed, mesh2, strategy=strategy)) == pytest.approx(losses(normed()), rel=1e-4)
    with pytest.raises(UsageError, match=r"has parametrized modules .* give the function that makes it"):
        meshbook.distribute(normed(), mesh2, strategy=strategy)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_steps_of_sharded_modules_are_those_of_one_process(mesh2: Mesh, kind: Any) -> None:
    torch.manual_seed(0)
    alone = nn.Linear(8, 4)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy="fsdp")
    for one in (alone, model):
        optimizer, scaler = kind(one.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=4.0)
        for x in (torch.ones(4, 8), torch.full((4, 8), torch.inf), torch.ones(4, 8)):
            optimizer.zero_grad()
            scaler.scale(one(x).square().mean()).backward()
            scaler.step(optimizer)  # the second one is left out
            scaler.update()
    torch.testing.assert_close(model.state_dict(full=True), alone.state_dict())


def test_a_fused_step_that_a_mesh_cannot_take_says_what_to_leave_out(mesh2: Mesh) -> None:
    model = meshbook.distribute(lambda: nn.Linear(8, 1), mesh2, strategy="fsdp")  # one row, two ranks
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"_fused_adamw_: .* leave fused=True out"):
        optimizer.step()


class Normed(nn.Module):
    """Looks like an MLP, and has a norm over the whole width between its Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(F.layer_norm(self.up(x), self.up(x).shape[-1:]))


class Scaled(Normed):
    """Right forward, wrong gradient: what a rank adds to its part is added by each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x) * torch.exp(self.shift))


class Gated(Normed):
    """What it is called with beside x is for all of its width: each rank has a part of its gradient."""

    def forward(self, x: Any, gate: Any) -> Any:
        return self.down(self.up(x) * gate)


class WithGate(nn.Module):
    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(1), requires_grad=learned)
        self.mlp = Gated()

    def forward(self, x: Any) -> Any:
        return self.mlp(x, self.gate * 2)


def test_what_has_no_gradient_is_not_compared_and_an_evaluation_before_the_first_step_hides_none(mesh22: Mesh) -> None:
    x = torch.ones(4, 8)
    for learned in (False, True):
        model = meshbook.distribute(lambda learned=learned: WithGate(learned), mesh22, strategy="tp")  # type: ignore[misc]
        with torch.no_grad():
            model(x)
        if learned:
            with pytest.raises(CellError, match="mlp gives other numbers when its layers are cut over tp=2"):
                model(x)
        else:
            model(x).sum().backward()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).view(-1, 16))


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (Normed, r"0 gives other numbers when its layers are cut over tp=2: .* Something between them works on"),
        (Scaled, r"0 gives other numbers when its layers are cut over tp=2"),
        (Whole, r"0 cannot run on a part of its heads or width: .* let -1 stand for it"),
    ],
)
def test_a_module_that_does_not_bear_the_cut_is_told_at_its_first_forward(
    mesh2: Mesh, factory: Any, sentence: str
) -> None:
    model = meshbook.distribute(lambda: nn.Sequential(factory(), nn.Linear(8, 2)), mesh2, strategy="tp")
    with pytest.raises(CellError, match=sentence):
        model(torch.ones(4, 8))


def test_a_table_by_hand_says_what_is_cut(mesh2: Mesh) -> None:
    table = {"layers.*.mlp.*_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    strategy = Plan(tp="dp", tp_plan={"layers.*.mlp.down_proj": "rowwise", **table, "head": "colwise_gather_output"})
    model = compare(mesh2, models.Llama, strategy)
    assert model.get_parameter("layers.1.mlp.up_proj.weight").placements == (Shard(0),)
    assert model.get_parameter("layers.1.mlp.down_proj.weight").placements == (Shard(1),)
    assert model.get_parameter("layers.1.attn.q_proj.weight").placements == (Replicate(),)
    assert model.get_parameter("head.weight").placements == (Shard(0),)


class WithTable(models.Llama):
    """A model that says itself how it is cut, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self._tp_plan = {
            **{f"layers.*.attn.{name}_proj": "colwise" for name in "qkv"},
            "layers.*.attn.o_proj": "rowwise",
            **{f"layers.*.attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"},
            "embed": "embedding_rowwise",
            "head": "colwise_rep",
        }
        for layer in self.layers:  # Hugging Face's attention takes as many heads as there are
            layer.attn.num_heads = layer.attn.num_kv_heads = -1
            layer.attn.repeats = 2


def test_the_models_own_table_is_followed(mesh2: Mesh) -> None:
    compare(mesh2, WithTable, "tp", given="module")
    cut = find_cut(WithTable(), 2)
    assert cut.source == "the model's own table"
    assert cut.styles["layers.1.attn.q_norm"] == "replicated_with_grad_allreduce"
    assert "layers.0.mlp.up_proj" not in cut.styles
    assert (cut.checked, cut.heads) == ([], {})
    tied = WithTable()
    tied.head.weight = tied.embed.weight
    cut = find_cut(tied, 2)
    assert cut.whole["head"] == "its parameter is also embed.weight, which is whole"
    assert "head" not in cut.styles


@pytest.mark.parametrize(
    ("module", "size", "sentence"),
    [
        (models.Llama(12, 4, 4), 3, r"4 heads of layers.0.attn over tp=3: 4 = 1 x 3 \+ 1; tp may be 1, 2, 4"),
        (models.Llama(16, 4, 2), 4, r"2 key-value heads of layers.0.attn over tp=4: 2 = 0 x 4 \+ 2; tp may be 1, 2"),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), 4, r"0: colwise cuts its width of 6 over tp=4"),
        (nn.Linear(4, 4), 2, r"no layer of this Linear was recognised as attention"),
        (nn.TransformerEncoderLayer(8, 2, 10), 4, r"linear1: colwise cuts its width of 10 over tp=4: 10 = 2 x 4 \+ 2"),
    ],
)
def test_what_cannot_be_cut_shows_the_sum(module: nn.Module, size: int, sentence: str) -> None:
    with pytest.raises(PlacementError, match=sentence):
        find_cut(module, size)


def test_what_stays_whole_has_a_reason() -> None:
    cut = find_cut(gpt.GPT(), 2)
    assert cut.whole["blocks.0.qkv"] == "one Linear makes q, k and v, and an even cut of it would mix them"
    assert cut.whole["head"] == "neither in attention nor in an MLP"
    assert (cut.styles["blocks.1.up"], cut.styles["blocks.1.down"]) == ("colwise", "rowwise")
    assert cut.checked == ["blocks.0"]


@pytest.mark.parametrize(
    ("name", "axes", "axis", "plan"),
    [
        ("ddp", {"rank": 4}, None, Plan(ddp="rank")),
        ("fsdp", {"dp": 2, "tp": 2}, None, Plan(fsdp="dp")),
        ("fsdp", {"a": 2, "b": 2}, "b", Plan(fsdp="b")),
        ("hsdp", {"node": 2, "gpu": 4}, None, Plan(ddp="node", fsdp="gpu")),
        ("tp", {"rank": 4}, None, Plan(tp="rank")),
        ("tp", {"dp": 2, "tp": 2}, None, Plan(tp="tp")),
        ("fsdp+tp", {"gpu": 2, "tp": 2}, None, Plan(fsdp="gpu", tp="tp")),
        ("pp", {"rank": 4}, None, Plan(pp="rank")),
        ("pp", {"pp": 2, "dp": 2}, None, Plan(pp="pp")),
    ],
)
def test_a_name_is_a_plan(name: str, axes: dict[str, int], axis: str | None, plan: Plan) -> None:
    assert plan_named(name, axes, axis) == plan


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Plan(), "names no axis"),
        (lambda: Plan(fsdp="dp", tp="dp"), "an axis can do one thing only"),
        (lambda: Plan(ddp="dp", tp="tp"), r"Plan\(fsdp='dp', tp='tp'\)"),
        (lambda: Plan(ddp="dp", ac="some blocks"), "there is no ac='some blocks'"),
        (lambda: Plan(ddp="dp", ac="every 0th block"), "would be no block"),
        (lambda: Plan(ddp="dp", precision="fp8"), "there is no precision 'fp8'"),
        (lambda: Plan(ddp="dp", tp_plan={}), "does not say over which axis"),
        (lambda: Plan(fsdp="dp").check_axes({"rank": 4}), "this mesh has no axis 'dp'; it has rank=4"),
        (lambda: Plan(fsdp="b", tp="a").check_axes({"a": 2, "b": 2}), "start it with the axes b, a"),
        (lambda: plan_named("hsdp", {"rank": 4}, None), r"strategy=meshbook.Plan\(ddp=…, fsdp=…\)"),
        (lambda: Plan(fsdp="dp", pp="pp"), r"whole copies do: Plan\(ddp=…, pp='pp'\)"),
        (lambda: Plan(pp="pp", microbatches=0), "microbatches=0: how many parts a batch has"),
        (lambda: Plan(ddp="dp", microbatches=2), "for the stages of pp=…"),
        (lambda: Plan(ddp="dp", pp="pp").check_axes({"dp": 4}), "this mesh has no axis 'pp'; it has dp=4"),
        (lambda: plan_named("pp", {"a": 2, "b": 2}, None), "say whose ranks are stages with axis"),
        (lambda: plan_named("tp", {"a": 2, "b": 2}, None), "say over which layers are cut with axis"),
        (lambda: plan_named("fsdp+tp", {"rank": 4}, None), "has the axes rank=4; name them"),
    ],
)
def test_words_that_do_not_go_together_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()


def test_a_model_without_blocks_has_nothing_to_compute_again(mesh2: Mesh) -> None:
    with pytest.raises(CellError, match="0 repeated blocks were found in this Linear"):
        meshbook.distribute(lambda: nn.Linear(4, 4), mesh2, strategy=Plan(ddp="dp", ac="every block"))
