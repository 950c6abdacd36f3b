"""What a benchmark found: medians, ratios and promises, as a table for people and as plain data for JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


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

    def percentile(self, percent: int) -> float:
        """The sample below which `percent` of 100 lie; the only one, if there is but one."""
        ordered = sorted(self.samples)
        return ordered[round((len(ordered) - 1) * percent / 100)]


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
        row = Row(what, unit, taken, against)
        self.rows.append(row)
        return row.median

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
        """The median of a row as a multiple of the one that it is compared with."""
        row = self.row(what)
        if row.against is None:
            raise ValueError(f"{what!r} is compared with nothing")
        return row.median / self.row(row.against).median

    def promise(self, text: str, measured: float, limit: float, unit: str) -> None:
        self.promises.append(Promise(text, measured, limit, unit))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def lines(self) -> list[str]:
        """The table, the promises and the notes."""
        cells = [("", "median", "10 %", "90 %", "unit", "")]
        for row in self.rows:
            spread = (figure(row.percentile(10)), figure(row.percentile(90))) if len(row.samples) > 1 else ("", "")
            beside = "" if row.against is None else f"{figure(self.ratio(row.what))} x {row.against}"
            cells.append((row.what, figure(row.median), *spread, row.unit, beside))
        return [
            f"{self.name}: {self.title}",
            *(f"  {line}" for line in columns(cells, left=(0, 4, 5))),
            *(f"  {promise}" for promise in self.promises),
            *(f"  {note}" for note in self.notes),
        ]

    def as_data(self) -> dict[str, Any]:
        """Everything, samples included, as JSON has it."""
        return {
            "name": self.name,
            "title": self.title,
            "rows": [
                asdict(row) | {"median": row.median, "ratio": None if row.against is None else self.ratio(row.what)}
                for row in self.rows
            ],
            "promises": [asdict(promise) | {"held": promise.held} for promise in self.promises],
            "notes": self.notes,
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Report:
        """What `as_data` gave, back."""
        return cls(
            name=data["name"],
            title=data["title"],
            rows=[Row(row["what"], row["unit"], tuple(row["samples"]), row["against"]) for row in data["rows"]],
            promises=[
                Promise(said["text"], said["measured"], said["limit"], said["unit"]) for said in data["promises"]
            ],
            notes=list(data["notes"]),
        )


def figure(value: float) -> str:
    """Three digits that count; whole numbers from a hundred on."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def columns(rows: Sequence[Sequence[str]], *, left: Iterable[int]) -> list[str]:
    """Rows of cells, one line each, as wide as their widest; columns in `left` are set flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    flush = set(left)
    return [
        "  ".join(
            cell.ljust(width) if column in flush else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def verdict(reports: Iterable[Report]) -> list[str]:
    """All promises of a run, those that did not hold first."""
    said = [(promise, report.name) for report in reports for promise in report.promises]
    said.sort(key=lambda pair: pair[0].held)
    held = sum(promise.held for promise, _ in said)
    return [f"{held} of {len(said)} promises held", *(f"  {name}: {promise}" for promise, name in said)]
