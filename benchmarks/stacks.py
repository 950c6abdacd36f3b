"""`mesh.stacks()` on 4 ranks: computing in Python, waiting in a collective, keeping the interpreter, stopped.

Ranks that compute or wait answer themselves; those that keep the interpreter lock or are stopped are looked at from
outside, by py-spy, which takes a core for some 30 ms each. From the call until the merged tree is there as text.

    python -m benchmarks.stacks [--quick]
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from benchmarks.stop import wait_until_at_line
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 4
LIMIT_MS = 300.0

BUSY = "n = 0\nwhile True: n += 1"
STUCK = "t = torch.ones(1)\ndist.all_reduce(t) if rank != world_size - 1 else __import__('time').sleep(1000)"
KEEPS = "import ctypes\nctypes.PyDLL(None).sleep({seconds})"


def measure(quick: bool, folder: Path) -> Report:
    report = Report("stacks", f"The stacks of {RANKS} ranks")
    rounds = 3 if quick else 15
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run("import time")
        mesh.stacks()

        def take(source: str) -> Callable[[], float]:
            return workbench.milliseconds(lambda: expect(mesh, source))

        for what, cell in (("computing in Python", BUSY), ("in an all_reduce that one never joins", STUCK)):
            running = mesh.run(cell, wait=False, echo=False)
            wait_until_at_line(mesh, 2)
            add(report, f"ranks {what}", [take("inside")() for _ in range(rounds)])
            running.interrupt()
            running.exception(30)

        pids = [rank.pid for rank in mesh.status().ranks]
        running = mesh.run(BUSY, wait=False, echo=False)
        wait_until_at_line(mesh, 2)
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        try:
            add(report, "ranks that are stopped (SIGSTOP)", [take("outside")() for _ in range(rounds)])
        finally:
            for pid in pids:
                assert pid is not None
                os.kill(pid, signal.SIGCONT)
        running.interrupt()
        running.exception(30)

        seconds = 4 if quick else 12
        keeping = mesh.run(KEEPS.format(seconds=seconds), wait=False, echo=False)
        time.sleep(0.5)  # a rank that keeps the lock cannot say that it has begun to
        add(report, "ranks that keep the interpreter lock", [take("outside")() for _ in range(rounds)])
        keeping.exception(60)
    return report


def add(report: Report, what: str, samples: list[float]) -> None:
    median = report.add(what, samples, "ms")
    report.promise(f"stacks of {RANKS} {what}", median, LIMIT_MS, "ms")


def expect(mesh: Mesh, source: str) -> None:
    """Take the stacks and merge them; complain if a rank was not looked at as it should have been."""
    stacks = mesh.stacks()
    if [snapshot.source for snapshot in stacks.snapshots] != [source] * RANKS:
        seen = [(snapshot.source, snapshot.problem) for snapshot in stacks.snapshots]
        raise RuntimeError(f"the ranks should have been seen from {source}: {seen}")
    if not stacks.text:
        raise RuntimeError("there are no stacks to show")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
