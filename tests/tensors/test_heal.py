"""Remote tensors after ranks were killed for real and replaced: what other ranks have a copy of lives on, and what they
have not says so at the line that uses it. Training is compared with plain torch.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost
from tests.controller.test_heal import kill


@pytest.fixture(scope="module")
def duo() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def square() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh


def equal_on_all_ranks(tensor: Any, expected: torch.Tensor) -> None:
    for rank in tensor.engine.ranks:
        assert torch.equal(tensor.local(rank), expected), rank


# ---- tensors


@pytest.mark.parametrize("victim", [0, 1])
def test_a_replicated_tensor_lives_on_and_computes(duo: Mesh, victim: int) -> None:
    x = meshbook.distribute(torch.arange(6.0).reshape(2, 3), duo)
    y = x * 2
    assert y.sum().item() == 30
    kill(duo, victim)
    with pytest.raises(
        RankLost, match=r"%mesh heal gives it a new process and the tensors that other ranks have a copy"
    ):
        y.sum().item()
    healed = duo.heal()
    assert re.search(rf"\d remote tensors from rank {1 - victim} \(replicas\)", str(healed))
    equal_on_all_ranks(y, torch.arange(6.0).reshape(2, 3) * 2)
    equal_on_all_ranks(x + y, torch.arange(6.0).reshape(2, 3) * 3)


def test_a_view_of_a_replicated_tensor_is_one_on_the_new_rank_too(duo: Mesh) -> None:
    x = meshbook.distribute(torch.zeros(4, 3), duo)
    row, turned = x[1], x.t()
    assert row.sum().item() == 0
    kill(duo, 1)
    duo.heal()
    row.add_(1)
    turned[2, 3] = 7
    expected = torch.zeros(4, 3)
    expected[1] += 1
    expected[3, 2] = 7
    equal_on_all_ranks(x, expected)
    equal_on_all_ranks(turned, expected.t())


def test_a_cut_tensor_says_which_part_is_gone_and_others_live_on(duo: Mesh) -> None:
    cut = meshbook.distribute(torch.arange(4.0), duo, sharding_spec=["dp"])
    whole = meshbook.distribute(torch.arange(4.0), duo)
    assert (cut + whole).sum().item() == 12
    kill(duo, 1)
    healed = duo.heal()
    assert re.search(r"not on rank 1: \d remote tensors? \(cut over dp; no other rank has this part\)", str(healed))
    with pytest.raises(
        RankLost, match=r"a tensor \(\(4,\), S\(0\) over dp\): the part that rank 1 held was lost .* checkpoint"
    ) as caught:
        cut + 1
    assert (caught.value.ranks, caught.value.survivors) == ((1,), (0,))
    with pytest.raises(RankLost, match="rank 1"):
        cut.full_tensor()
    equal_on_all_ranks(whole + 1, torch.arange(4.0) + 1)
    cut.copy_(whole.redistribute([Shard(0)]))
    assert torch.equal(cut.full_tensor(), torch.arange(4.0))


# ---- training

STEPS = 6


class Training:
    """A model, its optimizer and its batches; every step is run until it is taken."""

    def __init__(self, model: Any, batches: list[Any]) -> None:
        self.model, self.batches = model, batches
        self.opt = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(self, number: int, record: bool = False) -> Any:
        x, y = self.batches[number]
        self.opt.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.opt.step()
        return loss.detach()

    @property
    def num_taken(self) -> int:
        """How many steps the optimizer has counted."""
        return int(next(iter(self.opt.state.values()))["step"]) if self.opt.state else 0

    def run(self, up_to: int) -> None:
        for number in range(self.num_taken, up_to):
            self.step(number)

    def run_and_heal(self, mesh: Mesh) -> int:
        """Run all steps; return how many ranks were lost meanwhile."""
        num_lost = 0
        while self.num_taken < STEPS:
            try:
                self.run(STEPS)
                self.model[0].weight.sum().item()  # waits
            except RankLost:
                if mesh.session.lost:
                    num_lost += 1
                    mesh.heal()
        return num_lost

    def parameters(self) -> list[torch.Tensor]:
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in self.model.parameters()]


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(STEPS)]


def on_mesh(mesh: Mesh, *, cut: bool) -> Training:
    spec = ["dp", None] if cut else None
    placed = [
        tuple(meshbook.distribute(tensor, mesh, sharding_spec=spec) for tensor in batch) if not cut else batch
        for batch in batches()
    ]
    training = Training(meshbook.module_to_mesh(network(), mesh), placed)
    if cut:
        training.batches = Cut(mesh)  # type: ignore[assignment]
    return training


class Cut:
    """Batches whose rows are cut over dp, brought to the mesh when they are used, as a feed brings them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __getitem__(self, number: int) -> Any:
        return tuple(meshbook.distribute(tensor, self.mesh, sharding_spec=["dp", None]) for tensor in batches()[number])


DIE_AT = """
import os, signal
from meshbook.rank.tensors import templates
def arm(name, count, run=templates.CompiledTemplate.run):
    left = [count]
    def run_or_die(self, ins, floats):
        if self.name.startswith(name):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return run(self, ins, floats)
    templates.CompiledTemplate.run = run_or_die
arm({name!r}, {count})
"""

MOMENTS = {
    "forward": ("aten::addmm", 3),
    "backward": ("aten::threshold_backward", 2),
    "before the step": ("meshbook::begin_step", 2),
    "in the first step": ("aten::lerp_", 1),
    "in the step": ("aten::addcdiv_", 7),
    "end of the step": ("meshbook::end_step", 3),
}


def plain() -> Training:
    training = Training(network(), batches())
    training.run(STEPS)
    return training


def check_equal(training: Training, expected: list[torch.Tensor]) -> None:
    """Compare parameters, on every rank and bit for bit."""
    for parameter, other in zip(training.model.parameters(), expected, strict=True):
        equal_on_all_ranks(parameter, other)


def test_training_goes_on_after_the_loss_of_an_idle_rank(duo: Mesh) -> None:
    training = on_mesh(duo, cut=False)
    training.run(3)
    training.model[0].weight.sum().item()
    kill(duo, 1)
    duo.heal()
    training.run(STEPS)
    check_equal(training, plain().parameters())
    assert training.num_taken == STEPS


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole batches", "cut batches"])
def test_training_goes_on_after_a_loss_at_any_moment(duo: Mesh, moment: str, cut: bool) -> None:
    undisturbed = on_mesh(duo, cut=cut)
    undisturbed.run(STEPS)
    expected = undisturbed.parameters()
    training = on_mesh(duo, cut=cut)
    name, count = MOMENTS[moment]
    duo.run(DIE_AT.format(name=name, count=count), ranks=1, echo=False)
    assert training.run_and_heal(duo) == 1
    check_equal(training, expected)
    if not cut:
        assert all(map(torch.equal, expected, plain().parameters()))
