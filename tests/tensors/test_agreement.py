"""The question that ranks ask each other before an optimizer's step, on one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from meshbook.rank.tensors import agreement


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens: a Stop is held back, or may come again."""
    seen: list[str] = []

    @contextlib.contextmanager
    def hold() -> Iterator[None]:
        seen.append("held")
        try:
            yield
        finally:
            seen.append("free")

    monkeypatch.setattr(agreement, "current_tracker", agreement.StepTracker())
    monkeypatch.setattr(agreement, "defer_interrupts", hold)
    return seen


def answer(order: list[str], monkeypatch: pytest.MonkeyPatch, what: bool | BaseException) -> None:
    def agree(mesh: Any, fine: bool) -> bool:
        order.append("asked")
        if isinstance(what, BaseException):
            raise what
        return what

    monkeypatch.setattr(agreement, "all_ranks_ready", agree)


def test_a_stop_waits_from_the_question_to_the_end_of_the_step(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(order, monkeypatch, True)
    agreement.begin_step([], 0, None, 7.0)
    order.append("step")
    agreement.end_step(7.0)
    assert order == ["held", "asked", "step", "free"]
    assert agreement.current_tracker is not None
    assert list(agreement.current_tracker.completed) == [7]


@pytest.mark.parametrize("what", [False, KeyboardInterrupt(), RuntimeError("the groups are broken")])
def test_a_stop_may_come_again_where_the_step_is_not_taken(
    order: list[str], monkeypatch: pytest.MonkeyPatch, what: bool | BaseException
) -> None:
    answer(order, monkeypatch, what)
    with pytest.raises(agreement.StepRefused if what is False else type(what)):
        agreement.begin_step([], 0, None, 7.0)
    assert order == ["held", "asked", "free"]
    assert agreement.current_tracker is not None
    assert not agreement.current_tracker.completed
