"""Faults in the backward of modules on the ranks, which a notebook trains: they are named; no healthy step is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshbook import distribute, module_to_mesh
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.wire.messages import NumberFinding
from tests.zoo.test_bad_numbers import heard

pytestmark = pytest.mark.usefixtures("starts_meshes")

STRATEGIES = ("ddp", "fsdp", "tp")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        yield mesh


class BadBackward(torch.autograd.Function):
    """Gives NaN in backward, on one rank alone."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad * 0 / (0 if torch.distributed.get_rank() == 1 else 1)


def sqrt_at_0(block: nn.Module, x: Any) -> Any:
    return x + torch.sqrt(x * 0)


def norm_of_0(block: nn.Module, x: Any) -> Any:
    return x + (x * 0).square().sum(-1, keepdim=True).sqrt()


def log_of_a_softmax_that_underflows(block: nn.Module, x: Any) -> Any:
    first = torch.zeros(x.shape[-1])
    first[0] = 200.0
    return torch.where(first > 0, torch.log(torch.softmax(x * 0 + first, -1)), x)


def bad_on_rank_1(block: nn.Module, x: Any) -> Any:
    return BadBackward.apply(x)


def healthy(block: nn.Module, x: Any) -> Any:
    return x


class Block(nn.Module):
    def __init__(self, fault: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        return x + self.down(F.relu(self.up(self.fault(self, x))))


class Net(nn.Module):
    def __init__(self, fault: Callable[[nn.Module, Any], Any], at: int = 1, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(fault if number == at else healthy) for number in range(num_blocks))

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(mesh: Mesh, strategy: str, number: int = 0) -> Any:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    return distribute(rows, mesh, sharding_spec=[] if strategy == "tp" else ["dp"])


def found_by(mesh: Mesh) -> tuple[tuple[int, ...], NumberFinding]:
    """The ranks that have found something, and what the first of them has found."""
    mesh.run("pass")  # when all operations have run
    report = heard(mesh)
    assert report.findings, report.text
    assert len({rank for rank, _ in report.findings}) == len(report.findings), report.text
    return tuple(rank for rank, _ in report.findings), report.findings[0][1]


FAULTS = {
    sqrt_at_0: ((0, 1), "sqrt"),
    norm_of_0: ((0, 1), "sqrt"),
    log_of_a_softmax_that_underflows: ((0, 1), "log"),
    bad_on_rank_1: ((1,), "bad_backward"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_first", [True, False], ids=["in the first backward", "in a later one"])
def test_where_a_gradient_stops_being_finite_is_named(
    mesh: Mesh, strategy: str, fault: Callable[[nn.Module, Any], Any], is_first: bool
) -> None:
    torch.manual_seed(0)
    model = distribute(Net(fault), mesh, strategy=strategy)
    if not is_first:
        model(batch(mesh, strategy)).square().mean().backward()
        model.zero_grad()
    mesh.nan(True)
    loss = model(batch(mesh, strategy)).square().mean()
    loss.backward()
    line = sys._getframe().f_lineno - 1
    assert loss.isfinite().item()
    ranks, found = found_by(mesh)
    began_on, op = FAULTS[fault]
    assert ranks == began_on
    assert found.module.startswith("Net.blocks")
    assert found.parameter == "blocks.0.down.bias"  # the last one before the fault, to which backward comes first
    if strategy == "ddp":
        assert (found.module, found.op) == ("Net.blocks.1", op)
    assert f"backward at zoo/test_bad_gradients.py, line {line} in " in found.line
    assert "; first bad gradient: blocks.0.down.bias; reached ranks 0-1 by " in found.text


@pytest.mark.parametrize(("at", "rank"), [(1, 0), (3, 1)])
def test_the_stage_of_a_pipeline_whose_backward_makes_numbers_bad_is_named(mesh: Mesh, at: int, rank: int) -> None:
    torch.manual_seed(0)
    model = distribute(Net(sqrt_at_0, at, num_blocks=4), mesh, strategy="pp")
    mesh.nan(True)
    model(torch.randn(8, 4)).square().mean().backward()
    ranks, found = found_by(mesh)
    assert (ranks, found.phase, found.parameter) == ((rank,), "backward", f"blocks.{at - 1}.down.bias")


class BadWeight(torch.autograd.Function):
    """A product whose gradient is NaN for the weight alone, on one rank alone."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        is_bad = torch.distributed.get_rank() == 1
        return grad @ weight.T, (x.T @ grad).fill_(torch.nan if is_bad else 1.0)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.last = nn.Linear(4, 8), nn.Parameter(torch.ones(8, 8)), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.last(BadWeight.apply(self.first(x), self.weight))


def test_a_gradient_that_no_operation_explains_is_named_by_its_parameter(mesh: Mesh) -> None:
    model = distribute(Weighted(), mesh, strategy="ddp")
    mesh.nan(True)
    model(batch(mesh, "ddp")).mean().backward()
    ranks, found = found_by(mesh)
    assert (ranks, found.phase, found.module) == ((1,), "gradient", "Weighted.weight")
    assert "Weighted.weight (gradient), " in found.text


class OfABias(nn.Module):
    """Has a bad gradient of the first element of a bias, on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        root = self.first.bias[:1] * (0 if torch.distributed.get_rank() == 1 else 1) + 0
        return self.last(x + 0 * root.abs().sqrt())


def test_a_gradient_of_which_another_rank_has_the_bad_part_is_named_by_the_rank_that_gave_it(mesh: Mesh) -> None:
    model = distribute(OfABias(), mesh, strategy="fsdp")
    mesh.nan(True)
    model(batch(mesh, "fsdp")).mean().backward()
    ranks, found = found_by(mesh)
    assert (ranks, found.phase, found.module) == ((1,), "gradient", "OfABias.first.bias")
    assert "reached ranks 0-1 by reduce_scatter" in found.text


def test_a_gradient_that_the_notebooks_loss_makes_infinite_is_named_with_the_notebooks_line(mesh: Mesh) -> None:
    model = distribute(Net(healthy), mesh, strategy="ddp")
    mesh.nan(True)
    loss = (model(batch(mesh, "ddp")) * 0).sqrt().mean()
    loss.backward()
    line = sys._getframe().f_lineno - 1
    ranks, found = found_by(mesh)
    assert (ranks, found.phase, found.op) == ((0, 1), "remote", "div")
    assert f"line {line} in test_a_gradient_that" in found.line


@pytest.mark.parametrize("made", ["distribute", "module_to_mesh"])
def test_a_step_that_makes_parameters_bad_is_named(mesh: Mesh, made: str) -> None:
    net = Net(healthy)
    model: Any = distribute(net, mesh, strategy="ddp") if made == "distribute" else module_to_mesh(net, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
    mesh.nan(True)
    (model(batch(mesh, "ddp")) * 0).mean().backward()
    optimizer.step()
    line = sys._getframe().f_lineno - 1
    ranks, found = found_by(mesh)
    assert (ranks, found.op) == ((0, 1), "a step of the optimizer")
    assert f"line {line} in test_a_step" in found.line


# ---------------------------------------------------------------------------------------------------------------------
# With a scaler, and where all is well


def scaled_training(mesh: Mesh, model: Any, optimizer: Any, factors: list[float]) -> list[float]:
    """Train in float16 by a scaler, with clipping; return the scales. A factor makes a loss so much larger."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
    scales = []
    for number, factor in enumerate(factors):
        optimizer.zero_grad()
        for half in range(2):
            loss = (model(batch(mesh, "ddp", 2 * number + half)).float() ** 2).mean() * factor
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    ("made", "fused"), [("ddp", False), ("fsdp", False), ("op by op", False), ("ddp", True), ("op by op", True)]
)
def test_overflows_for_which_a_scaler_skips_the_step_give_no_alarm(mesh: Mesh, made: str, fused: bool) -> None:
    torch.manual_seed(0)
    net = Net(healthy)
    if made == "op by op":
        model: Any = module_to_mesh(net, mesh)
    else:
        model = distribute(net, mesh, strategy=made, precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    overflows = 1e36 if made == "op by op" else 1e4
    mesh.nan(True)
    scales = scaled_training(mesh, model, optimizer, [1.0, overflows, 1.0, 1.0])
    assert scales[1] < scales[0]
    report = heard(mesh)
    assert report, report.text


def test_a_gradient_that_a_scalers_user_steps_with_all_the_same_is_named(mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = distribute(Net(sqrt_at_0), mesh, strategy="ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    mesh.nan(True)
    scaler.scale(model(batch(mesh, "ddp")).square().mean()).backward()
    line = sys._getframe().f_lineno - 1
    model(batch(mesh, "ddp")).sum().item()
    report = heard(mesh)
    assert report, report.text  # the scaler may skip it
    optimizer.step()  # not scaler.step(optimizer)
    ranks, found = found_by(mesh)
    assert (ranks, found.module, found.op) == ((0, 1), "Net.blocks.1", "sqrt")
    assert f"backward at zoo/test_bad_gradients.py, line {line} in " in found.line


@pytest.mark.parametrize("made", [pytest.param("tp", marks=pytest.mark.thorough), "ddp", "fsdp", "op by op"])
def test_healthy_training_on_remote_tensors_gives_no_alarm(mesh: Mesh, made: str) -> None:
    torch.manual_seed(0)
    net = Net(healthy)
    model: Any = module_to_mesh(net, mesh) if made == "op by op" else distribute(net, mesh, strategy=made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh.nan(True)
    given = [batch(mesh, made, number) for number in range(4)]
    for number in range(50):
        optimizer.zero_grad()
        for micro in range(2):
            model(given[(number + micro) % 4]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model(given[0]).sum().item()
    report = heard(mesh)
    assert report, report.text


@pytest.mark.parametrize("made", ["ddp", "fsdp", "op by op"])
def test_a_scaler_of_the_notebook_that_skips_every_step_for_ever_is_told_once(mesh: Mesh, made: str) -> None:
    torch.manual_seed(0)
    net = Net(sqrt_at_0)
    model: Any = module_to_mesh(net, mesh) if made == "op by op" else distribute(net, mesh, strategy=made)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    mesh.nan(True)
    rows = batch(mesh, "ddp")
    for _ in range(45):
        optimizer.zero_grad()
        scaler.scale(model(rows).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    ranks, found = found_by(mesh)
    assert (ranks, found.num_skipped) == ((0, 1), 40)
    assert "a GradScaler has skipped 40 steps one after the other" in found.text
