"""Bulk data between processes of one machine, in memory copies of as many bytes that are made in the same rounds.

A mesh as a notebook uses it: 64 MB to all of four ranks, and back from one. The first round is cold: fresh pages on
both sides. In the second, memory is used again for the first time, and gets huge pages; warm are those after it. A
value that was pushed is mapped and not yet read, so the time until every rank has summed it is a row of its own.

Actors: a gigabyte of weights from a trainer to three generators by `Buffer`. They read in turn, each into warm memory
of its own, with no message but the call that asks it to, and time it by their own clocks. A generator's first read is
cold: its mapping has no pages yet. The notebook's process holds nothing of the gigabyte, and its memory says so.

    python -m benchmarks.bulk [--quick]
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workbench
from benchmarks.report import Report
from benchmarks.workbench import milliseconds
from meshbook.actor import Actor, Buffer, endpoint, shutdown_context, this_host
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS, NUM_BYTES, LIMIT_COPIES = 4, 64_000_000, 3.0
READERS, BUFFER_BYTES, LIMIT_SHARE = 3, 1_000_000_000, 0.7  # of memory-copy bandwidth, for each reader in turn
# What the controller may have grown by in the end: a quarter of one value; and nothing of the weights.
MESH_MIB, BUFFER_MIB = 16.0, 64.0

COPY, OWN_COPY = "a copy", "a generator's own copy"


def measure(quick: bool, folder: Path) -> Report:
    report = Report("bulk", f"{NUM_BYTES // 1_000_000} MB to {RANKS} ranks and back; a Buffer to {READERS} generators")
    mesh_values(report, 4 if quick else 20)
    buffers(report, 3 if quick else 8, BUFFER_BYTES // (16 if quick else 1))
    return report


def mesh_values(report: Report, rounds: int) -> None:
    source, target = np.ones(NUM_BYTES // 8), np.ones(NUM_BYTES // 8)
    # A virtual machine's memory is slow to touch for the first time ever, and cold is to mean fresh pages, not that.
    np.ones(NUM_BYTES)
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run("import numpy as np")
        mesh.push(small=1)
        values = {"numpy": source, "torch": as_tensor(source)}
        contestants = {COPY: milliseconds(lambda: np.copyto(target, source))}
        for kind, value in values.items():
            contestants |= steps(mesh, kind, value)
        resident_mib = workbench.rss_mib(os.getpid())
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, act in contestants.items():
                taken[name].append(act())
        grown_mib = workbench.rss_mib(os.getpid()) - resident_mib
    report.add(COPY, taken.pop(COPY), "ms")
    for step, (cold, second, *warm) in taken.items():
        report.add(f"{step}, cold", cold, "ms", against=COPY)
        report.add(f"{step}, second", second, "ms", against=COPY)
        report.add(f"{step}, warm", warm, "ms", against=COPY)
    for kind in values:
        for what, step in (("to all ranks", f"{kind}: push"), ("back from one", f"{kind}: pull")):
            report.promise(f"{kind}, {what}, warm, in copies", report.ratio(f"{step}, warm"), LIMIT_COPIES, "x")
    report.promise("growth of the controller's memory (RSS), first round to last", grown_mib, MESH_MIB, "MiB")


def steps(mesh: Mesh, kind: str, value: Any) -> dict[str, Callable[[], float]]:
    """One round of a value, step by step; each gives its milliseconds."""
    back: list[Any] = []

    def pull() -> float:
        mesh.run("y = x + rank")  # what is pulled is the rank's own, and new
        return milliseconds(lambda: back.append(mesh.pull("y", ranks=1)[1]))()

    def check() -> None:
        total = float(back.pop().sum())
        if total != 2 * value.shape[0]:
            raise RuntimeError(f"{kind}: {total} came back for {2 * value.shape[0]}")

    return {
        f"{kind}: push": milliseconds(lambda: mesh.push(x=value)),
        f"{kind}: every rank sums it": milliseconds(lambda: mesh.run("total = float(x.sum())")),
        f"{kind}: pull": pull,
        f"{kind}: pulled, summing it": milliseconds(check),
    }


def as_tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    torch.set_num_threads(1)
    return torch.from_numpy(array.copy())


# ---------------------------------------------------------------------------------------------------------------------
# Actors


class Trainer(Actor):
    def __init__(self, nbytes: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.weights = torch.ones(nbytes // 4)

    @endpoint
    def buffer(self) -> Buffer:
        return Buffer(self.weights)

    @endpoint
    def set(self, value: float) -> None:
        self.weights.fill_(value)


class Generator(Trainer):
    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.other = self.weights.clone()

    @endpoint
    def read(self, buffer: Buffer, value: float) -> tuple[float, float]:
        """Milliseconds of the processor's own copy of as many bytes, and of reading them."""
        size = self.weights.nbytes
        copied = milliseconds(lambda: ctypes.memmove(self.weights.data_ptr(), self.other.data_ptr(), size))()
        read = milliseconds(lambda: buffer.read_into(self.weights).get())()
        if float(self.weights[-1]) != value:
            raise RuntimeError(f"read {float(self.weights[-1])} where the trainer had written {value}")
        return copied, read


def buffers(report: Report, rounds: int, nbytes: int) -> None:
    host = this_host()
    try:
        trainer = host.spawn_procs({"gpus": 1}).spawn("trainer", Trainer, nbytes)
        generators = host.spawn_procs({"gpus": READERS}).spawn("generators", Generator, nbytes)
        resident_mib = workbench.rss_mib(os.getpid())
        buffer = trainer.buffer.call_one().get()
        times: list[tuple[float, float]] = []
        for round_ in range(rounds):
            trainer.set.call_one(float(round_)).get()
            for reader in range(READERS):
                times.append(generators.slice(gpus=reader).read.call_one(buffer, float(round_)).get())
        grown_mib = workbench.rss_mib(os.getpid()) - resident_mib
    finally:
        shutdown_context().get()
    copies, reads = zip(*times, strict=True)
    report.add(OWN_COPY, copies, "ms")
    report.add("the first read of a Buffer", reads[:READERS], "ms", against=OWN_COPY)
    report.add("a read of a Buffer", reads[READERS:], "ms", against=OWN_COPY)
    report.promise("a read of a Buffer, in copies", report.ratio("a read of a Buffer"), 1 / LIMIT_SHARE, "x")
    report.promise("growth of the notebook's memory (RSS) by a Buffer", grown_mib, BUFFER_MIB, "MiB")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
