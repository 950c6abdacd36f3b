"""What came of a campaign, as text: one line for each case, and a table at the end. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.campaign.checks import KINDS, Problem
from tests.campaign.draws import Draw


@dataclass
class Result:
    """What came of one case.

    Attributes:
        outcome: in a word or two: "healed", "went on", "mesh ended, and said so".
        named_s: from the fault to the first word of the mesh of what it did; None: there was nothing to say.
        unblocked_s: from the fault to when the program could go on with something else.
        healed_s: that `mesh.heal()` took.
        seconds: that the whole case took.
    """

    draw: Draw
    outcome: str = ""
    named_s: float | None = None
    unblocked_s: float | None = None
    healed_s: float | None = None
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)


def describe(result: Result) -> str:
    """Return the line of a case; those of its problems follow."""
    times = [
        f"{what} {seconds:.2f} s"
        for what, seconds in (
            ("named", result.named_s),
            ("unblocked", result.unblocked_s),
            ("healed", result.healed_s),
            ("in all", result.seconds),
        )
        if seconds is not None
    ]
    lines = [f"{result.draw}: {result.outcome or 'FAILED'} ({', '.join(times)})"]
    lines += [f"  {problem.kind.upper()}: {problem.text}" for problem in result.problems]
    return "\n".join(lines)


def how_to_repeat(draw: Draw, before: Sequence[int]) -> str:
    """Return the command for a case, and the one with all cases that its mesh had seen before."""
    command = f"python -m tests.campaign --seed {draw.seed} --only"
    alone = f"  again: {command} {draw.number}"
    if not before:
        return alone
    return f"{alone}\n  with all that its mesh had seen: {command} {' '.join(map(str, before))} {draw.number}"


def table(results: Sequence[Result]) -> str:
    """Return the table: a row for each fault, a column for each work, medians, and the counts of problems."""
    faults = list(dict.fromkeys(result.draw.fault for result in sorted(results, key=lambda one: one.draw.fault)))
    works = list(dict.fromkeys(result.draw.work for result in sorted(results, key=lambda one: one.draw.work)))
    counts = Counter((result.draw.fault, result.draw.work) for result in results)
    header = ["fault", *works, "all", "named", "unblocked", "healed", "problems"]
    rows = []
    for fault in faults:
        own = [result for result in results if result.draw.fault == fault]
        rows.append([
            fault,
            *(str(counts[fault, work] or "") for work in works),
            str(len(own)),
            _median(result.named_s for result in own),
            _median(result.unblocked_s for result in own),
            _median(result.healed_s for result in own),
            str(sum(bool(result.problems) for result in own) or ""),
        ])  # fmt: skip
    totals = ["all", *(str(sum(counts[fault, work] for fault in faults)) for work in works), str(len(results))]
    rows.append([*totals, "", "", "", str(sum(bool(result.problems) for result in results) or "")])
    return "\n".join([*_aligned([header, *rows]), "", summary(results)])


def summary(results: Sequence[Result]) -> str:
    kinds = Counter(problem.kind for result in results for problem in result.problems)
    counted = ", ".join(f"{kinds[kind]} {_plural(kind, kinds[kind])}" for kind in KINDS)
    return f"{len(results)} faults: {counted}"


def _plural(kind: str, count: int) -> str:
    return f"{kind}s" if kind in ("hang", "leak") and count != 1 else kind


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} s" if known else ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
