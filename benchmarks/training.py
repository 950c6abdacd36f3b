"""A training step of a small GPT through remote tensors, against the same step as one SPMD cell; modules; data; values.

Every contestant runs the same step on the same ranks, in turns; a row's figure is a step's, of a few that nothing waits
for in between. The hand-written FSDP2 script runs under torchrun by itself, right before ours.

    python -m benchmarks.training [--quick]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import meshbook
from benchmarks import gpt, workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh, create_mesh
from meshbook.tensors.creation import engine_of

SIZES = {"d=64 L=2": (64, 2, 8, 32), "d=256 L=4": (256, 4, 16, 64)}  # width, layers, batch, length
RECORDED_LIMIT, ONE_BY_ONE_LIMIT, FSDP_LIMIT = 1.10, 1.3, 1.10
FULL_BYTES, FULL_LIMIT = 256 << 20, 3.0
# Ranks as busy as with data of their own to 95 %: the loop takes at most so much longer.
FEED_LIMIT = 1 / 0.95
_TORCHRUN_S = 300.0


def measure(quick: bool, folder: Path) -> Report:
    report = Report("training", "a GPT's step through remote tensors, as multiples of the same step in a cell")
    torch.set_num_threads(1)
    for ranks in (2,) if quick else (2, 4):
        for size in list(SIZES)[: 1 if quick else None]:
            with create_mesh({"dp": ranks}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
                steps(report, mesh, size, rounds=2 if quick else 7)
                fsdp(report, mesh, size, rounds=2 if quick else 7)
    with create_mesh({"dp": 2}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        whole(report, mesh, 16 << 20 if quick else FULL_BYTES, rounds=3 if quick else 8)
        feeding(report, mesh, rounds=2 if quick else 6)
    return report


def iterations(size: str) -> int:
    return 10 if size == "d=64 L=2" else 4


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

    def cell(name: str) -> Callable[[], float]:
        return per_step(lambda: mesh.run(f"for _ in range({iters}): {name}()\nNone"), iters)

    def loop(function: Callable[[], Any]) -> Callable[[], float]:
        def run() -> None:
            for _ in range(iters):
                function()
            engine.wait()

        return per_step(run, iters)

    for _ in range(4):
        recorded()
    taken = workbench.take_turns(
        {
            "plain": cell("plain"),
            "recorded": loop(recorded),
            "DTensor": cell("dtensors"),
            "one by one": loop(step),
        },
        rounds,
        warm_up=1,
    )
    plain, dtensors = f"{where}: a cell, plain tensors and one all_reduce", f"{where}: a cell, DTensors"
    report.add(plain, taken["plain"], "ms")
    report.add(f"{where}: recorded", taken["recorded"], "ms", against=plain)
    report.add(dtensors, taken["DTensor"], "ms")
    report.add(f"{where}: op by op", taken["one by one"], "ms", against=dtensors)
    report.promise(f"{where}: a recorded step, as the cell", report.ratio(f"{where}: recorded"), RECORDED_LIMIT, "x")
    report.promise(f"{where}: op by op, as the DTensor cell", report.ratio(f"{where}: op by op"), ONE_BY_ONE_LIMIT, "x")
    started = time.thread_time()
    for _ in range(iters):
        recorded()
    report.add(f"{where}: recorded, this process's CPU", 1e3 * (time.thread_time() - started) / iters, "ms")
    engine.wait()
    report.note(f"{where}: {recorded.stats()}")


def fsdp(report: Report, mesh: Mesh, size: str, rounds: int) -> None:
    """distribute("fsdp") against FSDP2 by hand under torchrun."""
    shape, iters = SIZES[size], iterations(size)
    where = f"{size}, {mesh.size()} ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={mesh.size()}"]
    command += ["-m", "benchmarks.gpt", *map(str, shape), str(rounds), str(iters)]
    done = subprocess.run(command, cwd=workbench.ROOT, capture_output=True, text=True, timeout=_TORCHRUN_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the FSDP2 script failed:\n{done.stderr[-2000:]}")
    by_hand = json.loads(done.stdout.strip().splitlines()[-1])
    width, layers, batch, length = shape
    engine = engine_of(mesh)
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

    def run() -> None:
        for _ in range(iters):
            step()
        engine.wait()

    for _ in range(4):
        step()
    taken = workbench.take_turns({"ours": per_step(run, iters)}, rounds, warm_up=1)["ours"]
    report.add(f"{where}: FSDP2 by hand, torchrun", by_hand, "ms")
    name = f"{where}: distribute(strategy='fsdp'), recorded"
    report.add(name, taken, "ms", against=f"{where}: FSDP2 by hand, torchrun")
    report.promise(f"{where}: fsdp, as by hand under torchrun", report.ratio(name), FSDP_LIMIT, "x")


def whole(report: Report, mesh: Mesh, num_bytes: int, rounds: int) -> None:
    """full_tensor() of a tensor that two ranks hold, in memory copies."""
    there = meshbook.distribute(torch.ones(num_bytes // 4), mesh, sharding_spec=["dp"])
    source, target = np.ones(num_bytes // 8), np.ones(num_bytes // 8)
    there.full_tensor()
    taken = workbench.take_turns(
        {
            "copy": workbench.milliseconds(lambda: np.copyto(target, source)),
            "full": workbench.milliseconds(there.full_tensor),
        },
        rounds,
        warm_up=2,
    )
    mib = num_bytes >> 20
    report.add(f"a copy of {mib} MiB", taken["copy"], "ms")
    name = f"full_tensor() of {mib} MiB from 2 ranks"
    report.add(name, taken["full"], "ms", against=f"a copy of {mib} MiB")
    report.promise(f"{name}, in copies", report.ratio(name), FULL_LIMIT, "x")


def feeding(report: Report, mesh: Mesh, rounds: int) -> None:
    """A loop of steps on data that is fed, against the same steps on data that is there."""
    count = 12
    batch = torch.randn(1024, 2048)  # 8 MiB
    mesh.run("torch.manual_seed(rank); weights = torch.randn(2048, 1024); mine = torch.randn(512, 2048)")
    mesh.push(batch_on_ranks=batch[:512])

    def compute(rows: Any) -> float:
        total = 0.0
        for _ in range(3):
            total += float((rows @ weights).sum())  # type: ignore[name-defined]  # noqa: F821
        return total

    def source() -> Iterator[torch.Tensor]:
        for number in range(count):
            yield batch + number  # somebody makes it

    here = mesh["batch_on_ranks"]

    def local() -> None:
        for _ in range(count):
            mesh.execute(compute, here)

    def fed() -> None:
        for rows in mesh.feed(source(), view="local"):
            mesh.execute(compute, rows)

    taken = workbench.take_turns({"local": per_step(local, count), "fed": per_step(fed, count)}, rounds, warm_up=1)
    report.add("a step on data that ranks have", taken["local"], "ms")
    name = "a step on data that is fed, 8 MiB a batch"
    report.add(name, taken["fed"], "ms", against="a step on data that ranks have")
    report.promise("feeding, as with data that is there", report.ratio(name), FEED_LIMIT, "x")


def per_step(act: Callable[[], Any], count: int) -> Callable[[], float]:
    """A contestant: milliseconds of one of `count` steps."""
    measured = workbench.milliseconds(act)
    return lambda: measured() / count


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
