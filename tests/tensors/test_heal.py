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
from tests.budget import when
from tests.controller.test_heal import kill
from tests.host_processes import keeper_of
from tests.tensors import models

pytestmark = pytest.mark.usefixtures("starts_meshes")


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
        RankLost, match=r"%mesh heal puts a new process in its place, with the tensors that other ranks have a copy"
    ):
        y.sum().item()
    healed = duo.heal()
    assert re.search(rf"\d remote tensors from rank {1 - victim} \(replicas\)", str(healed))
    equal_on_all_ranks(y, torch.arange(6.0).reshape(2, 3) * 2)
    equal_on_all_ranks(x + y, torch.arange(6.0).reshape(2, 3) * 3)


def test_tensors_live_on_when_a_host_was_killed_with_its_rank() -> None:
    with create_mesh({"dp": 2}, num_hosts=2) as mesh:
        x = meshbook.distribute(torch.arange(6.0).reshape(2, 3), mesh)
        assert x.sum().item() == 15
        os.kill(keeper_of(mesh.name, 1), signal.SIGKILL)
        when(lambda: 1 in mesh.session.lost)
        mesh.heal()
        equal_on_all_ranks(x + 1, torch.arange(6.0).reshape(2, 3) + 1)


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


@pytest.mark.parametrize(
    ("moment", "cut"),
    [*((moment, False) for moment in MOMENTS), ("backward", True), ("in the step", True)],
    ids=lambda value: value if isinstance(value, str) else "cut batches" if value else "whole batches",
)
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


def test_a_loss_that_nobody_waited_for_is_raised_once_and_leaves_out_what_was_under_way(duo: Mesh) -> None:
    x = meshbook.distribute(torch.zeros(3), duo)
    x.add_(1)
    assert x.sum().item() == 3
    duo.run(DIE_AT.format(name="aten::mul_", count=1), ranks=1, echo=False)
    x.mul_(5)
    x.engine.flush()
    when(lambda: duo.session.lost == (1,))
    duo.heal()
    with pytest.raises(RankLost, match=r"operations on tensors were under way .* run the step again"):
        x.add_(1)
    counts = {x.local(rank)[0].item() for rank in (0, 1)}
    assert counts in ({1.0}, {5.0})
    x.add_(1)
    equal_on_all_ranks(x, torch.full((3,), counts.pop() + 1))


def test_tensors_of_each_ranks_own_say_so_and_can_be_made_whole(duo: Mesh) -> None:
    with duo.activate():
        own = torch.ones(2, 2)
    assert own.reduce("dp", "sum").sum().item() == 8
    kill(duo, 1)
    assert re.search(r"not on rank 1: .*remote tensors? \(each rank has its own\)", str(duo.heal()))
    with pytest.raises(RankLost, match=r"\(2, 2\), each rank's own.* rank 1 held was lost"):
        own + 1
    own.fill_(3)
    assert own.reduce("dp", "sum").sum().item() == 24


def test_a_name_of_a_cell_is_looked_up_again(duo: Mesh) -> None:
    duo.run("w = torch.ones(2)", echo=False)
    w = duo["w"]
    assert w.reduce("dp", "sum").sum().item() == 4
    kill(duo, 1)
    duo.heal(copy="w")
    with pytest.raises(RankLost):
        w.add_(1)
    duo["w"].add_(1)
    assert dict(duo.run("w.tolist()", echo=False).values) == {0: [2, 2], 1: [2, 2]}


def test_without_sharing_all_tensors_are_refused_and_new_ones_compute(duo: Mesh) -> None:
    x = meshbook.distribute(torch.ones(2), duo)
    assert x.sum().item() == 2
    kill(duo, 1)
    duo.heal(share=False)
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 has a new process since this tensor was made"):
            x + 1
    assert (meshbook.distribute(torch.ones(2), duo) + 1).sum().item() == 4


@pytest.mark.parametrize("victim", [0, 3])
def test_a_part_that_another_rank_has_too_is_taken_from_it(square: Mesh, victim: int) -> None:
    full = torch.arange(24.0).reshape(4, 6)
    by_dp = meshbook.distribute(full, square, [Shard(0), Replicate()])
    by_tp = meshbook.distribute(full, square, [Replicate(), Shard(1)])
    by_both = meshbook.distribute(full, square, [Shard(0), Shard(1)])
    whole = meshbook.distribute(full, square)
    product = by_dp @ by_tp.t()  # a sum over nothing: both operands are gathered
    assert torch.equal(product.full_tensor(), full @ full.t())
    before = {
        name: dict(zip(range(4), map(t.local, range(4)), strict=True)) for name, t in (("dp", by_dp), ("tp", by_tp))
    }
    kill(square, victim)
    text = str(square.heal())
    assert "the same part, cut over tp" in text
    assert "cut over dp, tp; no other rank has this part" in text
    for name, tensor in (("dp", by_dp), ("tp", by_tp)):
        for rank in range(4):
            assert torch.equal(tensor.local(rank), before[name][rank])
    assert torch.equal((by_dp + whole).full_tensor(), full * 2)
    with pytest.raises(
        RankLost, match=rf"\(4, 6\), S\(0\) over dp, S\(1\) over tp\): the part that rank {victim} held"
    ):
        by_both.sum()


@pytest.mark.parametrize(("strategy", "given"), [("ddp", "factory"), ("replicate", "module")])
def test_a_module_on_the_ranks_trains_on(duo: Mesh, strategy: str, given: str) -> None:
    def train(mesh: Mesh, disturb: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = meshbook.distribute(network if given == "factory" else network(), mesh, strategy=strategy)
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches()):
            if disturb and number == 3:
                opt.zero_grad()
                next(iter(model.parameters())).sum().item()
                kill(mesh, 1)
                mesh.heal()
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(meshbook.distribute(x, mesh, sharding_spec=["dp", None])), y).backward()
            opt.step()
        for parameter in model.parameters():
            assert torch.equal(parameter.local(0), parameter.local(1))
        return [parameter.full_tensor() for parameter in model.parameters()]

    assert all(map(torch.equal, train(duo, True), train(duo, False)))


def test_a_stage_that_is_replaced_computes_on_with_the_parameters_of_its_copy(square: Mesh) -> None:
    def train(disturb: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        blocks = torch.nn.Sequential(*(models.MLP(8) for _ in range(3)), torch.nn.Linear(8, 1))
        model = meshbook.distribute(blocks, square, strategy=meshbook.Plan(ddp="dp", pp="tp"))
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(4):
            if disturb and number == 2:
                next(iter(model.parameters())).sum().item()
                kill(square, 3)
                assert "the same part, cut over tp" in str(square.heal())
            opt.zero_grad()
            x = torch.full((4, 8), 1.0 + number)
            model(meshbook.distribute(x, square, [Shard(0), Replicate()])).square().mean().backward()
            opt.step()
        return [parameter.full_tensor() for parameter in model.parameters()]

    assert all(map(torch.equal, train(True), train(False)))


def test_a_module_cut_over_the_ranks_names_its_parameter_and_is_whole_after_loading(duo: Mesh) -> None:
    torch.manual_seed(1)
    model = meshbook.distribute(network, duo, strategy="fsdp")
    saved = model.state_dict(full=True)
    x = meshbook.distribute(torch.ones(2, 3), duo)
    expected = model(x).full_tensor()
    kill(duo, 1)
    duo.heal()
    with pytest.raises(RankLost, match=r"0\.weight \(\(4, 3\), S\(0\) over dp\): the part that rank 1 held was lost"):
        model(x)
    model.load_state_dict(saved)
    assert torch.equal(model(x).full_tensor(), expected)


@pytest.mark.parametrize("moment", ["idle", "in a step"])
def test_a_recorded_step_trains_on(duo: Mesh, moment: str) -> None:
    training = on_mesh(duo, cut=True)

    @meshbook.record
    def step(model: Any, x: Any, y: Any) -> Any:
        training.opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        training.opt.step()
        return loss.detach()

    if moment == "in a step":
        duo.run(DIE_AT.format(name="meshbook::replay", count=2), ranks=1, echo=False)
    while training.num_taken < 2 * STEPS:
        number = training.num_taken % STEPS
        try:
            step(training.model, *training.batches[number]).item()
        except RankLost:
            duo.heal()
        if moment == "idle" and training.num_taken == STEPS:
            kill(duo, 1)
            duo.heal()
    assert step.stats().replayed >= STEPS
    undisturbed = on_mesh(duo, cut=True)
    for number in range(2 * STEPS):
        undisturbed.step(number % STEPS)
    check_equal(training, undisturbed.parameters())


def test_a_second_client_and_a_part_of_the_mesh_go_on_too(square: Mesh) -> None:
    part, rest = square.slice(tp=1), square.slice(tp=0)
    x, other = meshbook.distribute(torch.ones(2), part), meshbook.distribute(torch.ones(2), rest)
    with meshbook.attach(square.name) as again:
        theirs = meshbook.distribute(torch.ones(2), again)
        assert ((x + 1).sum().item(), (other + 1).sum().item(), (theirs + 1).sum().item()) == (4, 4, 4)
        kill(square, 1)
        square.heal()
        when(lambda: not again.session.lost)
        for tensor in (x, other, theirs):
            equal_on_all_ranks(tensor * 3, torch.full((2,), 3.0))


def test_a_backward_whose_forward_was_before_the_loss_says_so(duo: Mesh) -> None:
    model = meshbook.distribute(network, duo, strategy="ddp")
    x = meshbook.distribute(torch.ones(2, 3), duo)
    model(x).sum().backward()  # learns which gradients there are
    loss = model(x).sum()
    loss.item()
    kill(duo, 1)
    duo.heal()
    with pytest.raises(RankLost, match="run the forward again"):
        loss.backward()
    model(x).sum().backward()
    assert torch.isfinite(next(iter(model.parameters())).grad.sum()).item()


def test_tensors_of_a_mesh_that_was_healed_before_and_then_lost_all_ranks_are_gone_and_say_so(duo: Mesh) -> None:
    x = meshbook.distribute(torch.ones(2), duo)
    assert x.sum().item() == 2
    kill(duo, 1)
    duo.heal()
    assert (x + 1).sum().item() == 4
    kill(duo, 0, 1)
    duo.heal()
    for _ in range(2):
        with pytest.raises(RankLost):
            (x + 1).sum().item()
    assert (meshbook.distribute(torch.ones(2), duo) + 1).sum().item() == 4
