"""What a benchmark found: rows, ratios between them and promises; a table for people, and pyperf's file for tools."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyperf

# Our units, in pyperf's. All others are plain numbers to it.
_UNITS = {
    "s": ("second", 1.0),
    "ms": ("second", 1e-3),
    "us": ("second", 1e-6),
    "MiB": ("byte", 2**20),
    "KiB": ("byte", 2**10),
}
_SMALLEST = 1e-12  # pyperf knows no value that is not positive; a process may have shrunk


@dataclass(frozen=True)
class Row:
    """One thing that was measured, once or many times."""

    what: str
    unit: str  # "ms", "s", "MiB", "messages/s"
    samples: tuple[float, ...]
    against: str | None = None  # the row that this one is a multiple of

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def spread(self) -> tuple[float, ...]:
        """The samples' first and last decile; nothing if there is but one sample."""
        if len(self.samples) < 2:
            return ()
        deciles = statistics.quantiles(self.samples, n=10, method="inclusive")
        return deciles[0], deciles[-1]


@dataclass(frozen=True)
class Promise:
    """A bound that Meshbook sets itself, and what this run says of it."""

    text: str
    measured: float
    limit: float  # at most
    unit: str

    @property
    def held(self) -> bool:
        return self.measured <= self.limit

    def __str__(self) -> str:
        verdict = "held" if self.held else "NOT held"
        return f"promise: {self.text}: {figure(self.measured)} of at most {figure(self.limit)} {self.unit}: {verdict}"


@dataclass
class Report:
    """What one benchmark found. Rows keep the order in which they were added."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, samples: float | Iterable[float], unit: str, *, against: str | None = None) -> float:
        """Put in a row, as a multiple of the row `against` where that makes sense; gives its median.

        Raises:
            ValueError: there is no row `against`, or there are no samples.
        """
        taken = (float(samples),) if isinstance(samples, int | float) else tuple(samples)
        if not taken:
            raise ValueError(f"{what}: nothing was measured")
        if against is not None:
            self.row(against)
        self.rows.append(Row(what, unit, taken, against))
        return self.rows[-1].median

    def row(self, what: str) -> Row:
        for row in self.rows:
            if row.what == what:
                return row
        raise ValueError(f"there is no row {what!r}; there are {', '.join(row.what for row in self.rows)}")

    def difference(self, what: str, minuend: str, subtrahend: str) -> float:
        """A row of what one row has over another, sample by sample: they were taken in turns, so the n-th of both had
        the same neighbours on the machine. Gives the median."""
        more, less = self.row(minuend), self.row(subtrahend)
        pairs = zip(more.samples, less.samples, strict=True)
        return self.add(what, [first - second for first, second in pairs], more.unit)

    def ratio(self, what: str) -> float:
        """How many times the row that it is compared with a row is.

        The median of the ratios sample by sample where both rows have as many, for then they were taken in turns and
        the n-th of both had the same neighbours on the machine; else the ratio of the medians.
        """
        row = self.row(what)
        if row.against is None:
            raise ValueError(f"{what!r} is compared with nothing")
        base = self.row(row.against)
        if len(row.samples) != len(base.samples):
            return row.median / base.median
        return statistics.median(more / less for more, less in zip(row.samples, base.samples, strict=True))

    def promise(self, text: str, measured: float, limit: float, unit: str) -> None:
        self.promises.append(Promise(text, measured, limit, unit))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def lines(self) -> list[str]:
        """The table, the promises and the notes."""
        cells: list[tuple[str, ...]] = [("", "median", "10 %", "90 %", "unit", "")]
        for row in self.rows:
            spread = [figure(decile) for decile in row.spread()] or ["", ""]
            beside = "" if row.against is None else f"{figure(self.ratio(row.what))} x {row.against}"
            cells.append((row.what, figure(row.median), *spread, row.unit, beside))
        return [
            f"{self.name}: {self.title}",
            *(f"  {line}" for line in columns(cells)),
            *(f"  {promise}" for promise in self.promises),
            *(f"  {note}" for note in self.notes),
        ]

    def suite(self) -> pyperf.BenchmarkSuite:
        """Rows and promises as pyperf's benchmarks: `python -m pyperf compare_to` compares two runs."""
        rows = [_benchmark(f"{self.name}: {row.what}", row.unit, row.samples) for row in self.rows]
        for promise in self.promises:
            name = f"{self.name}: promise: {promise.text}"
            rows.append(_benchmark(name, promise.unit, [promise.measured], limit=promise.limit, shown=str(promise)))
        return pyperf.BenchmarkSuite(rows)


def _benchmark(name: str, unit: str, samples: Iterable[float], **metadata: float | str) -> pyperf.Benchmark:
    pyperf_unit, factor = _UNITS.get(unit, ("integer", 1.0))
    values = [max(_SMALLEST, sample * factor) for sample in samples]
    run = pyperf.Run(values, metadata={"name": name, "unit": pyperf_unit, **metadata})
    return pyperf.Benchmark([run])


def verdict(suite: pyperf.BenchmarkSuite) -> list[str]:
    """All promises of a run, those that did not hold first."""
    shown = [benchmark.get_metadata() | {"name": benchmark.get_name()} for benchmark in suite]
    promises = [f"  {one['name'].split(':')[0]}: {one['shown']}" for one in shown if "shown" in one]
    promises.sort(key=lambda line: not line.endswith("NOT held"))
    held = sum(not line.endswith("NOT held") for line in promises)
    return [f"{held} of {len(promises)} promises held", *promises]


def figure(value: float) -> str:
    """Three digits that count, or as many as there are before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, one line each, as wide as their widest; numbers are set flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, 4, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
