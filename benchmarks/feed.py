"""Do ranks wait for what `mesh.feed` brings? The same steps on data that is fed and on data that ranks have, in turns.

The promise is of a step's time by the scheduler's own books of the ranks' main threads: the clock's less the time that
the thread stood ready while others had the core, so its work and its waits for the next thing to do. On the clock is
also what the controller and the source took of cores that they share with the ranks, which are all of them here. What
the controller does for a batch beside making it is a row of its own.

    python -m benchmarks.feed [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import meshbook
from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.tensors.creation import engine_of

RANKS = 2
BATCHES = 32  # of a round
ROWS, WIDTH = 1024, 2048  # of a batch: 8 MiB
# Ranks as busy as with data of their own to 95 %: a step takes at most so much longer.
LIMIT = 1 / 0.95


class Books(NamedTuple):
    """What the scheduler says of a thread, in seconds since its start; and what the clock said then."""

    clock: float
    ran: float
    ready: float  # able to run, while others did

    @classmethod
    def of(cls, pid: int) -> Books:
        ran, ready, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return cls(time.perf_counter(), int(ran) / 1e9, int(ready) / 1e9)

    def since(self, before: Books) -> Books:
        return Books(*(now - then for now, then in zip(self, before, strict=True)))


def measure(quick: bool, folder: Path) -> Report:
    report = Report("feed", f"steps on batches of {ROWS * WIDTH >> 18} MiB that {RANKS} ranks are fed, or have")
    torch.set_num_threads(1)
    with create_mesh({"dp": RANKS}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        feeding(report, mesh, rounds=2 if quick else 7)
    return report


def feeding(report: Report, mesh: Mesh, rounds: int) -> None:
    engine, pids = engine_of(mesh), list(mesh.execute(os.getpid).values())
    batch = torch.randn(ROWS, WIDTH)
    weights = meshbook.distribute(torch.randn(WIDTH, 1024), mesh)
    here = meshbook.distribute(batch, mesh, sharding_spec=["dp"])
    rows: dict[str, list[float]] = {}

    def steps(batches: Iterable[Any]) -> None:
        losses = [(rows @ weights).sum() + (rows @ weights).sum() + (rows @ weights).sum() for rows in batches]
        engine.wait()
        del losses  # what nobody holds any more may never be computed

    def local() -> None:
        steps(here for _ in range(BATCHES))

    made = 0.0  # seconds of CPU that the source took

    def source() -> Iterator[torch.Tensor]:
        nonlocal made
        for number in range(BATCHES):
            started = time.thread_time()
            made_now = batch + number
            made += time.thread_time() - started
            yield made_now

    def fed() -> None:
        steps(mesh.feed(source()))

    def counted(name: str, act: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            nonlocal made
            made, own, before = 0.0, time.process_time(), [Books.of(pid) for pid in pids]
            act()
            own = time.process_time() - own
            each = 1e3 / BATCHES
            books = [Books.of(pid).since(then) for pid, then in zip(pids, before, strict=True)]
            steps = [each * (book.clock - book.ready) for book in books]
            for what, value in (
                ("", sum(steps) / len(steps)),
                ("busy", 100 * sum(book.ran / (book.clock - book.ready) for book in books) / len(books)),
                ("CPU of a rank", each * sum(book.ran for book in books) / len(books)),
                ("on the clock", each * books[0].clock),
                ("CPU of this process", each * (own - made)),
                ("the source", each * made),
            ):
                rows.setdefault(f"{name}: {what}", []).append(value)
            return 0.0

        return measure

    workbench.take_turns({"local": counted("local", local), "fed": counted("fed", fed)}, rounds, warm_up=2)
    names = {"local": "a step on data that ranks have", "fed": "a step on data that is fed"}
    for what, unit in (
        ("", "ms"), ("busy", "%"), ("CPU of a rank", "ms"), ("CPU of this process", "ms"), ("on the clock", "ms")
    ):  # fmt: skip
        for which, name in names.items():
            row = f"{name}, {what}" if what else name
            against = names["local"] + row.removeprefix(name) if which == "fed" and what != "busy" else None
            report.add(row, rows[f"{which}: {what}"][2:], unit, against=against)
    report.add("... and CPU to make the batch", rows["fed: the source"][2:], "ms")
    report.promise("a step on data that is fed, as on data that ranks have", report.ratio(names["fed"]), LIMIT, "x")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
