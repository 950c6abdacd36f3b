"""Time series: metrics of ranks, and the scalars that their code logged.

Bounded in every case: a thousand ranks over days take tens of megabytes, because older data is stored in coarser steps.
The supervisor fills one of each from heartbeats; a subscriber's copy uses the same classes. Pure: time is passed in as
wall-clock seconds.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from meshbook.wire.messages import METRICS, CurveDump, RankStatus, RingDump

# Steps in seconds, and how many of each are stored: three minutes by the second, an hour by ten, twelve by two minutes.
LEVELS = ((1.0, 180), (10.0, 360), (120.0, 360))

STORED_METRICS = tuple(name for name, metric in METRICS.items() if metric.chart)

# Limits of all curves together: points, and names of scalars; names made from a counter must not fill memory.
_MAX_POINTS = 400_000
_MAX_CURVE_POINTS = 2_000
_MIN_CURVE_POINTS = 16
_MAX_NAMES = 64
_MAX_NAME_CHARS = 120


class SampleRing:
    """The last values of one number, in equal steps; a step with several values holds their mean."""

    __slots__ = ("_newest_step", "_num_in_newest", "_size", "_values", "step_s")

    def __init__(self, step_s: float, size: int) -> None:
        self.step_s, self._size = step_s, size
        self._values = array("f")  # grows to `size`: most ranks have no GPU, and most meshes do not run overnight
        self._newest_step = -size  # step of the last value, counted from the epoch
        self._num_in_newest = 0  # values in it

    def put(self, at: float, value: float) -> bool:
        """Add a value; return whether it began a new step. A value older than the newest step counts to that step."""
        step = int(at // self.step_s)
        missed = step - self._newest_step - 1
        if self._values and missed < 0:
            self._num_in_newest += 1
            self._values[-1] += (value - self._values[-1]) / self._num_in_newest
            return False
        if missed >= self._size:
            self._values = array("f")
        elif self._values:
            self._values.extend([math.nan] * missed)
        self._values.append(value)
        if len(self._values) > 2 * self._size:  # cut in one go, so that the amortised cost of a value is constant
            del self._values[: -self._size]
        self._newest_step, self._num_in_newest = step, 1
        return True

    def points(self) -> list[tuple[float, float]]:
        """Return (wall clock at the step's start, value), oldest first, without the steps that have no value."""
        values = self._values[-self._size :]
        first = self._newest_step - len(values) + 1
        return [((first + at) * self.step_s, value) for at, value in enumerate(values) if not math.isnan(value)]

    def dump(self, metric: str, rank: int, level: int, since: float) -> RingDump | None:
        """Return the steps since `since`, for `load`; None if there are none."""
        first = max(self._newest_step - self._size + 1, math.ceil(max(0.0, since) / self.step_s))
        wanted = self._newest_step - first + 1
        if wanted <= 0 or not self._values:
            return None
        return RingDump(metric, rank, level, self._newest_step, self._num_in_newest, self._values[-wanted:].tobytes())

    def load(self, dump: RingDump) -> None:
        """Replace the content by a dump from a ring with the same steps."""
        self._newest_step, self._num_in_newest = dump.newest_step, dump.num_in_newest
        self._values = array("f", dump.values)


class Series:
    """The metrics of every rank over time that have a chart."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, int], tuple[SampleRing, ...]] = {}

    def put(self, metric: str, rank: int, at: float, value: float) -> None:
        for ring in self._rings_of(metric, rank):
            if not ring.put(at, value):  # a coarse ring gets one value of each finer step: enough for its mean
                return

    def sample(self, at: float, ranks: Iterable[RankStatus]) -> None:
        """Record the current metrics of ranks."""
        for rank in ranks:
            for metric in STORED_METRICS:
                value = getattr(rank, metric)
                if value is not None:
                    self.put(metric, rank.rank, at, value)

    def points(self, metric: str, rank: int, since: float = -math.inf) -> list[tuple[float, float]]:
        """Return (wall clock, value), oldest first: the last minutes in fine steps, earlier ones in coarse steps.

        Args:
            since: wall clock; older values are left out.
        """
        found: list[tuple[float, float]] = []
        for ring in self._rings.get((metric, rank), ()):
            before = found[0][0] if found else math.inf
            # A coarse step is left out if it overlaps the finer steps after it.
            found = [point for point in ring.points() if point[0] + ring.step_s <= before] + found
        return [point for point in found if point[0] >= since]

    def dump(self, since: float) -> tuple[RingDump, ...]:
        """Return everything since then, for `load`.

        For a thousand ranks that is some megabytes; the cost is that of copying them.
        """
        dumps = (
            ring.dump(metric, rank, level, since)
            for (metric, rank), rings in list(self._rings.items() if since < math.inf else ())
            for level, ring in enumerate(rings)
        )
        return tuple(dump for dump in dumps if dump is not None)

    def load(self, dumps: Iterable[RingDump]) -> None:
        """Load the `dump` of another instance, replacing what was known of the same metrics."""
        for dump in dumps:
            self._rings_of(dump.metric, dump.rank)[dump.level].load(dump)

    def _rings_of(self, metric: str, rank: int) -> Sequence[SampleRing]:
        rings = self._rings.get((metric, rank))
        if rings is None:
            rings = self._rings[metric, rank] = tuple(SampleRing(step_s, size) for step_s, size in LEVELS)
        return rings


class Curve:
    """One scalar on one rank.

    When it is full, every second point is dropped, and from then on every second new point; the first and the last
    point are always retained.
    """

    __slots__ = ("_columns", "_num_since_stored", "_stride")

    def __init__(self) -> None:
        self._columns = (array("d"), array("d"), array("d"))  # steps, values, times
        self._stride = 1  # one of this many points is stored
        self._num_since_stored = 0  # points since the last one that is stored permanently

    def put(self, step: float, value: float, at: float, limit: int) -> None:
        steps, values, times = self._columns
        if self._num_since_stored and steps:  # the last point is stored only because it was the last
            steps[-1], values[-1], times[-1] = step, value, at
        else:
            steps.append(step)
            values.append(value)
            times.append(at)
        self._num_since_stored = (self._num_since_stored + 1) % self._stride
        if len(steps) > limit:
            for column in self._columns:
                del column[1:-1:2]
            self._stride *= 2
            self._num_since_stored = 1 % self._stride

    def points(self) -> list[tuple[int, float, float]]:
        """Return (step, value, wall clock), in the order they were logged."""
        return self._points_from(0)

    def points_after(self, step: float) -> list[tuple[int, float, float]]:
        """Return the trailing points with larger steps than `step`; the cost grows with their number only."""
        steps = self._columns[0]
        first = len(steps)
        while first and steps[first - 1] > step:
            first -= 1
        return self._points_from(first)

    def _points_from(self, first: int) -> list[tuple[int, float, float]]:
        rows = zip(*(column[first:] for column in self._columns), strict=False)  # another thread may be in `put`
        return [(int(step), value, at) for step, value, at in rows]

    def dump(self, name: str, rank: int, since: float) -> CurveDump | None:
        """Return the points since then, for `load`; None if there are none."""
        steps, values, times = self._columns
        first = bisect_left(times, since)
        if first == len(times):
            return None
        columns = (steps[first:].tobytes(), values[first:].tobytes(), times[first:].tobytes())
        return CurveDump(name, rank, self._stride, self._num_since_stored, columns)

    def load(self, dump: CurveDump) -> None:
        """Replace the content by another curve's dump."""
        self._stride, self._num_since_stored = dump.stride, dump.num_since_stored
        steps, values, times = dump.columns
        self._columns = (array("d", steps), array("d", values), array("d", times))


class Curves:
    """The scalars that ranks logged. Names beyond the first `_MAX_NAMES` are not stored."""

    def __init__(self) -> None:
        self._curves: dict[str, dict[int, Curve]] = {}
        self._num_curves = 0

    def put(self, name: str, rank: int, step: float, value: float, at: float) -> bool:
        """Add a point; return whether it was accepted."""
        curve = self._curve(name[:_MAX_NAME_CHARS], rank)
        if curve is not None:
            limit = min(_MAX_CURVE_POINTS, max(_MIN_CURVE_POINTS, _MAX_POINTS // self._num_curves))
            curve.put(step, value, at, limit)
        return curve is not None

    def _curve(self, name: str, rank: int) -> Curve | None:
        by_rank = self._curves.get(name)
        if by_rank is None:
            if len(self._curves) >= _MAX_NAMES:
                return None
            by_rank = self._curves[name] = {}
        curve = by_rank.get(rank)
        if curve is None:
            curve = by_rank[rank] = Curve()
            self._num_curves += 1
        return curve

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order they were first logged."""
        return tuple(self._curves)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(self._curves.get(name, ())))

    def points(self, name: str, rank: int) -> list[tuple[int, float, float]]:
        """Return (step, value, wall clock) of one scalar on one rank, in the order they were logged."""
        curve = self._curves.get(name, {}).get(rank)
        return curve.points() if curve is not None else []

    def points_after(self, name: str, rank: int, step: float) -> list[tuple[int, float, float]]:
        """Return the points with larger steps than `step`, as `points` does; cheap if there are few."""
        curve = self._curves.get(name, {}).get(rank)
        return curve.points_after(step) if curve is not None else []

    def rows(self) -> Iterator[tuple[str, int, int, float, float]]:
        """Yield (name, rank, step, value, wall clock) of everything."""
        for name in self.names:
            for rank in self.ranks_of(name):
                for step, value, at in self.points(name, rank):
                    yield name, rank, step, value, at

    def dump(self, since: float) -> tuple[CurveDump, ...]:
        """Return everything since then, for `load`."""
        dumps = (
            curve.dump(name, rank, since)
            for name, by_rank in list(self._curves.items() if since < math.inf else ())
            for rank, curve in by_rank.items()
        )
        return tuple(dump for dump in dumps if dump is not None)

    def load(self, dumps: Iterable[CurveDump]) -> None:
        """Load the `dump` of another instance, replacing what was known of the same scalars."""
        for dump in dumps:
            curve = self._curve(dump.name, dump.rank)
            if curve is not None:
                curve.load(dump)
