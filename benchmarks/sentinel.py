"""What `%mesh nan on` costs: training steps of a GPT on 2 ranks, with the sentinel and without, by turns.

The step is `gpt.plain_step`: plain tensors, AdamW, one all_reduce of all gradients; and the same on remote tensors.
CPU is what the ranks' main threads spent, of remote tensors all threads of the ranks; what is reported is the median of
the pairs' ratios, with the interval in which it lies with 95 % certainty.

    python -m benchmarks.sentinel [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshbook
from benchmarks import gpt, workbench
from benchmarks.probes import median_ratio
from benchmarks.report import Report
from benchmarks.training import loop
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.tensors.creation import engine_of

RANKS = 2
SIZES = ((64, 2, 8, 32), (256, 4, 16, 64))  # width, layers, batch, length
LIMIT = 1.02  # of the larger one
# Of the larger one, through remote tensors: a module on the ranks is watched by its calls, the others by operations.
OP_BY_OP, RECORDED, MODULE = "op by op", "recorded", "distribute(strategy='ddp')"
REMOTE_LIMITS = {OP_BY_OP: 1.12, RECORDED: 1.05, MODULE: 1.05}

SETUP = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks import gpt
from meshbook.rank.differences.hooks import TrainingHooks
from meshbook.rank.differences.sentinel import Sentinel

torch.set_num_threads(1)
groups = dist.group.WORLD._owner
sentinel = Sentinel(
    rank, globals(), groups.ring, groups.observers, lambda: groups.store, TrainingHooks(), print, lambda file: None
)

def block(step, steps, watched):
    "CPU seconds of this thread for so many steps."
    if watched:
        sentinel.arm()
    dist.barrier()
    started = time.thread_time()
    for _ in range(steps):
        step()
    spent = time.thread_time() - started
    sentinel.disarm()
    return spent

def pairs(size, count, steps):
    "Of each pair: CPU seconds without the sentinel, and with it."
    step = gpt.plain_step(rank, world_size, device, *size)
    block(step, 2 * steps, True)
    found = []
    for number in range(count):
        first = bool(number % 2)
        spent = {{watched: block(step, steps, watched) for watched in (first, not first)}}
        found.append((spent[False], spent[True]))
    return found
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("sentinel", f"training steps of a GPT on {RANKS} ranks, with and without %mesh nan on")
    with create_mesh({"dp": RANKS}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run(SETUP.format(root=str(workbench.ROOT)))
        for size in SIZES:
            is_large = size == SIZES[-1]
            count, steps = (3, 1) if quick else (20, 2) if is_large else (30, 10)
            found = list(dict(mesh.run(f"pairs({size}, {count}, {steps})").values).values())
            plain = [
                [1e3 * sum(rank[pair][kind] for rank in found) / steps for pair in range(count)] for kind in (0, 1)
            ]
            add(report, "in a cell", size, plain[0], plain[1], LIMIT)
            for name, step in remote_steps(mesh, size).items():
                without, watched = remote_pairs(mesh, step, min(count, 12), 1 if is_large else steps)
                add(report, name, size, without, watched, REMOTE_LIMITS[name])
    return report


def add(
    report: Report, name: str, size: tuple[int, ...], without: list[float], watched: list[float], limit: float
) -> None:
    """Add the rows of one kind of step; a promise of the larger size."""
    where = f"{name}, width {size[0]}, {size[1]} layers"
    plain = f"a step without it, {where}"
    report.add(plain, without, "ms")
    report.add(f"a step with it, {where}", watched, "ms", against=plain)
    ratio, low, high = median_ratio(watched, without)
    report.note(f"{where}, with it as a multiple of without: {ratio:.4f}, 95 % between {low:.4f} and {high:.4f}")
    if size == SIZES[-1]:
        report.promise(f"CPU of a step with it, {where}, median of {len(without)} pairs", ratio, limit, "x")


def remote_steps(mesh: Mesh, size: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """The same step through remote tensors: operation by operation, recorded, and a module that is on the ranks."""
    width, layers, batch, length = size
    given = gpt.remote_data(mesh, batch, length)

    def stepper(to_ranks: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], Any]:
        return gpt.remote_step(to_ranks, width, layers, length, given)

    one_by_one = stepper(lambda model: meshbook.module_to_mesh(model, mesh))
    on_ranks = stepper(lambda model: meshbook.distribute(model, mesh, strategy="ddp"))
    recorded = meshbook.record(stepper(lambda model: meshbook.module_to_mesh(model, mesh)))
    return {OP_BY_OP: one_by_one, RECORDED: recorded, MODULE: on_ranks}


def remote_pairs(mesh: Mesh, step: Callable[[], Any], count: int, steps: int) -> tuple[list[float], list[float]]:
    """Of each pair: milliseconds of all ranks' CPU for a step without the sentinel, and with it."""
    pids, act = list(mesh.execute(os.getpid).values()), loop(step, steps, engine_of(mesh))

    def block(watched: bool) -> float:
        mesh.nan(watched)
        before = sum(map(workbench.cpu_s, pids))
        act()
        return 1e3 * (sum(map(workbench.cpu_s, pids)) - before) / steps

    block(True)
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(count):
        first = bool(number % 2)
        for watched in (first, not first):
            found[watched].append(block(watched))
    mesh.nan(False)
    return found[False], found[True]


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
