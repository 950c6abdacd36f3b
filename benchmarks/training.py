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

SIZES = {"d=64 L=2": (64, 2, 8, 32), "d=256 L=4": (256, 4, 16, 64)}  # width, layers, batch, length
RECORDED_LIMIT, ONE_BY_ONE_LIMIT, FSDP_LIMIT = 1.10, 1.3, 1.10


def measure(quick: bool, folder: Path) -> Report:
    report = Report("training", "a GPT's step through remote tensors, as multiples of the same step in a cell")
    torch.set_num_threads(1)
    for ranks in (2,) if quick else (2, 4):
        for size in list(SIZES)[: 1 if quick else None]:
            with create_mesh({"dp": ranks}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
                steps(report, mesh, size, rounds=2 if quick else 7)
                fsdp(report, mesh, size, rounds=2 if quick else 9)
    return report


def iterations(size: str) -> int:
    return 10 if size == "d=64 L=2" else 4


class Turns:
    """Contestants on a mesh: what a step of each takes, and what of it is CPU of a rank, and of this process."""

    def __init__(self, mesh: Mesh, iters: int) -> None:
        self._iters, self._pids = iters, list(mesh.execute(os.getpid).values())
        self.enough_cores = (os.cpu_count() or 1) > mesh.size()
        self.taken: dict[str, list[float]] = {}
        self.rank_cpu: dict[str, list[float]] = {}
        self.own_cpu: dict[str, list[float]] = {}

    def run(self, contestants: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> None:
        """May be called again, for more rounds."""
        measured = {name: self._measured(name, act) for name, act in contestants.items()}
        for name, taken in workbench.take_turns(measured, rounds, warm_up=warm_up).items():
            self.taken.setdefault(name, []).extend(taken)
            for kept in (self.rank_cpu, self.own_cpu):
                del kept[name][len(self.taken[name]) - rounds : -rounds]  # those of the warm-up

    def _measured(self, name: str, act: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            each = 1e3 / self._iters
            before, own, started = sum(map(workbench.cpu_s, self._pids)), time.process_time(), time.perf_counter()
            act()
            taken = time.perf_counter() - started
            self.own_cpu.setdefault(name, []).append(each * (time.process_time() - own))
            spent = sum(map(workbench.cpu_s, self._pids)) - before
            self.rank_cpu.setdefault(name, []).append(each * spent / len(self._pids))
            return each * taken

        return measure

    def add(self, report: Report, where: str, name: str, against: str | None = None) -> None:
        beside = None if against is None else f"{where}: {against}"
        report.add(f"{where}: {name}", self.taken[name], "ms", against=beside)
        report.add(
            f"{where}: {name}, CPU of a rank", self.rank_cpu[name], "ms", against=beside and f"{beside}, CPU of a rank"
        )

    def promise(self, report: Report, where: str, name: str, text: str, limit: float) -> None:
        report.promise(f"{where}: {text}, CPU of a rank", report.ratio(f"{where}: {name}, CPU of a rank"), limit, "x")
        if self.enough_cores:
            report.promise(f"{where}: {text}", report.ratio(f"{where}: {name}"), limit, "x")


def steps(report: Report, mesh: Mesh, size: str, rounds: int) -> None:
    """Recorded and op by op, against cells on plain tensors and on DTensors."""
    width, layers, batch, length = SIZES[size]
    iters, engine, where = iterations(size), engine_of(mesh), f"{size}, {mesh.size()} ranks"
    torch.manual_seed(0)
    model = meshbook.module_to_mesh(gpt.GPT(width, layers, length), mesh)
    optimizer = gpt.adamw(model)
    x, y, places = (
        meshbook.distribute(tensor, mesh, sharding_spec=spec)
        for tensor, spec in zip(gpt.data(batch, length), (["dp"], ["dp"], []), strict=True)
    )

    def step() -> Any:
        return gpt.train_step(model, optimizer, x, y, places)

    recorded = meshbook.record(step)
    mesh.run("from benchmarks import gpt")
    mesh.run(f"plain = gpt.plain_step(rank, world_size, device, {width}, {layers}, {batch}, {length})")
    mesh.run(f"dtensors = gpt.dtensor_step(mesh, {width}, {layers}, {batch}, {length})")
    for _ in range(4):
        recorded()
    turns = Turns(mesh, iters)
    plain, dtensors = "a cell, plain tensors and one all_reduce", "a cell, DTensors"
    turns.run(
        {
            plain: cell(mesh, "plain", iters),
            "recorded": loop(engine, recorded, iters),
            dtensors: cell(mesh, "dtensors", iters),
            "op by op": loop(engine, step, iters),
        },
        rounds,
        warm_up=2,
    )
    turns.add(report, where, plain)
    turns.add(report, where, "recorded", plain)
    turns.add(report, where, dtensors)
    turns.add(report, where, "op by op", dtensors)
    turns.promise(report, where, "recorded", "a recorded step, as the cell", RECORDED_LIMIT)
    turns.promise(report, where, "op by op", "op by op, as the DTensor cell", ONE_BY_ONE_LIMIT)
    for name in ("recorded", "op by op"):
        report.add(f"{where}: {name}, CPU of this process", turns.own_cpu[name], "ms")
    report.note(f"{where}: {recorded.stats()}")


def fsdp(report: Report, mesh: Mesh, size: str, rounds: int) -> None:
    """distribute("fsdp") against FSDP2 by hand, as a cell."""
    (width, layers, batch, length), iters = SIZES[size], iterations(size)
    where, engine = f"{size}, {mesh.size()} ranks", engine_of(mesh)
    torch.manual_seed(0)
    model = meshbook.distribute(gpt.GPT(width, layers, length), mesh, strategy="fsdp")
    optimizer = gpt.adamw(model)
    x, y, places = (
        meshbook.distribute(tensor, mesh, sharding_spec=spec)
        for tensor, spec in zip(gpt.data(batch, length), (["dp"], ["dp"], []), strict=True)
    )

    @meshbook.record
    def step() -> Any:
        return gpt.train_step(model, optimizer, x, y, places)

    mesh.run("from benchmarks import gpt")
    mesh.run(f"by_hand = gpt.fsdp_step(mesh, rank, {width}, {layers}, {batch}, {length})")
    for _ in range(4):
        step()
    turns = Turns(mesh, iters)
    name, by_hand = "distribute(strategy='fsdp'), recorded", "FSDP2 by hand, a cell"
    turns.run({by_hand: cell(mesh, "by_hand", iters), name: loop(engine, step, iters)}, rounds)
    turns.add(report, where, by_hand)
    turns.add(report, where, name, by_hand)
    turns.promise(report, where, name, "fsdp, as by hand", FSDP_LIMIT)
    report.add(f"{where}: {name}, CPU of this process", turns.own_cpu[name], "ms")


def cell(mesh: Mesh, name: str, iters: int) -> Callable[[], Any]:
    return lambda: mesh.run(f"for _ in range({iters}): {name}()\nNone")


def loop(engine: Any, function: Callable[[], Any], iters: int) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(iters):
            function()
        engine.wait()

    return run


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
