"""Do ranks wait for what `mesh.feed` brings? The same steps on data that is fed and on data that ranks have, in turns.

The promise is of a step's time by the scheduler's own books of the ranks' main threads: the clock's less the time that
the thread stood ready while others had the core. That leaves its work and its waits for the next thing to do, and not
what the controller and the source took of cores that they share with the ranks.

    python -m benchmarks.feed [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import meshbook
from benchmarks import workbench
from benchmarks.report import Report
from meshbook.tensors.creation import engine_of

RANKS, BATCHES = 2, 32
ROWS, WIDTH = 1024, 2048  # of a batch: 8 MiB
# Ranks as busy as with data of their own to 95 %: a step takes at most so much longer.
LIMIT = 1 / 0.95
HAD, FED = "a step on data that ranks have", "a step on data that is fed"


def measure(quick: bool, folder: Path) -> Report:
    report = Report("feed", f"steps on batches of {ROWS * WIDTH >> 18} MiB that {RANKS} ranks are fed, or have")
    torch.set_num_threads(1)
    with meshbook.create_mesh({"dp": RANKS}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        engine, pids = engine_of(mesh), list(mesh.execute(os.getpid).values())
        batch = torch.randn(ROWS, WIDTH)
        weights = meshbook.distribute(torch.randn(WIDTH, 1024), mesh)
        here = meshbook.distribute(batch, mesh, sharding_spec=["dp"])

        def steps(batches: Iterable[Any]) -> None:
            losses = [(rows @ weights).sum() + (rows @ weights).sum() + (rows @ weights).sum() for rows in batches]
            engine.wait()
            del losses  # what nobody holds any more may never be computed

        contestants = {
            HAD: step_ms(pids, lambda: steps(here for _ in range(BATCHES))),
            FED: step_ms(pids, lambda: steps(mesh.feed(batch + number for number in range(BATCHES)))),
        }
        taken = workbench.take_turns(contestants, 2 if quick else 7, warm_up=2)
    report.add(HAD, taken[HAD], "ms")
    report.add(FED, taken[FED], "ms", against=HAD)
    report.promise("a step on data that is fed, as on data that ranks have", report.ratio(FED), LIMIT, "x")
    return report


def step_ms(pids: list[int], act: Callable[[], None]) -> Callable[[], float]:
    """A contestant: milliseconds of a step of the ranks, without what others took of their cores."""

    def ready_s() -> float:
        return sum(int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9

    def once() -> float:
        ready, started = ready_s(), time.perf_counter()
        act()
        taken = time.perf_counter() - started
        return 1e3 * (taken - (ready_s() - ready) / len(pids)) / BATCHES

    return once


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
