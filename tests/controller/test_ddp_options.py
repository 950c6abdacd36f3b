"""DDP with its options after a rank is killed in the middle of a step, and replaced: the losses are those of a run that
nobody has disturbed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost
from tests.budget import when

pytestmark = pytest.mark.usefixtures("starts_meshes")

TRAINING = """
import os, signal
from contextlib import nullcontext
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 33), nn.Linear(16, 2)
        self.middle = nn.ModuleList([nn.Linear(33, 16) for _ in range(num_branches)])

    def forward(self, x, number):
        branch = self.middle[number % len(self.middle)]
        return self.last(torch.tanh(branch(torch.tanh(self.first(x)))))

def micro_batches(number, count):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(6, 8, generator=generator) for _ in range(count)]

def compute(batch, number, dies):
    loss = model(batch, number).square().mean()
    if dies:
        model.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()
    return loss.item()

def train(number, dies=-1):
    opt.zero_grad()
    batches = micro_batches(number, 3 if accumulates and number else 1)  # torch: no static graph begins in no_sync
    losses = []
    for at, batch in enumerate(batches):
        is_last = at == len(batches) - 1
        with nullcontext() if is_last else model.no_sync():
            losses.append(compute(batch, number, is_last and rank == dies))
    opt.step()
    return losses

def train_joined(number, dies=-1):
    losses = []
    with model.join():
        for at, batch in enumerate(micro_batches(number, 1 + rank)):
            opt.zero_grad()
            losses.append(compute(batch, number, at == 0 and rank == dies))
            opt.step()
    return losses
"""
BUILD = """
num_branches, accumulates = {num_branches}, {accumulates}
torch.manual_seed(0)
model = DDP(Net(), bucket_cap_mb=0.001, {options})
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
"""
OPTIONS = {
    "static graph": "static_graph=True",
    "static graph, views": "static_graph=True, gradient_as_bucket_view=True",
    "views": "gradient_as_bucket_view=True",
    "unused parameters": "find_unused_parameters=True",
}
STEPS = 7


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        mesh.run(TRAINING, setup=True, echo=False)
        yield mesh


def values(mesh: Mesh, source: str) -> dict[int, Any]:
    return dict(mesh.run(source, echo=False).values)


def build(mesh: Mesh, options: str, *, accumulates: bool = False, setup: bool = True) -> None:
    num_branches = 2 if "unused" in options else 1
    mesh.run(BUILD.format(num_branches=num_branches, accumulates=accumulates, options=options), setup=setup, echo=False)


@pytest.fixture(autouse=True)
def whole(mesh: Mesh) -> None:
    """A test that failed costs the others nothing."""
    mesh.heal()


def lose_a_rank_in(mesh: Mesh, step: str, victim: int) -> None:
    with pytest.raises(RankLost):
        mesh.run(step.replace(")", f", dies={victim})"), echo=False)
    when(lambda: mesh.session.lost == (victim,))
    mesh.heal(copy="num_branches accumulates")  # which setup cells of other tests have set, too


def losses_of(mesh: Mesh, step: str, lost_in: tuple[int, ...]) -> list[Any]:
    """Train; in these steps, the first and a later one, a rank is lost, and they are run again."""
    losses = []
    for number in range(STEPS):
        source = step.format(number)
        if number in lost_in:
            lose_a_rank_in(mesh, source, victim=1 if number else 0)
        losses.append(values(mesh, source))
    return losses


@pytest.mark.parametrize("in_setup", [True, False], ids=["built by a setup cell", "copied whole"])
@pytest.mark.parametrize("options", OPTIONS)
def test_ddp_goes_on_as_if_nobody_had_been_lost(mesh: Mesh, options: str, in_setup: bool) -> None:
    build(mesh, OPTIONS[options], accumulates=in_setup, setup=in_setup)
    expected = losses_of(mesh, "train({})", ())
    build(mesh, OPTIONS[options], accumulates=in_setup, setup=in_setup)
    assert losses_of(mesh, "train({})", (0, 4)) == expected


def test_a_model_with_other_options_than_the_setup_cells_is_copied_whole(mesh: Mesh) -> None:
    build(mesh, OPTIONS["static graph, views"], setup=True)
    build(mesh, OPTIONS["views"], setup=False)
    expected = losses_of(mesh, "train({})", ())
    build(mesh, OPTIONS["views"], setup=False)
    assert losses_of(mesh, "train({})", (0, 4)) == expected


def test_ranks_with_unequal_numbers_of_batches_go_on_too(mesh: Mesh) -> None:
    def losses(lost_in: tuple[int, ...]) -> list[Any]:
        build(mesh, "")
        mesh.run("opt = torch.optim.SGD(model.parameters(), lr=0.05)", setup=True, echo=False)  # has no state to differ
        return losses_of(mesh, "train_joined({})", lost_in)

    assert losses((0, 4)) == losses(())
