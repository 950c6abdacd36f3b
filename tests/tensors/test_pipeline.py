"""Pipelines: stages compute the repeated blocks, and give the numbers of one process, or say why they cannot."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.errors import CellError, CellInterrupted, UsageError
from meshbook.rank.tensors.pipeline import row_spans, stage_spans
from meshbook.rank.tensors.strategies import Plan
from tests.budget import WAIT_S, when
from tests.tensors import models
from tests.tensors.models import close, compare

PIPELINE = Plan(pp="dp")


def five_layers() -> nn.Module:
    return models.Llama(layers=5)


@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,
        Plan(pp="dp", microbatches=3, ac="every 2nd block"),
        pytest.param(Plan(pp="dp", compile="aot_eager"), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_stages_give_the_losses_and_weights_of_one_process(mesh2: Mesh, strategy: Plan) -> None:
    model = compare(mesh2, five_layers, strategy, axis=None)
    weight = model.get_parameter("layers.3.mlp.up_proj.weight")
    assert (weight.placements, weight.grad.placements) == ((Shard(0),), (Shard(0),))
    assert model.get_parameter("embed.weight").placements == (Replicate(),)


def test_copies_of_a_pipeline_average_their_gradients(mesh22: Mesh) -> None:
    model = compare(mesh22, five_layers, Plan(ddp="dp", pp="tp"))
    assert model.get_parameter("layers.3.mlp.up_proj.weight").placements == (Replicate(), Shard(0))
    assert "ddp over dp=2, pp over tp=2" in str(model.plan)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.linear(x))


def test_each_stage_draws_random_numbers_of_its_own_and_the_notebooks_seed_repeats_them(mesh2: Mesh) -> None:
    model = meshbook.distribute(lambda: nn.Sequential(*(Noisy() for _ in range(4))), mesh2, strategy=PIPELINE)
    x = torch.ones(8, 8)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([model(x).full_tensor().detach() for _ in range(2)])
    assert not any(torch.equal(first, second) for first, second in found)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[2][0])
    model.eval()
    assert torch.equal(model(x).full_tensor(), model(x).full_tensor())


class Chain(nn.Module):
    """Four blocks in a loop as people write it; `between` is done with what each block gives."""

    def __init__(self, between: Callable[[Any], Any] = lambda x: x, make: Any = models.MLP) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(8) for _ in range(4))
        self.between, self.head = between, nn.Linear(8, 1)

    def forward(self, x: Any, **options: Any) -> Any:
        for block in self.blocks:
            x = self.between(block(x, **options))
        return self.head(x)


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x))


class Mixing(models.MLP):
    """Rows depend on each other."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) - x.mean(0)


class Narrowing(models.MLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x)[..., :4]


class Counting(models.MLP):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x)


class WithLoss(models.MLP):
    """In training it gives a loss of its own too, as experts do that are to be balanced."""

    def forward(self, x: Any) -> Any:
        return super().forward(x), x.square().mean() if self.training else None


class Failing(models.MLP):
    def forward(self, x: Any) -> Any:
        raise ValueError("these blocks do not like their input")


def tied() -> nn.Module:
    model = Chain()
    model.blocks[2].up_proj.weight = model.blocks[0].up_proj.weight
    return model


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: nn.Linear(8, 8), "at least as many repeated blocks, and this Linear has 0"),
        (lambda: Chain(make=Normed), r"blocks\.0\.norm is a BatchNorm1d, whose statistics are of all rows"),
        (tied, r"blocks\.0\.up_proj\.weight is also blocks\.2\.up_proj\.weight"),
        (lambda: Chain(torch.relu), r"forward runs aten\.relu\.default on what blocks\.0 gave, and a pipeline takes"),
        (
            lambda: Chain(make=Mixing),
            r"blocks\.\{0,2\} gives other numbers when it computes the rows \(dim 0\) of \[4, 8\] by parts",
        ),
        (
            lambda: Chain(make=Narrowing),
            r"blocks\.\{0,2\} is called with a tensor of the shape \[4, 8\] and does not give",
        ),
        (lambda: Chain(make=Counting), r"forward writes to blocks\.\{0,2\}\.calls, once for each microbatch"),
        (
            lambda: Chain(lambda given: given[0] + given[1], make=WithLoss),
            r"forward runs aten\.add\.Tensor on what",
        ),
        (lambda: Chain(make=Failing), "these blocks do not like their input"),
    ],
)
def test_what_stages_cannot_compute_is_refused(mesh2: Mesh, factory: Any, sentence: str) -> None:
    with pytest.raises(CellError, match=sentence):
        meshbook.distribute(factory, mesh2, strategy=PIPELINE)(torch.ones(4, 8))


def test_a_loss_of_a_blocks_own_that_nothing_is_done_with_changes_nothing(mesh2: Mesh) -> None:
    torch.manual_seed(0)
    alone = Chain(lambda given: given[0], make=WithLoss)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=PIPELINE)
    x = torch.randn(4, 8)
    for is_training in (False, True):  # what blocks give in eval mode is not taken for what they give in training
        close(model.train(is_training)(x).full_tensor().detach(), alone.train(is_training)(x).detach())


class FailingOnce(models.MLP):
    def forward(self, x: Any, fails: bool = False) -> Any:
        if fails and torch.distributed.get_rank() == 1:
            raise ValueError("the last stage does not like its input")
        return super().forward(x)


def test_an_error_on_one_stage_ends_the_step_on_all_and_the_next_one_is_right(mesh2: Mesh) -> None:
    torch.manual_seed(0)
    alone = Chain(make=FailingOnce)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=PIPELINE)
    x = torch.randn(4, 8)
    close(model(x).full_tensor().detach(), alone(x).detach())
    with pytest.raises(CellError, match="the last stage does not like its input"):
        model(x, fails=True).sum().backward()
    model(x).sum().backward()
    alone(x).sum().backward()
    for name, parameter in alone.named_parameters():
        close(model.get_parameter(name).grad.full_tensor(), parameter.grad)


class Biased(nn.Module):
    """Blocks get what a parameter outside of them gave, and a mask whose rows are not those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(3))
        self.bias, self.head = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x: Any, mask: Any) -> Any:
        bias, rows = self.bias(torch.ones(1)), x.sum(-1, keepdim=True)
        for block in self.blocks:
            x, _ = block(x, bias=bias, rows=rows, mask=mask)
        return self.head(x)


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Sequential(nn.Linear(8, 8)), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any, *, bias: Any, rows: Any, mask: Any) -> Any:
        x = x + torch.tanh(self.inner(x) * self.scale + bias + rows)
        return torch.softmax(mask, -1) @ x, None


def test_gradients_reach_what_blocks_are_called_with_beside_their_input(mesh2: Mesh) -> None:
    torch.manual_seed(0)
    alone = Biased()
    alone.blocks[1].inner[0].bias.requires_grad_(False)
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=PIPELINE)
    x, mask = torch.randn(4, 4, 8), torch.randn(4, 4)  # as many positions as rows
    ours = meshbook.distribute(x, mesh2).requires_grad_()
    for one, given in ((alone, x.requires_grad_()), (model, ours)):
        loss = (one(given, mask) ** 2).mean()
        loss.backward()
    close(ours.grad.full_tensor(), x.grad)
    for name, parameter in alone.named_parameters():
        found = model.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            close(found.full_tensor(), parameter.grad)


def test_rows_go_through_the_stages_in_even_parts() -> None:
    assert row_spans(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert row_spans(2, 8) == [slice(0, 1), slice(1, 2)]
    assert stage_spans(5, 2) == [range(3), range(3, 5)]


def test_a_plan_says_who_computes_what_and_is_not_estimated(mesh2: Mesh) -> None:
    strategy = Plan(pp="dp", microbatches=2, ac="every block")
    model = meshbook.distribute(five_layers, mesh2, strategy=strategy, sample=torch.zeros(4, 6, dtype=torch.long))
    assert "pp over dp=2 in 2 microbatches, ac every block" in model.plan
    assert "not estimated" in model.plan
    assert "fsdp over dp=2" in model.plan
    assert "is computed by a stage of dp" in model.plan.explain("layers.1")
    assert "pipeline_blocks(model, mesh['dp'], microbatches=2, checkpoint_interval=1)" in model.plan.code()
    with pytest.raises(UsageError, match='strategy="pp" has no options'):
        meshbook.distribute(five_layers, mesh2, strategy=strategy, bucket_cap_mb=1)


class Waiting(models.MLP):
    """On the last stage a forward with a path waits for ever, once it has said so there."""

    def forward(self, x: Any, said: str = "") -> Any:
        if said and torch.distributed.get_rank() == 1 and x.requires_grad:  # not where a block is tried
            Path(said).touch()
            while True:
                time.sleep(0.01)
        return super().forward(x)


def test_a_stop_within_a_stage_leaves_a_module_that_computes_on(mesh2: Mesh, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone, said = Chain(make=Waiting), tmp_path / "said"
    model = meshbook.distribute(copy.deepcopy(alone), mesh2, strategy=PIPELINE)
    x = torch.randn(4, 8)

    def press() -> None:
        when(said.exists)
        mesh2.session.foreground.interrupt()

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(CellInterrupted):
        model(x, said=str(said))
    pressing.join(WAIT_S)
    model(x).sum().backward()
    alone(x).sum().backward()
    for name, parameter in alone.named_parameters():
        close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
