"""Charts: what a page has is not sent again, and what it may not have is sent whole."""

from __future__ import annotations

from typing import Any

from meshbook.dashboard.charts import MAX_POINTS, ChartEncoder, downsample
from tests.dashboard.pictures import Training

RANKS = tuple(range(4))


def by_name(charts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {chart["name"]: chart for chart in charts}


def test_a_page_that_may_have_nothing_gets_all_points_of_every_line() -> None:
    training, encoder = Training({"rank": 4}), ChartEncoder()
    first = by_name(encoder.charts(training.picture, RANKS, RANKS, full=False))
    assert all(chart["full"] for chart in first.values())
    for _ in range(4):
        training.step()
    again = by_name(encoder.charts(training.picture, RANKS, RANKS, full=True))
    for name in ("loss", ".memory"):
        assert again[name]["lines"]["3"][: len(first[name]["lines"]["3"]) - 1] == first[name]["lines"]["3"][:-1]
        assert len(again[name]["lines"]["3"]) > len(first[name]["lines"]["3"])


def test_between_two_points_nothing_is_said_of_measurements() -> None:
    training, encoder = Training({"rank": 4}), ChartEncoder()
    encoder.charts(training.picture, RANKS, (), full=False)
    assert set(by_name(encoder.charts(training.step(0.5), RANKS, (), full=False))) == {"loss", "grad_norm"}
    later = by_name(encoder.charts(training.step(0.6), RANKS, (), full=False))
    assert [len(chart["band"]) for name, chart in later.items() if name.startswith(".")] == [1] * 6
    assert not any(chart["full"] for chart in later.values())


def test_other_ranks_with_lines_get_their_past() -> None:
    training, encoder = Training({"rank": 16}), ChartEncoder()
    everyone = tuple(range(16))
    encoder.charts(training.picture, everyone, (2,), full=False)
    encoder.forget()
    reported = by_name(encoder.charts(training.step(), everyone, (7,), full=False))
    assert set(reported["loss"]["lines"]) == {"7"}
    assert len(reported["loss"]["lines"]["7"]) == training.tick


def test_a_range_is_only_of_steps_that_all_living_ranks_have_reached() -> None:
    training, encoder = Training({"rank": 2}), ChartEncoder()
    step = training.tick
    training.picture.scalars.put("loss", 0, step + 1, 1.0, training.at)
    (_, *rest) = by_name(encoder.charts(training.picture, (0, 1), (), full=False))["loss"]["band"]
    assert rest[-1][0] == step
    training.picture.scalars.put("loss", 1, step + 1, 3.0, training.at)
    assert by_name(encoder.charts(training.picture, (0, 1), (), full=False))["loss"]["band"] == [
        [step + 1, 1.0, 2.0, 3.0]
    ]


def test_thinned_points_keep_the_last() -> None:
    points = downsample(range(10_000), MAX_POINTS)
    assert (len(points), points[0], points[-1]) == (MAX_POINTS, 0, 9_999)
    assert downsample([1, 2], MAX_POINTS) == [1, 2]
