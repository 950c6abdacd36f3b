"""What came of a soak: each case, and how often each kind failed, with the interval in which the rate lies. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """What became of one case.

    Attributes:
        what: what was put in: the fault, the number of lines, the kind of hang.
        failure: what was wrong; "" if nothing was.
        is_wrong: whether a number was wrong.
    """

    what: str = ""
    failure: str = ""
    is_wrong: bool = False


@dataclass(frozen=True)
class Case:
    """One case of a soak, by its kind and seed.

    Attributes:
        before: the seeds of its turn before it, most of them on the same meshes.
        load: the machine's load average at its end.
        again: of a wrong number: what the same seed gave when it was run again at once, on new meshes.
    """

    kind: str
    seed: int
    verdict: Verdict
    seconds: float
    load: float
    before: tuple[int, ...] = ()
    again: Verdict | None = None

    def __str__(self) -> str:
        verdict = self.verdict
        outcome = "WRONG" if verdict.is_wrong else "FAILED" if verdict.failure else "right"
        return f"{self.kind}:{self.seed} {verdict.what}{': ' if verdict.what else ''}{outcome}, {self.seconds:.1f} s"


def how_to_repeat(case: Case) -> str:
    command = "python -m tests.soak --only"
    lines = [f"again: {command} {case.kind}:{case.seed}"]
    if case.before:
        seeds = " ".join(f"{case.kind}:{seed}" for seed in (*case.before, case.seed))
        lines.append(f"with all that its turn had run: {command} {seeds}")
    if case.again is not None:
        lines.append(f"run again at once, it was {'wrong again' if case.again.is_wrong else 'not wrong'}")
    return "\n".join(lines)


def interval(failures: int, cases: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval, of 95 %, for the rate of failures."""
    if not cases:
        return 0.0, 1.0
    rate, spread = failures / cases, z * z / cases
    middle = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / cases + spread / (4 * cases))
    return max(0.0, middle - half), min(1.0, middle + half)


def table(cases: Sequence[Case]) -> str:
    """Return a row for each kind and one for all: how many, how many failed, the rate's interval, seconds of one."""
    rows = [("kind", "cases", "failed", "wrong", "rate", "seconds each")]
    for kind in [*dict.fromkeys(case.kind for case in cases), "all"]:
        own = [case for case in cases if kind in (case.kind, "all")]
        failed = sum(bool(case.verdict.failure) for case in own)
        low, high = interval(failed, len(own))
        seconds = sum(case.seconds for case in own) / max(1, len(own))
        wrong = sum(case.verdict.is_wrong for case in own)
        rows.append((kind, str(len(own)), str(failed), str(wrong), f"{low:.2%} to {high:.2%}", f"{seconds:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def report(cases: Sequence[Case], **of_the_run: Any) -> dict[str, Any]:
    """Return what is written as JSON: seeds, n, failures, load."""
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(case.kind for case in cases):
        own = [case for case in cases if case.kind == kind]
        failed = [case.seed for case in own if case.verdict.failure]
        kinds[kind] = {
            "n": len(own),
            "seeds": [case.seed for case in own],
            "failures": failed,
            "rate": interval(len(failed), len(own)),
        }
    failures = [asdict(case) for case in cases if case.verdict.failure]
    return {**of_the_run, "kinds": kinds, "failures": failures, "load": [case.load for case in cases]}
