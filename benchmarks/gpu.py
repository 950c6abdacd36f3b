"""What Meshbook costs on GPUs: a watched collective, a training step on remote tensors, values that are read, a feed.

A rank on each GPU of this machine. Times are of work that the device has completed. Nothing here runs on a CPU.

    python -m benchmarks.gpu [--quick]      or, with nothing else: python -m benchmarks --gpu
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import meshbook
from benchmarks import gpt, workbench
from benchmarks.report import Report
from benchmarks.workbench import milliseconds
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.host.gpus import count_gpus

COLLECTIVES = 500  # in a timed block
WIDTH, LAYERS, BATCH, LENGTH, STEPS = 1024, 8, 16, 512, 4  # a GPT, and its steps that are timed together
READ_MIB = 256
FEED_ROWS, FEED_WIDTH, FEED_BATCHES = 4096, 4096, 16  # a batch: 64 MiB

PLAIN, WATCHED = "an all_reduce on the launching thread, plain", "an all_reduce on the launching thread, watched"
IN_CELL, RECORDED, ONE_BY_ONE, FSDP = (
    "a step in a cell",
    "a step, recorded",
    "a step, op by op",
    "a step, FSDP2, recorded",
)
LINK, PULLED = "a copy into pinned memory on the rank", "read by full_tensor"
HAD, FED = "a step on data that ranks have", "a step on data that is fed"


def measure(quick: bool, folder: Path) -> Report:
    num_ranks = count_gpus()
    if not num_ranks:
        raise SystemExit("no NVIDIA GPU is to be seen here")
    report = Report("gpu", f"on {num_ranks} GPUs")
    with create_mesh({"dp": num_ranks}, device="cuda", orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        report.note(str(mesh.run("torch.cuda.get_device_name(), torch.__version__", echo=False).values[0]))
        collectives(report, mesh, rounds=3 if quick else 30)
        steps(report, mesh, rounds=2 if quick else 7)
        reads(report, mesh, rounds=2 if quick else 7)
        feed(report, mesh, rounds=2 if quick else 5)
    return report


def collectives(report: Report, mesh: Mesh, rounds: int) -> None:
    """The overhead of the process group around NCCL's, on the thread that launches."""
    taken = mesh.execute(launch_blocks, rounds)[0]
    report.add(PLAIN, taken[PLAIN], "us")
    report.add(WATCHED, taken[WATCHED], "us", against=PLAIN)
    over = min(taken[WATCHED]) - min(taken[PLAIN])  # by the best blocks of each: others were interrupted
    report.promise("watching a collective, on the launching thread", over, 5.0, "us")


def launch_blocks(rounds: int) -> dict[str, list[float]]:
    """On each rank: microseconds of the clock for one launch, in each block."""
    import torch.distributed as dist

    world = dist.group.WORLD
    x = torch.ones(1024, device="cuda")
    taken: dict[str, list[float]] = {PLAIN: [], WATCHED: []}
    for round_ in range(rounds + 1):
        for kind, group in ((PLAIN, world.inner), (WATCHED, world)):  # type: ignore[union-attr]
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(COLLECTIVES):
                dist.all_reduce(x, group=group)
            spent = time.perf_counter() - started
            if round_:  # the first makes communicators
                taken[kind].append(1e6 * spent / COLLECTIVES)
    return taken


def steps(report: Report, mesh: Mesh, rounds: int) -> None:
    """A GPT's training step; each contestant reads its last loss, so that the device has completed them all."""
    given = gpt.remote_data(mesh, BATCH, LENGTH)

    def stepper(to_ranks: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], Any]:
        return gpt.remote_step(to_ranks, WIDTH, LAYERS, LENGTH, given)

    def loop(step: Callable[[], Any]) -> Callable[[], float]:
        def run() -> None:
            for _ in range(STEPS - 1):
                step()
            step().item()

        for _ in range(4):  # until it is recorded
            step()
        return each(milliseconds(run))

    one_by_one = stepper(lambda model: meshbook.module_to_mesh(model, mesh))
    mesh.run(f"""
from benchmarks import gpt
plain = gpt.plain_step(rank, world_size, device, {WIDTH}, {LAYERS}, {BATCH}, {LENGTH})""")
    contestants = {
        IN_CELL: each(
            milliseconds(lambda: mesh.run(f"for _ in range({STEPS}): loss = plain()\nloss.item()", echo=False))
        ),
        ONE_BY_ONE: loop(one_by_one),
        RECORDED: loop(meshbook.record(one_by_one)),
        FSDP: loop(meshbook.record(stepper(lambda model: meshbook.distribute(model, mesh, strategy="fsdp")))),
    }
    taken = workbench.take_turns(contestants, rounds, warm_up=2)
    report.add(IN_CELL, taken.pop(IN_CELL), "ms")
    for name, samples in taken.items():
        report.add(name, samples, "ms", against=IN_CELL)
        if name != FSDP:
            report.promise(f"{name}, against {IN_CELL}", report.ratio(name), 1.05, "x")


def each(measure: Callable[[], float]) -> Callable[[], float]:
    return lambda: measure() / STEPS


def reads(report: Report, mesh: Mesh, rounds: int) -> None:
    """A tensor on the device that this process reads, against what the link to the device gives."""
    x = meshbook.distribute(torch.randn(READ_MIB << 18), mesh, sharding_spec=[])
    mesh.run(
        f"x = torch.randn({READ_MIB} << 18, device=device)\npinned = torch.empty_like(x, device='cpu', pin_memory=True)"
    )
    copy = "import time\ntorch.cuda.synchronize()\nt = time.perf_counter()\npinned.copy_(x)\ntime.perf_counter() - t"

    def link() -> float:
        return float(READ_MIB / mesh.run(copy, echo=False).values[0])

    def read() -> float:
        started = time.perf_counter()
        x.full_tensor(force=True)
        return READ_MIB / (time.perf_counter() - started)

    taken = workbench.take_turns({LINK: link, PULLED: read}, rounds)
    report.add(LINK, taken[LINK], "MiB/s")
    report.add(PULLED, taken[PULLED], "MiB/s", against=LINK)
    report.promise("the link's rate, in reads", 1 / report.ratio(PULLED), 1 / 0.8, "x")


def feed(report: Report, mesh: Mesh, rounds: int) -> None:
    batch = torch.randn(FEED_ROWS, FEED_WIDTH)
    weights = meshbook.distribute(torch.randn(FEED_WIDTH, FEED_WIDTH), mesh)
    here = meshbook.distribute(batch, mesh, sharding_spec=["dp"])

    def steps_on(batches: Iterable[Any]) -> None:
        total = None
        for rows in batches:
            for _ in range(24):
                rows = rows @ weights
                rows = rows / rows.norm()
            total = rows.sum() if total is None else total + rows.sum()
        assert total is not None
        total.item()

    contestants = {
        HAD: milliseconds(lambda: steps_on(here for _ in range(FEED_BATCHES))),
        FED: milliseconds(lambda: steps_on(mesh.feed(batch for _ in range(FEED_BATCHES)))),
    }
    taken = workbench.take_turns(contestants, rounds, warm_up=1)
    report.add(HAD, [sample / FEED_BATCHES for sample in taken[HAD]], "ms")
    report.add(FED, [sample / FEED_BATCHES for sample in taken[FED]], "ms", against=HAD)
    report.promise("a step on data that is fed, as on data that ranks have", report.ratio(FED), 1 / 0.95, "x")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
