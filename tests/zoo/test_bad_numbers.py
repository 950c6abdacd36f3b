"""Planted faults on two ranks: the first difference, and where the NaN began, are named; no healthy step is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshbook import distribute, module_to_mesh, record
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from tests.budget import when
from tests.standstill import stopped
from tests.zoo.bad_numbers import PLANTED, SETUP, Planted

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        mesh.run(SETUP)
        yield mesh


def heard(mesh: Mesh) -> Any:
    """What is found, once both ranks have answered; a busy machine may be late with an answer."""
    reports: list[Any] = []

    def all_have_answered() -> bool:
        reports.append(mesh.nan())
        return not reports[-1].silent

    when(all_have_answered)
    return reports[-1]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_named_first_with_its_rank_and_place(mesh: Mesh, planted: Planted) -> None:
    mesh.nan(True)
    shown = mesh.run(planted.run, echo=False).output
    found = mesh.same(*planted.asked).text if planted.asked else heard(mesh).text
    first = found.splitlines()[1] if len(found.splitlines()) > 1 else found
    assert re.search(".*".join(map(re.escape, planted.said)), first), found + shown
    if not planted.asked:
        assert len(heard(mesh).findings) == 1, found  # by the rank that began it, alone
        assert planted.said[0] in shown
        assert "Warning" not in shown  # of the search itself
        assert "Traceback" not in shown


def test_a_model_that_is_compiled_in_place_is_not_compiled_anew_and_what_is_not_seen_is_said(mesh: Mesh) -> None:
    mesh.nan(True)
    mesh.run("from torch._dynamo.utils import counters\ntrain('compiled in place')\ncounters.clear()", echo=False)
    mesh.nan(True)
    beside = "lambda *_: nn.Linear(2, 2)(torch.ones(2))"  # a module that is called without being compiled
    shown = mesh.run(f"ended = train('compiled in place', after_backward={beside})", echo=False)
    assert "the sentinel does not see the model's forward: torch.compile" in shown.output
    assert mesh.run("counters['stats']['unique_graphs']").values.same() == 0
    assert heard(mesh)


def test_a_module_that_is_spread_over_the_mesh_is_watched(mesh: Mesh) -> None:
    class Spread(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return self.last(torch.log(torch.relu(self.first(x))))

    mesh.nan(True)
    torch.manual_seed(0)
    model = distribute(Spread(), mesh)
    model(distribute(torch.randn(8, 8), mesh, sharding_spec=["rank"])).sum().item()
    (found,) = {(found.module, found.op, found.phase) for _, found in heard(mesh).findings}
    assert found == ("Spread", "log", "forward")


class Stage(torch.nn.Module):
    """A block of a pipeline, which divides by zero on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any, rank: int) -> Any:
        here = self.linear(x)
        if torch.distributed.get_rank() == rank and x.requires_grad:  # not where a block is tried
            here = here / torch.zeros(8)
        return self.last(here)


class Stages(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Stage() for _ in range(4)), torch.nn.Linear(8, 1)

    def forward(self, x: Any, rank: int) -> Any:
        for block in self.blocks:
            x = block(x, rank)
        return self.head(x)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_stage_of_a_pipeline_where_numbers_become_bad_is_named_and_no_other(mesh: Mesh, rank: int) -> None:
    torch.manual_seed(0)
    model = distribute(Stages(), mesh, strategy="pp")
    mesh.nan(True)
    model(torch.randn(8, 8), rank).sum().item()
    ((found_by, found),) = heard(mesh).findings
    assert (found_by, found.op, found.phase) == (rank, "div", "forward")


def found_remotely(mesh: Mesh) -> tuple[int, str, str]:
    """The rank, the operation and the text of the one finding."""
    ((rank, found),) = heard(mesh).findings
    assert (found.phase, found.step) == ("remote", None)
    return rank, found.op, found.text


def test_an_operation_on_remote_tensors_is_named_with_the_notebooks_line(mesh: Mesh) -> None:
    def loss_of(x: Any) -> Any:
        logs = x.log()
        return (x + 0 * logs.sum()).mean()

    mesh.nan(True)
    rows = torch.ones(8, 8)
    rows[6] = 0
    assert torch.isnan(loss_of(distribute(rows, mesh, sharding_spec=["rank"])).cpu())
    rank, op, text = found_remotely(mesh)
    assert (rank, op) == (1, "log")  # not rank 0, to which it came with the sum
    line = loss_of.__code__.co_firstlineno + 1
    assert f"zoo/test_bad_numbers.py, line {line} in loss_of; input max 1 in float32" in text


def test_an_operation_of_a_recorded_step_is_named_with_the_notebooks_line(mesh: Mesh) -> None:
    @record
    def step(x: Any) -> Any:
        return x.sqrt().mean()

    mesh.nan(True)
    rows = torch.ones(8, 8)
    for number in range(6):
        if number == 5:
            rows[2] = -1
        step(distribute(rows, mesh, sharding_spec=["rank"])).item()
    rank, op, text = found_remotely(mesh)
    assert (rank, op) == (0, "sqrt")
    assert f"line {step.__wrapped__.__code__.co_firstlineno + 2} in step" in text


@pytest.mark.parametrize("is_recorded", [False, True])
def test_nan_that_came_with_the_data_is_named_by_the_first_operation_that_reads_it(
    mesh: Mesh, is_recorded: bool
) -> None:
    weight = distribute(torch.ones(8, 2), mesh)

    def step(x: Any) -> Any:
        return (x @ weight).square().mean()

    rows = torch.ones(8, 8)
    run = record(step) if is_recorded else step
    mesh.nan(True)
    for number in range(6):
        if number == 5:
            rows[2, 3] = torch.nan
        run(distribute(rows, mesh, sharding_spec=["rank"])).item()
        if number < 5:
            assert heard(mesh)
    ((rank, found),) = heard(mesh).findings
    assert (rank, found.phase) == (0, "remote input")
    assert "an input of mm (remote), NaN before it" in found.text
    assert f"line {step.__code__.co_firstlineno + 1} in step" in found.text


def test_numbers_that_are_missing_by_intention_give_no_alarm(mesh: Mesh) -> None:
    mesh.nan(True)
    rows = torch.randn(8, 8)
    rows[rows > 1] = torch.nan
    for _ in range(50):
        x = distribute(rows, mesh, sharding_spec=["rank"])
        for _ in range(5):  # windows of the sentinel end anywhere
            x = x * 2 - x
        torch.where(x.isnan(), 0.0, x).square().mean().item()
        x.nan_to_num().sum().item()
    assert heard(mesh)


class Learner(torch.nn.Module):
    """Has a root, whose gradient at 0 is infinite, and random numbers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        hidden = torch.nn.functional.dropout(self.first(x).relu() + 1, 0.5)
        return self.last((hidden + x.sum(1, keepdim=True).relu()).sqrt())


def learner_steps(mesh: Mesh, *, is_recorded: bool) -> Any:
    """Return a step of training on remote tensors, of a batch whose rows are cut over the ranks."""
    torch.manual_seed(0)
    model = module_to_mesh(Learner(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return record(step) if is_recorded else step


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_gradient_is_named_by_the_rank_of_its_rows_though_a_step_takes_its_mean_at_once(
    mesh: Mesh, is_recorded: bool
) -> None:
    step = learner_steps(mesh, is_recorded=is_recorded)
    mesh.nan(True)
    for number in range(8):
        rows = torch.ones(8, 8)
        if number == 7:
            rows[5] = -torch.ones(8)  # the sum is cut off at 0: half of the root is of what dropout has left, 0 too
        step(distribute(rows, mesh, sharding_spec=["rank"])).item()
        if number < 7:
            assert heard(mesh), number
    rank, op, text = found_remotely(mesh)
    assert rank == 1
    assert op in ("div", "sqrt"), text


@pytest.mark.parametrize("is_recorded", [False, True])
def test_healthy_steps_on_remote_tensors_give_no_alarm(mesh: Mesh, is_recorded: bool) -> None:
    step = learner_steps(mesh, is_recorded=is_recorded)
    mesh.nan(True)
    x = distribute(torch.ones(8, 8), mesh, sharding_spec=["rank"])
    for _ in range(200 if is_recorded else 40):
        loss = step(x)
    assert torch.isfinite(loss.cpu())
    assert heard(mesh)


def test_infinite_masks_of_remote_tensors_give_no_alarm(mesh: Mesh) -> None:
    mesh.nan(True)
    x = distribute(torch.randn(8, 8), mesh, sharding_spec=["rank"]).requires_grad_()
    mask = torch.full_like(x.detach(), float("-inf")).triu(1)
    scores = (x + mask).softmax(-1) + x.masked_fill(x > 9, float("-inf")).exp()
    scores = scores + torch.where(x > 0, 0.0, -torch.inf).exp()
    scores.square().sum().backward()
    (-mask).sum().item()
    assert x.grad.isfinite().all().item()
    assert heard(mesh)


def test_a_sentinel_that_fails_is_off_and_leaves_the_step_alone(mesh: Mesh) -> None:
    mesh.nan(True)
    shown = mesh.run(
        """
class Odd(nn.Linear):
    fails = False
    def parameters(self, recurse=True):
        if self.fails:
            raise ValueError("no parameters")
        return super().parameters(recurse)
odd = Odd(2, 2)
odd.fails = True
odd(torch.ones(1, 2)).shape""",
        echo=False,
    )
    assert "the sentinel has failed, and is off (ValueError: no parameters)" in shown.output
    assert heard(mesh).on == ()


def test_healthy_steps_of_a_model_that_is_cut_by_rows_and_columns_give_no_alarm(mesh: Mesh) -> None:
    mesh.nan(True)  # of others: test_healthy_training.py
    mesh.run("model, opt = train('tp', steps=25)")
    report = heard(mesh)
    assert report, report.text
    assert report.num_updates == 25


def test_a_rank_that_does_not_answer_is_not_taken_for_one_that_found_nothing(mesh: Mesh) -> None:
    mesh.nan(True)
    pid = mesh.status().ranks[1].pid
    assert pid is not None
    with stopped(pid):
        report = mesh.nan()
    assert 1 in report.silent
    assert not report
    assert re.search(r"ranks? (0-)?1 did not answer within 2 s .*; ask again", report.text)
    assert heard(mesh).on == (0, 1)
