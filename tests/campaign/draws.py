"""What each case of a campaign is: drawn from the campaign's seed and the case's number alone. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.campaign.faults import FAULTS, Fault
from tests.campaign.work import WORKS, Work

WORLD_SIZE = 3
# Seconds of work before the fault, at most.
MAX_DELAY_S = 0.4
# How often another rank dies while the mesh is healed, and how late at most: in seconds after the heal has begun.
SECOND_DEATH = 0.33
MAX_SECOND_DELAY_S = 1.0
# How often a mesh is resized to one rank more, and back, when all is verified.
RESIZES = 0.15
# How often a fault that takes something comes in a work that needs it.
IN_NEED = 0.7


@dataclass(frozen=True)
class Draw:
    """One case.

    Attributes:
        seed: the campaign's; with `number` it repeats the case.
        case_seed: of the case's numbers and of the fault's own choices.
        delay_s: from when every rank works to the fault.
        second: the rank that dies while the mesh is healed, and how many seconds after that has begun; None: none.
        resizes: the mesh is resized afterwards, and back.
    """

    seed: int
    number: int
    fault: str
    work: str
    victim: int
    delay_s: float
    case_seed: int
    second: tuple[int, float] | None = None
    resizes: bool = False

    def __str__(self) -> str:
        return f"{self.number} (seed {self.case_seed}): {self.fault} in {self.work}, rank {self.victim}{self._more}"

    @property
    def _more(self) -> str:
        second = f", and rank {self.second[0]} {self.second[1]:.2f} s into the heal" if self.second else ""
        return f"{second}{', then resized' if self.resizes else ''}"


def deck(seed: int, index: int) -> list[str]:
    """Return the faults of as many cases in a row as there are in a deck, each as often as it weighs."""
    faults = [fault.name for fault in FAULTS.values() for _ in range(fault.weight)]
    random.Random(f"deck {seed}/{index}").shuffle(faults)
    return faults


def draw_case(seed: int, number: int) -> Draw:
    size = sum(fault.weight for fault in FAULTS.values())
    fault = FAULTS[deck(seed, number // size)[number % size]]
    rng = random.Random(f"case {seed}/{number}")
    return Draw(
        seed,
        number,
        fault.name,
        _draw_work(fault, rng).name,
        rng.randrange(WORLD_SIZE),
        rng.uniform(0.0, MAX_DELAY_S),
        rng.randrange(1, 1 << 24),
        (rng.randrange(WORLD_SIZE), rng.uniform(0.0, MAX_SECOND_DELAY_S)) if rng.random() < SECOND_DEATH else None,
        rng.random() < RESIZES,
    )


def _draw_work(fault: Fault, rng: random.Random) -> Work:
    works = works_for(fault)
    in_need = [work for work in works if fault.takes in work.needs]
    return rng.choice(in_need if in_need and rng.random() < IN_NEED else works)


def works_for(fault: Fault) -> list[Work]:
    """Return the works that a fault may come in: a kernel runs those that are cells."""
    return [work for work in WORKS.values() if fault.mesh != "kernel" or work.cell is not None]
