"""What a sentinel looks at of a collective, without a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshbook.rank.differences import numbers
from meshbook.rank.differences.hooks import TrainingHooks
from meshbook.rank.differences.overflows import GivenBad
from meshbook.rank.differences.watched_inputs import CollectiveInputs

HALF = torch.ones(2)


def collective(op: str) -> Any:
    return SimpleNamespace(op=op, seq=1, group="world", generation=0, group_seq=1, group_ranks=(0, 1), line=None)


def inputs_of(hooks: TrainingHooks) -> CollectiveInputs:
    return CollectiveInputs(0, GivenBad(lambda: None), lambda: str, hooks.guarded)


def test_a_sentinel_that_fails_at_a_collective_leaves_the_collective_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: torch.Tensor) -> torch.Tensor:
        raise ValueError("no sum")

    hooks = TrainingHooks()
    inputs = inputs_of(hooks)
    monkeypatch.setattr(numbers, "total", fail)
    inputs.begun(collective("all_reduce"), (HALF,))
    inputs.finished(collective("all_reduce"), (HALF,))
    assert str(hooks.failure) == "no sum"


@pytest.mark.parametrize(
    ("op", "number", "is_given_away"),
    [
        ("reduce_scatter_tensor", torch.nan, True),
        ("reduce", torch.inf, True),
        ("reduce_scatter_tensor", 1.0, False),
        ("reduce_scatter_tensor", 3e38, False),  # whose sum is too large, not they
        ("all_reduce", torch.nan, False),  # this rank has the result too
        ("all_gather", torch.nan, False),
    ],
)
def test_bad_numbers_whose_sum_only_others_have_are_remembered(op: str, number: float, is_given_away: bool) -> None:
    inputs = inputs_of(TrainingHooks())
    given = torch.full((4,), number)
    inputs.begun(collective(op), (given,) if op in ("reduce", "all_reduce") else (HALF, given))
    assert (inputs.first_given_away() is not None) == is_given_away
    inputs.clear()
    assert inputs.first_given_away() is None
