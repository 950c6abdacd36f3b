"""What came of a case of the campaign, as text. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.campaign.checks import Problem
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
