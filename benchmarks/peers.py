"""An empty call and an empty cell on four processes: Meshbook, and what is installed of Monarch, Ray and ipyparallel.

All run at the same time, each in processes of its own, and are asked in turns. They run cells in different ways:
Meshbook in an IPython shell on each rank, ipyparallel in an engine's, Monarch and Ray by `exec` in an actor, which
gives neither output nor a value.

    python -m benchmarks.peers [--quick]
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from benchmarks import contestants, workbench
from benchmarks.report import Report

RANKS = 4
OURS = "Meshbook"
RIVALS = ("Monarch", "Ray", "ipyparallel")
WORDS = {"call": "an empty call", "cell": "the cell `pass`"}


def measure(quick: bool, folder: Path) -> Report:
    report = Report("peers", f"{RANKS} processes, asked in turns")
    with contextlib.ExitStack() as running:
        started: dict[str, contestants.Contestant] = {}
        for name in (OURS, *RIVALS):
            if not contestants.is_installed(name):
                report.note(f"absent from the table: {name} is not installed here (make bench PEERS=1 installs it)")
                continue
            try:
                started[name] = running.enter_context(contestants.Contestant(name, RANKS, folder))
            except RuntimeError as error:
                if name == OURS:
                    raise
                report.note(f"absent from the table: {error}")
        for kind, words in WORDS.items():
            asked = {name: contestant.asker(kind) for name, contestant in started.items()}
            for name, taken in workbench.take_turns(asked, 10 if quick else 200, warm_up=10).items():
                report.add(f"{words}: {name}", taken, "ms", against=None if name == OURS else f"{words}: {OURS}")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
