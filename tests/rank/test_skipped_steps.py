"""When steps that a GradScaler skips are reported: not while a smaller scale may cure them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from meshbook.rank.differences.skipped_steps import Skipped, SkippedSteps


def first_reported(scales: Iterable[float]) -> Skipped | None:
    steps = SkippedSteps()
    return next((reported for scale in scales if (reported := steps.skipped(lambda scale=scale: scale))), None)


def falling(first: float, num_steps: int, factor: float = 0.5) -> list[float]:
    return [first * factor**number for number in range(num_steps)]


@pytest.mark.parametrize("exponent", [16, 24, 64, 120])
def test_steps_are_not_reported_while_the_scale_comes_down_from_where_it_began(exponent: int) -> None:
    assert first_reported(falling(2.0**exponent, exponent + 20)) is None


def test_steps_that_no_scale_of_float16_cures_are_reported() -> None:
    assert first_reported(falling(2.0**16, 60)) == Skipped(40, 2.0**-23)
    steps = SkippedSteps()
    assert [reported.num_steps for _ in range(400) if (reported := steps.skipped(lambda: 2.0**-30))] == [40]
    reported = first_reported(falling(2.0**120, 400))
    assert reported is not None
    assert reported.scale <= 2.0**-23


def test_a_scale_that_falls_slowly_is_given_its_time() -> None:
    assert first_reported(falling(2.0**16, 200, 0.9)) is None
    assert first_reported(falling(2.0**16, 400, 0.9)) is not None


def test_steps_that_are_skipped_with_one_scale_for_ever_are_reported() -> None:
    assert first_reported([1024.0] * 80) == Skipped(80, 1024.0)


def test_a_step_that_is_taken_begins_anew() -> None:
    steps = SkippedSteps()
    for _ in range(10):
        for scale in falling(2.0**16, 39):
            assert steps.skipped(lambda scale=scale: scale) is None
        steps.taken()
