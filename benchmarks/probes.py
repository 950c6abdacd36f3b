"""What it costs that ranks always watch themselves: DDP training steps on 4 ranks, with the probes and without.

The same ranks train by turns with everything that is always on (what each collective notes: its line, its shapes, the
crash log; what each beat measures and sends) and with all of it switched off, as MESHBOOK_PROBES=0 starts them. Turns
are blocks of a few steps in one cell, each followed or preceded by one of the other kind. What is reported is the
median of the pairs' ratios, with the interval in which it lies with 95 % certainty. CPU is what the four processes
spent, all threads; wall is the slowest rank's. Where there are fewer cores than ranks, wall says when the system lets
whom run, and only CPU is held to the limit.

    python -m benchmarks.probes [--quick]
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.starting import create_mesh

RANKS = 4
LIMIT, LOG_LIMIT_US = 1.01, 2.0

SETUP = """
import threading, time
import meshbook
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(128, 512)

groups = dist.group.WORLD._owner
service = next(thread for thread in threading.enumerate() if thread.name == "meshbook-service")._target.__self__
noting, probes = list(groups.observers), service._probes
assert noting and probes

def block(steps, watched):
    "CPU and wall seconds of so many steps."
    groups.ring._detailed, groups.observers[:] = watched, noting if watched else []
    service._probes = probes if watched else None
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.item()  # who looks at a loss takes it out of its tensor either way
        if watched:
            meshbook.log(loss=value)
    return time.process_time() - cpu, time.perf_counter() - wall

def pairs(count, steps):
    "Of each pair: CPU and wall without probes, CPU and wall with them."
    found = []
    for number in range(count):
        first = bool(number % 2)
        spent = {watched: block(steps, watched) for watched in (first, not first)}
        found.append((*spent[False], *spent[True]))
    return found

def log_us(times=200):
    "Microseconds of this thread's time for one `meshbook.log`: the least of 30 blocks."
    def once():
        started = time.thread_time()
        for _ in range(times):
            meshbook.log(loss=1.0)
        return (time.thread_time() - started) / times * 1e6
    return min(once() for _ in range(30))

block(20, True)
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("probes", f"DDP training steps on {RANKS} ranks, with and without what ranks measure of themselves")
    steps, count = (3, 8) if quick else (4, 150)
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run(SETUP)
        found = list(dict(mesh.run(f"pairs({count}, {steps})").values).values())
        logged = min(dict(mesh.run("log_us()").values).values())
    kinds: tuple[tuple[str, int, Callable[[list[float]], float]], ...] = (
        ("CPU of all ranks", 0, sum),
        ("wall", 1, max),
    )
    for what, place, together in kinds:
        without, with_them = (
            [1e3 * together([rank[pair][place + kind] for rank in found]) / steps for pair in range(count)]
            for kind in (0, 2)
        )
        plain = f"a step without probes, {what}"
        report.add(plain, without, "ms")
        report.add(f"a step with probes, {what}", with_them, "ms", against=plain)
        ratio, low, high = median_ratio(with_them, without)
        report.note(f"{what}, with probes as a multiple of without: {ratio:.4f}, 95 % between {low:.4f} and {high:.4f}")
        if what != "wall" or (os.cpu_count() or 1) > RANKS:
            report.promise(f"{what} of DDP steps with probes, median of {count} pairs", ratio, LIMIT, "x")
    report.promise("meshbook.log", report.add("meshbook.log", logged, "us"), LOG_LIMIT_US, "us")
    return report


def median_ratio(more: Sequence[float], less: Sequence[float]) -> tuple[float, float, float]:
    """The median of pairs' ratios and the interval in which it lies with 95 % certainty: that of its order statistics,
    which asks nothing of how they are distributed."""
    ratios = sorted(first / second for first, second in zip(more, less, strict=True))
    aside = max(0, math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
    return statistics.median(ratios), ratios[aside], ratios[-1 - aside]


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
