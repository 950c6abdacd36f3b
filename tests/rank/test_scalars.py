"""`meshbook.log`: what it takes, what it refuses, what a beat tells of it, and what a call costs."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import meshbook
from meshbook.errors import UsageError
from meshbook.rank import scalars
from meshbook.rank.scalars import ScalarLog
from tests.budget import WAIT_S


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> Iterator[ScalarLog]:
    """What `meshbook.log` writes to in this test."""
    here = ScalarLog(clock)
    scalars.install(here)
    yield here
    scalars.install(None)


def reported(log: ScalarLog) -> list[tuple[str, int, float]]:
    return [(scalar.name, scalar.step, scalar.value) for scalar in log.drain()[0]]


def test_numbers_are_told_in_order_with_a_step_that_counts_itself(log: ScalarLog) -> None:
    meshbook.log(loss=2.5, lr=1)
    meshbook.log(loss=1.5)
    meshbook.log(loss=0.5, step=100)
    meshbook.log(loss=0.25)
    assert reported(log) == [
        ("loss", 0, 2.5),
        ("lr", 0, 1.0),
        ("loss", 1, 1.5),
        ("loss", 100, 0.5),
        ("loss", 101, 0.25),
    ]
    assert reported(log) == []


def test_calls_that_name_one_step_are_one_step(log: ScalarLog) -> None:
    for step in range(3):
        meshbook.log(step=step, loss=1.0)
        meshbook.log(step=step, norm=2.0)
    assert log.num_steps == 3


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (True, 1.0),
        (10**400, math.inf),
        (np.float32(0.5), 0.5),
        (np.array(3), 3.0),
        (np.array([3.0]), 3.0),
        (torch.tensor(4, dtype=torch.int64), 4.0),
        (torch.tensor([5.0], requires_grad=True), 5.0),
        (torch.tensor(-math.inf), -math.inf),
    ],
)
def test_what_is_one_number_is_taken(log: ScalarLog, given: object, value: float) -> None:
    meshbook.log(x=given)
    assert reported(log) == [("x", 0, value)]


def test_a_number_that_is_none_is_kept(log: ScalarLog) -> None:
    meshbook.log(x=math.nan)
    assert math.isnan(reported(log)[0][2])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(3), r"loss has shape \(3,\); give one number of it, such as loss.mean\(\)"),
        (np.zeros((2, 2)), r"loss has shape \(2, 2\)"),
        ("0.5", "loss is a str"),
        (None, "loss is a NoneType"),
        ([1.0], "loss is a list"),
        (1j, "loss is a complex"),
    ],
)
def test_what_is_not_one_number_is_refused_by_name(log: ScalarLog, given: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        meshbook.log(loss=given)
    assert reported(log) == []


def test_a_step_that_is_not_a_whole_number_is_refused(log: ScalarLog) -> None:
    with pytest.raises(UsageError, match="whole number for step, and was given 'seven'"):
        meshbook.log(loss=1.0, step="seven")  # type: ignore[arg-type]


def test_outside_a_rank_it_says_where_it_belongs() -> None:
    with pytest.raises(UsageError, match=r"runs on the controller; call it in a cell that runs on the mesh"):
        meshbook.log(loss=1.0)


def test_a_graph_of_gradients_does_not_live_on_in_what_was_logged(log: ScalarLog) -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    before = sys.getrefcount(loss)
    meshbook.log(loss=loss)
    assert sys.getrefcount(loss) == before


def test_ages_count_back_from_the_report(log: ScalarLog, clock: Clock) -> None:
    meshbook.log(x=1.0)
    clock.now += 0.75
    assert log.drain()[0][0].age_s == 0.75


def test_of_too_many_calls_some_are_told_the_last_and_the_first_nan_among_them(log: ScalarLog) -> None:
    for step in range(10_000):
        meshbook.log(loss=1.0 if step < 7001 else math.nan)
    kept, num_dropped = log.drain()
    steps = [scalar.step for scalar in kept]
    assert len(kept) <= 515
    assert len(kept) + num_dropped == 10_000
    assert steps[-1] == 9_999
    assert next(scalar.step for scalar in kept if math.isnan(scalar.value)) == 7001


def test_what_nobody_drains_is_bounded_and_counted(log: ScalarLog) -> None:
    for _ in range(20_000):
        meshbook.log(loss=1.0)
    kept, num_dropped = log.drain()
    assert len(kept) + num_dropped == 20_000
    meshbook.log(loss=1.0)
    assert log.drain()[1] == 0


def test_steps_per_second_are_counted_over_ten_seconds_and_fade_after_the_loop(log: ScalarLog, clock: Clock) -> None:
    assert log.steps_per_s() is None
    for _ in range(20):
        for _ in range(4):
            meshbook.log(loss=1.0)
        clock.now += 1.0
        rate = log.steps_per_s()
    assert rate == pytest.approx(4.0)
    for _ in range(11):
        clock.now += 1.0
        rate = log.steps_per_s()
    assert rate == 0.0


def test_a_hostile_name_is_plain_text(log: ScalarLog) -> None:
    meshbook.log(**{"\ud800" + "x" * 1000: 1.0})
    name = log.drain()[0][0].name
    name.encode()
    assert len(name) <= 200


@pytest.mark.usefixtures("starts_processes")
def test_it_is_found_without_torch() -> None:
    source = "import meshbook, sys; meshbook.log; assert not {'torch', 'IPython', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=WAIT_S)
