"""Numbers over time: what ranks measured, and the scalars that their code logged.

Bounded whatever happens: a thousand ranks over days take tens of megabytes, because what is long ago is kept in coarser
steps. The supervisor fills one of each from beats; an onlooker's mirror is of the same classes. Pure: time comes in as
wall-clock seconds.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

# Steps in seconds, and how many of each are kept: three minutes by the second, an hour by ten, twelve by two minutes.
LEVELS = ((1.0, 180), (10.0, 360), (120.0, 360))

# What is kept of every rank, by its name in `RankNow`.
METRICS = ("rss_bytes", "cpu_percent", "collectives_per_s", "steps_per_s", "gpu_allocated_bytes", "gpu_utilisation")

# Points of scalars that all curves together hold, and names of scalars; a name made of a counter must not fill memory.
_POINTS_OF_ALL = 400_000
_POINTS_OF_ONE = 2_000
_POINTS_AT_LEAST = 16
_NAMES = 64
_NAME_CHARS = 120


class Measured(Protocol):
    """What a row of metrics is read from: a `RankNow`."""

    @property
    def rank(self) -> int: ...


class Ring:
    """The last values of one number, in equal steps; a step that saw several holds their mean."""

    __slots__ = ("_newest", "_seen", "_size", "_values", "step_s")

    def __init__(self, step_s: float, size: int) -> None:
        self.step_s, self._size = step_s, size
        self._values = array("f")  # grows to `size`: most ranks' GPUs, and most meshes' nights, never happen
        self._newest: int | None = None  # the step that the last value is of, counted from the epoch
        self._seen = 0  # values in it

    def put(self, at: float, value: float) -> bool:
        """Note a value; whether a new step began. One that is older than the newest step is the newest step's."""
        step = int(at // self.step_s)
        if self._newest is None or step - self._newest >= self._size:
            self._values, self._newest, self._seen = array("f", [value]), step, 1
            return True
        if step <= self._newest:
            self._seen += 1
            self._values[-1] += (value - self._values[-1]) / self._seen
            return False
        missed = step - self._newest - 1
        self._values.extend([math.nan] * missed)
        self._values.append(value)
        if len(self._values) > 2 * self._size:  # cut in one go, so that a value costs the same on average
            del self._values[: -self._size]
        self._newest, self._seen = step, 1
        return True

    def points(self) -> list[tuple[float, float]]:
        """(wall clock at the step's begin, value), oldest first; steps without a value are left out."""
        if self._newest is None:
            return []
        values = self._values[-self._size :]
        first = self._newest - len(values) + 1
        return [((first + at) * self.step_s, value) for at, value in enumerate(values) if not math.isnan(value)]

    def dump(self, since: float) -> list[Any] | None:
        """The steps since then, for `load`: the newest one's number, what it saw, and all values as bytes of floats."""
        if self._newest is None:
            return None
        wanted = min(self._size, self._newest - math.ceil(since / self.step_s) + 1) if since > -math.inf else self._size
        return [self._newest, self._seen, self._values[-wanted:].tobytes()] if wanted > 0 else None

    def load(self, told: Sequence[Any]) -> None:
        """Be what another one of the same steps was."""
        self._newest, self._seen, values = told
        self._values = array("f")
        self._values.frombytes(values)


class Series:
    """METRICS of every rank over time."""

    def __init__(self, levels: Sequence[tuple[float, int]] = LEVELS) -> None:
        self._levels = tuple(levels)
        self._rings: dict[tuple[str, int], tuple[Ring, ...]] = {}

    def put(self, metric: str, rank: int, at: float, value: float) -> None:
        rings = self._rings.get((metric, rank))
        if rings is None:
            rings = self._rings[metric, rank] = tuple(Ring(step_s, size) for step_s, size in self._levels)
        for ring in rings:  # a coarse ring sees one value of each step of the next finer one: enough for its mean
            if not ring.put(at, value):
                return

    def saw(self, at: float, ranks: Iterable[Measured], only: Iterable[int] | None = None) -> None:
        """Note what ranks measure now.

        Args:
            only: of these ranks; None: of all.
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
        """(wall clock, value), oldest first: the last minutes in fine steps, what was before in coarse ones.

        Args:
            since: wall clock; nothing older.
        """
        found: list[tuple[float, float]] = []
        rings = self._rings.get((metric, rank), ())
        for ring in rings:
            points = ring.points()
            before = found[0][0] if found else math.inf
            # A coarse step that fine ones follow within its span ends where they begin.
            found = [point for point in points if point[0] + ring.step_s <= before or before == math.inf] + found
        return [point for point in found if point[0] >= since]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for _, rank in list(self._rings)}))

    def dump(self, since: float) -> dict[str, dict[int, list[Any]]]:
        """Everything since then, as plain data: metric -> rank -> what each of its rings gives. Of a thousand ranks
        that is some megabytes, and takes as long as it takes to copy them."""
        found: dict[str, dict[int, list[Any]]] = {}
        if since == math.inf:
            return found
        for (metric, rank), rings in list(self._rings.items()):
            told = [ring.dump(since) for ring in rings]
            if any(told):
                found.setdefault(metric, {})[rank] = told
        return found

    def load(self, data: Mapping[str, Mapping[Any, Sequence[Any]]]) -> None:
        """What another one's `dump` gave, in place of what was known."""
        for metric, by_rank in data.items():
            for rank, told in by_rank.items():
                rings = self._rings[metric, int(rank)] = tuple(Ring(step_s, size) for step_s, size in self._levels)
                for ring, one in zip(rings, told, strict=True):
                    if one is not None:
                        ring.load(one)


class Curve:
    """One scalar on one rank. When it is full, every second of its points is dropped, and from then on of those that
    come; its first and its last point are always there."""

    __slots__ = ("_every", "_skip", "_times", "_values", "_xs")

    def __init__(self) -> None:
        self._xs = array("d")  # steps
        self._values = array("d")
        self._times = array("d")
        self._every = 1  # one of so many is kept
        self._skip = 0  # points since the last that is kept for good

    def put(self, step: float, value: float, at: float, limit: int) -> None:
        if self._skip and self._xs:  # the last one is here only because it was the last
            self._xs[-1], self._values[-1], self._times[-1] = step, value, at
        else:
            self._xs.append(step)
            self._values.append(value)
            self._times.append(at)
        self._skip = (self._skip + 1) % self._every
        if len(self._xs) > limit:
            for points in self._points():
                del points[1:-1:2]
            self._every *= 2
            self._skip = 1 % self._every

    def points(self, since: float = -math.inf) -> list[tuple[int, float, float]]:
        """(step, value, wall clock), in the order they were logged."""
        rows = zip(self._xs, self._values, self._times, strict=False)  # another thread may be at `put`
        return [(int(step), value, at) for step, value, at in rows if at >= since]

    def dump(self, since: float) -> list[Any] | None:
        """Its points since then, for `load`: how they are thinned out, and all of them as bytes of floats."""
        first = bisect_left(self._times, since)
        if first == len(self._times):
            return None
        return [self._every, self._skip, *(points[first:].tobytes() for points in self._points())]

    def load(self, told: Sequence[Any]) -> None:
        """Be what another one was."""
        self._every, self._skip, *columns = told
        for points, column in zip(self._points(), columns, strict=True):
            del points[:]
            points.frombytes(column)

    def _points(self) -> tuple[array[float], ...]:
        return self._xs, self._values, self._times

    def after(self, step: float) -> list[tuple[int, float, float]]:
        """The points at its end whose steps are beyond this one; costs as much as there are such."""
        first = len(self._xs)
        while first and self._xs[first - 1] > step:
            first -= 1
        rows = zip(self._xs[first:], self._values[first:], self._times[first:], strict=False)
        return [(int(x), value, at) for x, value, at in rows]


class Curves:
    """The scalars that ranks logged.

    Attributes:
        num_refused: points of names beyond the first `_NAMES`, which are not kept.
        num_dropped: points that ranks logged faster than they could tell.
    """

    def __init__(self) -> None:
        self._curves: dict[str, dict[int, Curve]] = {}
        self._num_curves = 0
        self.num_refused = 0
        self.num_dropped = 0

    def put(self, name: str, rank: int, step: float, value: float, at: float) -> bool:
        """Note a point; whether it was taken."""
        name = name[:_NAME_CHARS]
        by_rank = self._curves.get(name)
        if by_rank is None:
            if len(self._curves) >= _NAMES:
                self.num_refused += 1
                return False
            by_rank = self._curves[name] = {}
        curve = by_rank.get(rank)
        if curve is None:
            curve = by_rank[rank] = Curve()
            self._num_curves += 1
        limit = min(_POINTS_OF_ONE, max(_POINTS_AT_LEAST, _POINTS_OF_ALL // self._num_curves))
        curve.put(step, value, at, limit)
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """In the order they were first logged."""
        return tuple(self._curves)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(self._curves.get(name, ())))

    def points(self, name: str, rank: int, since: float = -math.inf) -> list[tuple[int, float, float]]:
        """(step, value, wall clock) of one scalar on one rank, in the order they were logged."""
        curve = self._curves.get(name, {}).get(rank)
        return curve.points(since) if curve is not None else []

    def after(self, name: str, rank: int, step: float) -> list[tuple[int, float, float]]:
        """As `points`, of what was logged for steps beyond this one; cheap where that is little."""
        curve = self._curves.get(name, {}).get(rank)
        return curve.after(step) if curve is not None else []

    def dump(self, since: float) -> dict[str, dict[int, list[Any]]]:
        """Everything since then, as plain data: name -> rank -> what its curve gives."""
        found: dict[str, dict[int, list[Any]]] = {}
        for name, by_rank in self._curves.items() if since < math.inf else ():
            for rank, curve in by_rank.items():
                if (told := curve.dump(since)) is not None:
                    found.setdefault(name, {})[rank] = told
        return found

    def load(self, data: Mapping[str, Mapping[Any, Sequence[Any]]]) -> None:
        """What another one's `dump` gave, in place of what was known."""
        for name, by_rank in data.items():
            for rank, told in by_rank.items():
                curve = self._curves.setdefault(name, {})[int(rank)] = Curve()
                curve.load(told)
        self._num_curves = sum(map(len, self._curves.values()))

    def rows(self, since: float = -math.inf) -> Iterator[tuple[str, int, int, float, float]]:
        """(name, rank, step, value, wall clock) of everything."""
        for name, by_rank in list(self._curves.items()):
            for rank in sorted(by_rank):
                for step, value, at in by_rank[rank].points(since):
                    yield name, rank, step, value, at
