"""`mesh.stacks()` on 4 ranks: computing in Python, waiting in a collective, keeping the interpreter, stopped.

Ranks that compute or wait answer themselves; those that keep the interpreter lock or are stopped are looked at from
outside, by py-spy, which takes a core for some 30 ms each. From the call until the merged tree is there as text.

    python -m benchmarks.stacks [--quick]
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from benchmarks.stop import CELLS, wait_until_at_line
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 4
LIMIT_MS = 300.0
BUSY, STUCK = "a loop in Python", "an all_reduce that one rank never joins"
KEEPS = "import ctypes\nctypes.PyDLL(None).sleep({seconds})"


def measure(quick: bool, folder: Path) -> Report:
    report = Report("stacks", f"The stacks of {RANKS} ranks")
    rounds = 3 if quick else 15

    def take(what: str, source: str) -> None:
        median = report.add(what, [workbench.milliseconds(lambda: expect(mesh, source))() for _ in range(rounds)], "ms")
        report.promise(f"stacks of {RANKS} {what}", median, LIMIT_MS, "ms")

    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.stacks()
        with running(mesh, CELLS[BUSY]):
            take("ranks computing in Python", "inside")
        with running(mesh, CELLS[STUCK]):
            take("ranks in an all_reduce that one never joins", "inside")
        pids = [rank.pid for rank in mesh.status().ranks if rank.pid is not None]
        with running(mesh, CELLS[BUSY]):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                take("ranks that are stopped (SIGSTOP)", "outside")
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        keeping = mesh.run(KEEPS.format(seconds=4 if quick else 12), wait=False, echo=False)
        time.sleep(0.5)  # a rank that keeps the lock cannot say that it has begun to
        take("ranks that keep the interpreter lock", "outside")
        keeping.exception(60)
    return report


@contextlib.contextmanager
def running(mesh: Mesh, source: str) -> Iterator[None]:
    """A cell that is at its second line on all ranks, until it is stopped at the end."""
    future = mesh.run(source, wait=False, echo=False)
    wait_until_at_line(mesh, 2)
    try:
        yield
    finally:
        future.interrupt()
        future.exception(30)


def expect(mesh: Mesh, source: str) -> None:
    """Take the stacks and merge them; complain if a rank was not looked at as it should have been."""
    stacks = mesh.stacks()
    if not stacks.text or [snapshot.source for snapshot in stacks.snapshots] != [source] * RANKS:
        seen = [(snapshot.source, snapshot.problem) for snapshot in stacks.snapshots]
        raise RuntimeError(f"the ranks should have been seen from {source}: {seen}")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
