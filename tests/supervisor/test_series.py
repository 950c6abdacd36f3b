"""Numbers over time: nothing grows without end, and what is thinned out keeps its shape."""

from __future__ import annotations

import itertools
import math
from typing import TypeVar

import msgspec
import pytest

from meshbook.supervisor.series import LEVELS, Curve, Curves, SampleRing, Series

T = TypeVar("T")


def test_a_step_that_saw_several_values_holds_their_mean() -> None:
    ring = SampleRing(10.0, 5)
    for at, value in ((0.0, 1.0), (4.0, 3.0), (9.9, 8.0), (10.0, 100.0)):
        ring.put(at, value)
    assert ring.points() == [(0.0, 4.0), (10.0, 100.0)]


def test_a_ring_keeps_the_last_steps_and_leaves_silence_out() -> None:
    ring = SampleRing(1.0, 4)
    for at in (0, 1, 2, 5, 6):
        ring.put(at, at)
    assert ring.points() == [(5.0, 5.0), (6.0, 6.0)]  # steps 3 and 4 were silent, 2 and before are too long ago
    ring.put(1000.0, 7.0)
    assert ring.points() == [(1000.0, 7.0)]


def test_a_value_that_comes_late_does_not_go_back_in_time() -> None:
    ring = SampleRing(1.0, 4)
    ring.put(5.0, 1.0)
    ring.put(3.0, 3.0)
    assert ring.points() == [(5.0, 2.0)]


def test_a_night_is_kept_in_coarse_steps_and_the_last_minutes_in_fine_ones() -> None:
    series, hours = Series(), 10
    for at in range(hours * 3600):
        series.put("rss_bytes", 0, float(at), at)
    points = series.points("rss_bytes", 0)
    times = [at for at, _ in points]
    assert times == sorted(set(times))
    assert len(points) <= sum(size for _, size in LEVELS)
    assert times[0] == 0.0
    assert times[-100:] == [float(at) for at in range(hours * 3600 - 100, hours * 3600)]
    # No hole where one step width gives way to the next, and every mean lies in its step.
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(steps) <= 2 * 120.0
    assert all(at <= value <= at + 120.0 for at, value in points)


def test_another_series_takes_over_the_past() -> None:
    series, mirror = Series(), Series()
    for at in range(500):
        series.put("cpu_percent", 3, float(at), float(at % 7))
    mirror.load(travelled(series.dump(since=400.0)))
    assert mirror.points("cpu_percent", 3) == series.points("cpu_percent", 3, since=400.0)
    assert series.dump(since=math.inf) == series.dump(since=500.0) == ()
    mirror.load(travelled(series.dump(since=-math.inf)))
    for at in range(500, 700):
        for each in (series, mirror):
            each.put("cpu_percent", 3, float(at), float(at % 7))
    assert mirror.points("cpu_percent", 3) == series.points("cpu_percent", 3)


def test_other_curves_take_over_the_past_and_go_on_alike() -> None:
    curves, mirror = Curves(), Curves()
    for step in range(5_000):
        curves.put("loss", 1, step, step / 2, float(step))
    mirror.load(travelled(curves.dump(since=3_000.0)))
    assert mirror.points("loss", 1) == [point for point in curves.points("loss", 1) if point[2] >= 3_000.0]
    mirror.load(travelled(curves.dump(since=-math.inf)))
    for step in range(5_000, 9_000):
        for each in (curves, mirror):
            each.put("loss", 1, step, step / 2, float(step))
    assert list(mirror.rows()) == list(curves.rows())
    assert curves.dump(since=math.inf) == ()


def travelled(dumps: tuple[T, ...]) -> tuple[T, ...]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(dumps), type=tuple[type(dumps[0]), ...])


def test_a_curve_that_is_too_long_keeps_its_ends_and_its_shape() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.put(step, math.sin(step / 1000), float(step), limit=100)
    points = curve.points()
    assert len(points) <= 101
    assert (points[0][0], points[-1][0]) == (0, 9_999)
    steps = [step for step, _, _ in points]
    assert steps == sorted(set(steps))
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 10_000 / 25
    assert all(value == pytest.approx(math.sin(step / 1000)) for step, value, _ in points)


def test_names_made_of_a_counter_do_not_fill_memory() -> None:
    curves = Curves()
    taken = [curves.put(f"loss_{number}", 0, 0, 1.0, 0.0) for number in range(1_000)]
    assert sum(taken) == len(curves.names) < 100


def test_a_thousand_ranks_share_the_room_there_is() -> None:
    curves = Curves()
    for step in range(600):
        for rank in range(1_024):
            curves.put("loss", rank, step, float(rank), float(step))
    assert sum(len(curves.points("loss", rank)) for rank in range(1_024)) <= 500_000
    assert curves.points("loss", 1_023)[-1] == (599, 1_023.0, 599.0)
