"""Time series: metrics of ranks, and the scalars that their code logged.

Bounded in every case: a thousand ranks over days take tens of megabytes, because older data is stored in coarser steps.
The supervisor fills one of each from heartbeats; an observer's mirror uses the same classes. Pure: time is passed in as
wall-clock seconds.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

# Steps in seconds, and how many of each are stored: three minutes by the second, an hour by ten, twelve by two minutes.
LEVELS = ((1.0, 180), (10.0, 360), (120.0, 360))

# The metrics stored of every rank, by their names in `RankStatus`.
METRICS = ("rss_bytes", "cpu_percent", "collectives_per_s", "steps_per_s", "gpu_allocated_bytes", "gpu_utilisation")

# Limits of all curves together: points, and names of scalars; names made from a counter must not fill memory.
_MAX_POINTS = 400_000
_MAX_CURVE_POINTS = 2_000
_MIN_CURVE_POINTS = 16
_MAX_NAMES = 64
_MAX_NAME_CHARS = 120


class HasRank(Protocol):
    """The source of a row of metrics: a `RankStatus`."""

    @property
    def rank(self) -> int: ...


class SampleRing:
    """The last values of one number, in equal steps; a step with several values holds their mean."""

    __slots__ = ("_newest_step", "_num_in_newest", "_size", "_values", "step_s")

    def __init__(self, step_s: float, size: int) -> None:
        self.step_s, self._size = step_s, size
        self._values = array("f")  # grows to `size`: most ranks have no GPU, and most meshes do not run overnight
        self._newest_step: int | None = None  # step of the last value, counted from the epoch
        self._num_in_newest = 0  # values in it

    def put(self, at: float, value: float) -> bool:
        """Add a value; return whether it began a new step. A value older than the newest step counts to that step."""
        step = int(at // self.step_s)
        if self._newest_step is None or step - self._newest_step >= self._size:
            self._values, self._newest_step, self._num_in_newest = array("f", [value]), step, 1
            return True
        if step <= self._newest_step:
            self._num_in_newest += 1
            self._values[-1] += (value - self._values[-1]) / self._num_in_newest
            return False
        missed = step - self._newest_step - 1
        self._values.extend([math.nan] * missed)
        self._values.append(value)
        if len(self._values) > 2 * self._size:  # cut in one go, so that the amortised cost of a value is constant
            del self._values[: -self._size]
        self._newest_step, self._num_in_newest = step, 1
        return True

    def points(self) -> list[tuple[float, float]]:
        """Return (wall clock at the step's start, value), oldest first, without the steps that have no value."""
        if self._newest_step is None:
            return []
        values = self._values[-self._size :]
        first = self._newest_step - len(values) + 1
        return [((first + at) * self.step_s, value) for at, value in enumerate(values) if not math.isnan(value)]

    def dump(self, since: float) -> list[Any] | None:
        """Return the steps since `since`, for `load`.

        These are the newest step's number, its value count, and all values as bytes of floats.
        """
        if self._newest_step is None:
            return None
        wanted = (
            min(self._size, self._newest_step - math.ceil(since / self.step_s) + 1) if since > -math.inf else self._size
        )
        return [self._newest_step, self._num_in_newest, self._values[-wanted:].tobytes()] if wanted > 0 else None

    def load(self, dumped: Sequence[Any]) -> None:
        """Replace the content by a dump from a ring with the same steps."""
        self._newest_step, self._num_in_newest, values = dumped
        self._values = array("f")
        self._values.frombytes(values)


class Series:
    """METRICS of every rank over time."""

    def __init__(self, levels: Sequence[tuple[float, int]] = LEVELS) -> None:
        self._levels = tuple(levels)
        self._rings: dict[tuple[str, int], tuple[SampleRing, ...]] = {}

    def put(self, metric: str, rank: int, at: float, value: float) -> None:
        rings = self._rings.get((metric, rank))
        if rings is None:
            rings = self._rings[metric, rank] = tuple(SampleRing(step_s, size) for step_s, size in self._levels)
        for ring in rings:  # a coarse ring gets one value of each step of the next finer one: enough for its mean
            if not ring.put(at, value):
                return

    def sample(self, at: float, ranks: Iterable[HasRank], only: Iterable[int] | None = None) -> None:
        """Record the current metrics of ranks.

        Args:
            only: restricts them to these ranks; None: all.
        """
        wanted = None if only is None else set(only)
        for rank in ranks:
            if wanted is not None and rank.rank not in wanted:
                continue
            for metric in METRICS:
                value = getattr(rank, metric)
                if value is not None:
                    self.put(metric, rank.rank, at, value)

    def points(self, metric: str, rank: int, since: float = -math.inf) -> list[tuple[float, float]]:
        """Return (wall clock, value), oldest first: the last minutes in fine steps, earlier ones in coarse steps.

        Args:
            since: wall clock; older values are left out.
        """
        found: list[tuple[float, float]] = []
        rings = self._rings.get((metric, rank), ())
        for ring in rings:
            points = ring.points()
            before = found[0][0] if found else math.inf
            # A coarse step is left out if it overlaps the finer steps after it.
            found = [point for point in points if point[0] + ring.step_s <= before or before == math.inf] + found
        return [point for point in found if point[0] >= since]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for _, rank in list(self._rings)}))

    def dump(self, since: float) -> dict[str, dict[int, list[Any]]]:
        """Return everything since then, as plain data: metric -> rank -> the dump of each of its rings.

        For a thousand ranks that is some megabytes; the cost is that of copying them.
        """
        found: dict[str, dict[int, list[Any]]] = {}
        if since == math.inf:
            return found
        for (metric, rank), rings in list(self._rings.items()):
            dumps = [ring.dump(since) for ring in rings]
            if any(dumps):
                found.setdefault(metric, {})[rank] = dumps
        return found

    def load(self, data: Mapping[str, Mapping[Any, Sequence[Any]]]) -> None:
        """Load the `dump` of another instance, replacing what was known."""
        for metric, by_rank in data.items():
            for rank, dumps in by_rank.items():
                rings = self._rings[metric, int(rank)] = tuple(
                    SampleRing(step_s, size) for step_s, size in self._levels
                )
                for ring, dumped in zip(rings, dumps, strict=True):
                    if dumped is not None:
                        ring.load(dumped)


class Curve:
    """One scalar on one rank.

    When it is full, every second point is dropped, and from then on every second new point; the first and the last
    point are always retained.
    """

    __slots__ = ("_num_since_stored", "_steps", "_stride", "_times", "_values")

    def __init__(self) -> None:
        self._steps = array("d")  # steps
        self._values = array("d")
        self._times = array("d")
        self._stride = 1  # one of this many points is stored
        self._num_since_stored = 0  # points since the last one that is stored permanently

    def put(self, step: float, value: float, at: float, limit: int) -> None:
        if self._num_since_stored and self._steps:  # the last point is stored only because it was the last
            self._steps[-1], self._values[-1], self._times[-1] = step, value, at
        else:
            self._steps.append(step)
            self._values.append(value)
            self._times.append(at)
        self._num_since_stored = (self._num_since_stored + 1) % self._stride
        if len(self._steps) > limit:
            for points in self._points():
                del points[1:-1:2]
            self._stride *= 2
            self._num_since_stored = 1 % self._stride

    def points(self, since: float = -math.inf) -> list[tuple[int, float, float]]:
        """Return (step, value, wall clock), in the order they were logged."""
        rows = zip(self._steps, self._values, self._times, strict=False)  # another thread may be in `put`
        return [(int(step), value, at) for step, value, at in rows if at >= since]

    def dump(self, since: float) -> list[Any] | None:
        """Return the points since then, for `load`: the thinning state, and all points as bytes of floats."""
        first = bisect_left(self._times, since)
        if first == len(self._times):
            return None
        return [self._stride, self._num_since_stored, *(points[first:].tobytes() for points in self._points())]

    def load(self, dumped: Sequence[Any]) -> None:
        """Replace the content by another curve's dump."""
        self._stride, self._num_since_stored, *columns = dumped
        for points, column in zip(self._points(), columns, strict=True):
            del points[:]
            points.frombytes(column)

    def _points(self) -> tuple[array[float], ...]:
        return self._steps, self._values, self._times

    def points_after(self, step: float) -> list[tuple[int, float, float]]:
        """Return the trailing points with larger steps than `step`; the cost grows with their number only."""
        first = len(self._steps)
        while first and self._steps[first - 1] > step:
            first -= 1
        rows = zip(self._steps[first:], self._values[first:], self._times[first:], strict=False)
        return [(int(x), value, at) for x, value, at in rows]


class Curves:
    """The scalars that ranks logged.

    Attributes:
        num_refused: points of names beyond the first `_MAX_NAMES`, which are not stored.
        num_dropped: points that ranks logged faster than they could send them.
    """

    def __init__(self) -> None:
        self._curves: dict[str, dict[int, Curve]] = {}
        self._num_curves = 0
        self.num_refused = 0
        self.num_dropped = 0

    def put(self, name: str, rank: int, step: float, value: float, at: float) -> bool:
        """Add a point; return whether it was accepted."""
        name = name[:_MAX_NAME_CHARS]
        by_rank = self._curves.get(name)
        if by_rank is None:
            if len(self._curves) >= _MAX_NAMES:
                self.num_refused += 1
                return False
            by_rank = self._curves[name] = {}
        curve = by_rank.get(rank)
        if curve is None:
            curve = by_rank[rank] = Curve()
            self._num_curves += 1
        limit = min(_MAX_CURVE_POINTS, max(_MIN_CURVE_POINTS, _MAX_POINTS // self._num_curves))
        curve.put(step, value, at, limit)
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order they were first logged."""
        return tuple(self._curves)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(self._curves.get(name, ())))

    def points(self, name: str, rank: int, since: float = -math.inf) -> list[tuple[int, float, float]]:
        """Return (step, value, wall clock) of one scalar on one rank, in the order they were logged."""
        curve = self._curves.get(name, {}).get(rank)
        return curve.points(since) if curve is not None else []

    def points_after(self, name: str, rank: int, step: float) -> list[tuple[int, float, float]]:
        """Return the points with larger steps than `step`, as `points` does; cheap if there are few."""
        curve = self._curves.get(name, {}).get(rank)
        return curve.points_after(step) if curve is not None else []

    def dump(self, since: float) -> dict[str, dict[int, list[Any]]]:
        """Return everything since then, as plain data: name -> rank -> the dump of its curve."""
        found: dict[str, dict[int, list[Any]]] = {}
        for name, by_rank in self._curves.items() if since < math.inf else ():
            for rank, curve in by_rank.items():
                if (dumped := curve.dump(since)) is not None:
                    found.setdefault(name, {})[rank] = dumped
        return found

    def load(self, data: Mapping[str, Mapping[Any, Sequence[Any]]]) -> None:
        """Load the `dump` of another instance, replacing what was known."""
        for name, by_rank in data.items():
            for rank, dumped in by_rank.items():
                curve = self._curves.setdefault(name, {})[int(rank)] = Curve()
                curve.load(dumped)
        self._num_curves = sum(map(len, self._curves.values()))

    def rows(self, since: float = -math.inf) -> Iterator[tuple[str, int, int, float, float]]:
        """Yield (name, rank, step, value, wall clock) of everything."""
        for name, by_rank in list(self._curves.items()):
            for rank in sorted(by_rank):
                for step, value, at in by_rank[rank].points(since):
                    yield name, rank, step, value, at
