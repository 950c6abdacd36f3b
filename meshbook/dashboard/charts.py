"""Charts as messages for a front end: what ranks measure over time, and what they log over steps. Pure.

A chart is the range of all ranks, and a line for each of some ranks. Only what is new is sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from meshbook.controller.subscription import MeshSnapshot
from meshbook.ids import Ranks
from meshbook.wire.messages import METRICS, RankStatus

Message = dict[str, Any]
Row = list[float | str]

# Points per curve that a page stores: one for two or three of its pixels.
MAX_POINTS = 300
# Number of ranks sampled for a curve's range on larger meshes.
MAX_SAMPLED_RANKS = 64
# Seconds between two points of rank measurements, which ranks take once per second.
POINT_INTERVAL_S = 1.0
# Seconds of the stored past with which the range of a measurement begins.
_PAST_S = 600.0


class ChartEncoder:
    """Tracks which points a front end has received."""

    def __init__(self) -> None:
        self._bands: dict[str, deque[Row]] = {}  # measured chart -> range over the ranks
        self._last_point_at = -math.inf
        self._sent: set[str] = set()  # measured charts that the front end has
        self._last_steps: dict[str, int] = {}  # scalar -> the last step sent of its range
        self._last_x: dict[tuple[str, int], float] = {}  # (chart, rank) -> x of the last point sent

    def forget(self) -> None:
        """Send everything again: the front end may have nothing, or shows other ranks."""
        self._sent.clear()
        self._last_steps.clear()
        self._last_x.clear()

    def charts(self, snapshot: MeshSnapshot, ranks: Ranks, charted: Ranks, full: bool) -> list[Message]:
        """Return the charts that changed.

        Args:
            ranks: the ranks that are shown.
            charted: those with a line of their own.
            full: all charts, with all points.
        """
        return [
            *self._measured_charts(snapshot, ranks, charted, full),
            *self._scalar_charts(snapshot, ranks, charted, full),
        ]

    # ---- measurements

    def _measured_charts(self, snapshot: MeshSnapshot, ranks: Ranks, charted: Ranks, full: bool) -> Iterator[Message]:
        if snapshot.at - self._last_point_at < POINT_INTERVAL_S and not full and self._sent:
            return
        self._last_point_at = snapshot.at
        shown = set(ranks)
        statuses = [rank for rank in snapshot.ranks if rank.rank in shown]
        for field, metric in METRICS.items():
            if metric.chart is None:
                continue
            name, title, unit = metric.chart
            new = self._extend_band(snapshot, field, name, statuses)
            band = self._bands.get(name)
            if band is None:
                continue
            is_full = full or name not in self._sent
            self._sent.add(name)

            def points(rank: int, since: float, field: str = field) -> list[tuple[float, float]]:
                return [
                    (round(at, 1), round(value, 2)) for at, value in snapshot.series.points(field, rank) if at > since
                ]

            lines = self._lines(name, charted, is_full, points)
            if is_full or new or lines:
                # Lines of all ranks need no range beside them.
                band_points = [] if charted and len(charted) == len(ranks) else list(band) if is_full else new
                yield _chart(name, title, unit, "time", is_full, band_points, lines)

    def _extend_band(self, snapshot: MeshSnapshot, field: str, name: str, statuses: Sequence[RankStatus]) -> list[Row]:
        """Add the current range of a measurement to its chart; return what was added."""
        values = [value for rank in statuses if (value := getattr(rank, field)) is not None]
        if not values:
            return []
        if name not in self._bands:
            past = _past_band(snapshot, field, [rank.rank for rank in statuses])
            self._bands[name] = deque(past, maxlen=MAX_POINTS)
        band = self._bands[name]
        if band and snapshot.at - float(band[-1][0]) < POINT_INTERVAL_S:
            return []
        new: Row = [round(snapshot.at, 1), min(values), median(values), max(values)]
        band.append(new)
        return [new]

    # ---- scalars

    def _scalar_charts(self, snapshot: MeshSnapshot, ranks: Ranks, charted: Ranks, full: bool) -> Iterator[Message]:
        shown = set(ranks)
        for name in snapshot.scalars.names:
            logged = [rank for rank in snapshot.scalars.ranks_of(name) if rank in shown]
            if not logged:
                continue
            is_full = full or name not in self._last_steps
            last_step = self._last_steps.get(name, -1)
            band = []
            if not charted or len(charted) < len(logged):
                band = _scalar_band(snapshot, name, logged, last_step)
            self._last_steps[name] = int(band[-1][0]) if band else last_step

            def points(rank: int, since: float, name: str = name) -> list[tuple[float, float]]:
                return [(step, value) for step, value, _ in snapshot.scalars.points_after(name, rank, since)]

            lines = self._lines(name, charted, is_full, points)
            if band or lines:
                yield _chart(name, name, "", "step", is_full, band, lines)

    def _lines(
        self,
        name: str,
        charted: Ranks,
        is_full: bool,
        points_after: Callable[[int, float], Sequence[tuple[float, float]]],
    ) -> dict[str, list[Row]]:
        """Return the points of each rank's own line that the front end does not have."""
        lines = {}
        for rank in charted:
            points = points_after(rank, -math.inf if is_full else self._last_x.get((name, rank), -math.inf))
            if points:
                self._last_x[name, rank] = points[-1][0]
                lines[str(rank)] = [[x, _json_number(value)] for x, value in downsample(points, MAX_POINTS)]
        return lines


def _chart(
    name: str, title: str, unit: str, x: str, is_full: bool, band: list[Row], lines: dict[str, list[Row]]
) -> Message:
    return {"name": name, "title": title, "unit": unit, "x": x, "full": is_full, "band": band, "lines": lines}


def _past_band(snapshot: MeshSnapshot, field: str, ranks: Sequence[int]) -> list[Row]:
    """Return the range over the ranks of the stored past, at its stored resolution."""
    steps: dict[float, list[float]] = {}
    for rank in downsample(ranks, MAX_SAMPLED_RANKS):
        for at, value in snapshot.series.points(field, rank, snapshot.at - _PAST_S):
            steps.setdefault(at, []).append(value)
    rows = [_range_row(at, some) for at, some in sorted(steps.items()) if at < snapshot.at]
    return downsample(rows, MAX_POINTS)


def _scalar_band(snapshot: MeshSnapshot, name: str, ranks: Sequence[int], last_step: int) -> list[Row]:
    """Return the range over the ranks after `last_step`, of the steps that all living ranks have reached."""
    alive = {rank.rank for rank in snapshot.ranks if rank.state != "dead"}
    steps: dict[int, list[float]] = {}
    reached = []
    for rank in downsample(ranks, MAX_SAMPLED_RANKS):
        points = snapshot.scalars.points_after(name, rank, last_step)
        if rank in alive:
            reached.append(points[-1][0] if points else last_step)
        for step, value, _ in points:
            steps.setdefault(step, []).append(value)
    complete = min(reached, default=-1)
    return downsample([_range_row(step, some) for step, some in sorted(steps.items()) if step <= complete], MAX_POINTS)


def _range_row(x: float, values: Sequence[float]) -> Row:
    return [x, *map(_json_number, (min(values), median(values), max(values)))]


def _json_number(value: float) -> float | str:
    """Return a number for JSON, which has neither NaN nor infinity: those become "nan", "inf"."""
    return value if math.isfinite(value) else str(value)


def downsample(points: Sequence[Any], max_points: int) -> list[Any]:
    """Return at most `max_points` evenly spaced points, including the last one."""
    if len(points) <= max_points:
        return list(points)
    return [points[round(at * (len(points) - 1) / (max_points - 1))] for at in range(max_points)]
