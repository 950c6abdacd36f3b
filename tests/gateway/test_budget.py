"""A budget counts ranks at work times seconds, whoever waits in a queue."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.errors import NotAttached, UsageError
from meshbook.gateway.budget import RankMinutes
from meshbook.ids import CallId
from meshbook.wire.messages import CallFinished, RunCell

CELL = RunCell(call=CallId("c-1"), ranks=(0, 1, 2, 3), source="")


class FakeSession:
    """Ranks that work on calls, and what is interrupted."""

    ended = None
    connection = SimpleNamespace(closed=False)

    def __init__(self) -> None:
        self.interrupted: list[str | None] = []

    def status(self) -> Any:
        return SimpleNamespace(ranks=[])

    def interrupt(self, ranks: object, *, target: str) -> None:
        self.interrupted.append(target)


def begin(budget: RankMinutes) -> tuple[FakeSession, Future[Any]]:
    session, future = FakeSession(), Future[Any]()
    budget.began(session, CELL, future)  # type: ignore[arg-type]
    return session, future


def finished(seconds: float, rank_seconds: dict[int, float] | None) -> CallFinished:
    return CallFinished(call=CELL.call, outcomes=(), seconds=seconds, rank_seconds=rank_seconds)


@pytest.mark.parametrize(
    ("end", "used"), [(finished(30.0, {0: 30.0, 1: 20.0, 2: 5.0, 3: 5.0}), 1.0), (finished(30.0, None), 2.0)]
)
def test_a_cell_that_has_ended_is_charged_what_its_ranks_took(end: CallFinished, used: float) -> None:
    budget = RankMinutes(10)
    _, future = begin(budget)
    future.set_result(end)
    assert budget.used_minutes == used
    assert budget.describe() == f"{used:g} of 10 rank-minutes used"
    budget.check(4)
    budget.close()


def test_when_it_is_used_up_cells_are_refused_with_the_sum() -> None:
    budget = RankMinutes(2)
    _, future = begin(budget)
    future.set_result(finished(30.0, None))
    with pytest.raises(UsageError, match="on 8 ranks needs rank-minutes, and 2 of 2 rank-minutes used, so 0 are left"):
        budget.check(8)
    budget.close()


def test_who_closes_a_budget_stops_the_cells_that_nobody_counts_then() -> None:
    budget = RankMinutes(100)
    ended, future = begin(budget)
    future.set_exception(NotAttached("the mesh is gone"))
    running, _ = begin(budget)
    budget.close()
    assert (ended.interrupted, running.interrupted) == ([], ["c-1"])
