"""What watching a collective costs: a tiny all_reduce through Meshbook's process group, and through the plain one.

Two ranks of a mesh, blocks of both kinds by turns over the same connections. The processor time is the main thread's:
what a training loop cannot have.

    python -m benchmarks.groups [--quick]
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.starting import create_mesh

RANKS = 2
BLOCK = 200  # collectives per timed block: long enough that reading clocks is nothing, short enough to find quiet ones
PLAIN, WATCHED = "plain", "watched"


def blocks(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """On each rank: microseconds of the main thread's CPU and of the clock for one collective, in each block."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    x = torch.ones(10)

    def synchronous(group: object) -> None:
        dist.all_reduce(x, group=group)  # type: ignore[arg-type]

    def asynchronous(group: object) -> None:
        dist.all_reduce(x, group=group, async_op=True).wait()  # type: ignore[arg-type,union-attr]

    taken: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, call in (("all_reduce", synchronous), ("all_reduce(async_op=True).wait()", asynchronous)):
            for kind, group in ((PLAIN, world.inner), (WATCHED, world)):  # type: ignore[union-attr]
                dist.barrier()
                cpu, wall = time.thread_time(), time.perf_counter()
                for _ in range(BLOCK):
                    call(group)
                spent = time.thread_time() - cpu, time.perf_counter() - wall
                taken.setdefault(f"{name}, {kind}", []).append((1e6 * spent[0] / BLOCK, 1e6 * spent[1] / BLOCK))
    return taken


def measure(quick: bool, folder: Path) -> Report:
    report = Report("groups", f"one tiny collective of {RANKS} ranks")
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        taken = mesh.execute(blocks, 5 if quick else 60)[0]
    for name, samples in taken.items():
        against = name.replace(WATCHED, PLAIN) if WATCHED in name else None
        for index, what in enumerate(("CPU of the main thread", "on the clock")):
            base = None if against is None else f"{against}: {what}"
            report.add(f"{name}: {what}", [sample[index] for sample in samples], "us", against=base)
    for name in taken:
        if WATCHED in name:
            row, plain = (
                report.row(f"{kind}: CPU of the main thread") for kind in (name, name.replace(WATCHED, PLAIN))
            )
            report.note(f"{name}: {min(row.samples) - min(plain.samples):+.1f} us of CPU, by the best blocks of each")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
