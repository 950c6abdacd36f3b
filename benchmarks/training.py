"""A training step of a small GPT through remote tensors, against the same step as one SPMD cell; modules.

Every contestant runs the same step on the same ranks, in turns; a row's figure is a step's, of a few that nothing waits
for in between: its time, and the CPU that a rank spent on it, all of its threads together. The promises speak of the
ranks' step, so of their CPU: on a machine with fewer cores than ranks and controller, time is also what others took
away. Time is promised where there are enough.

    python -m benchmarks.training [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshbook
from benchmarks import gpt, workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.tensors.creation import engine_of
from meshbook.tensors.engine import TensorEngine

SIZES = ((64, 2, 8, 32, 10), (256, 4, 16, 64, 4))  # width, layers, batch, length; steps that are timed together

# Contestants, and what Meshbook's are held to: a step in a cell, and how many times its CPU and time they may take.
PLAIN, DTENSORS, BY_HAND = "a cell, plain tensors and one all_reduce", "a cell, DTensors", "FSDP2 by hand, a cell"
RECORDED, ONE_BY_ONE, FSDP = "recorded", "op by op", "distribute(strategy='fsdp'), recorded"
LIMITS = {RECORDED: (PLAIN, 1.10), ONE_BY_ONE: (DTENSORS, 1.3), FSDP: (BY_HAND, 1.10)}


def measure(quick: bool, folder: Path) -> Report:
    report = Report("training", "a GPT's step through remote tensors, as multiples of the same step in a cell")
    torch.set_num_threads(1)
    for ranks in (2,) if quick else (2, 4):
        for size in SIZES[: 1 if quick else None]:
            with create_mesh({"dp": ranks}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
                steps(report, mesh, *size, rounds=2 if quick else 9)
    return report


def steps(
    report: Report, mesh: Mesh, width: int, layers: int, batch: int, length: int, iters: int, rounds: int
) -> None:
    """All contestants with a GPT of one size."""
    engine, pids = engine_of(mesh), list(mesh.execute(os.getpid).values())
    given = gpt.remote_data(mesh, batch, length)

    def stepper(to_ranks: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], Any]:
        return gpt.remote_step(to_ranks, width, layers, length, given)

    one_by_one = stepper(lambda model: meshbook.module_to_mesh(model, mesh))
    recorded = meshbook.record(one_by_one)
    fsdp = meshbook.record(stepper(lambda model: meshbook.distribute(model, mesh, strategy="fsdp")))
    mesh.run(f"""
from benchmarks import gpt
plain = gpt.plain_step(rank, world_size, device, {width}, {layers}, {batch}, {length})
dtensors = gpt.dtensor_step(mesh, {width}, {layers}, {batch}, {length})
by_hand = gpt.fsdp_step(mesh, rank, {width}, {layers}, {batch}, {length})""")

    def cell(name: str) -> Callable[[], Any]:
        return lambda: mesh.run(f"for _ in range({iters}): {name}()\nNone")

    contestants = {
        PLAIN: cell("plain"), RECORDED: loop(recorded, iters, engine), DTENSORS: cell("dtensors"),
        ONE_BY_ONE: loop(one_by_one, iters, engine),
        BY_HAND: cell("by_hand"), FSDP: loop(fsdp, iters, engine),
    }  # fmt: skip
    measured = {name: cost(act, pids, iters) for name, act in contestants.items()}
    where = f"d={width} L={layers}, {len(pids)} ranks"
    for name, samples in workbench.take_turns(measured, rounds, warm_up=2).items():
        taken, rank_cpu, own_cpu = zip(*samples, strict=True)
        base, limit = LIMITS.get(name, (None, 0.0))
        for what, figures in ((name, taken), (f"{name}, CPU of a rank", rank_cpu)):
            against = base and f"{where}: {what.replace(name, base)}"
            report.add(f"{where}: {what}", figures, "ms", against=against)
            if base and (figures is rank_cpu or (os.cpu_count() or 1) > len(pids)):
                report.promise(f"{where}: {what}, against {base}", report.ratio(f"{where}: {what}"), limit, "x")
        if base:
            report.add(f"{where}: {name}, CPU of this process", own_cpu, "ms")
    report.note(f"{where}: {recorded.stats()}")


def loop(step: Callable[[], Any], iters: int, engine: TensorEngine) -> Callable[[], None]:
    """Some steps on remote tensors, which are waited for together. Recorded ones are recorded already."""

    def run() -> None:
        for _ in range(iters):
            step()
        engine.wait()

    for _ in range(4):  # until it is recorded
        step()
    return run


def cost(act: Callable[[], Any], pids: list[int], iters: int) -> Callable[[], tuple[float, float, float]]:
    """A contestant: milliseconds of a step on the clock, of a rank's CPU, and of the CPU of this process."""

    def measure() -> tuple[float, float, float]:
        before, own, started = sum(map(workbench.cpu_s, pids)), time.process_time(), time.perf_counter()
        act()
        taken, own = time.perf_counter() - started, time.process_time() - own
        each = 1e3 / iters
        return each * taken, each * (sum(map(workbench.cpu_s, pids)) - before) / len(pids), each * own

    return measure


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
