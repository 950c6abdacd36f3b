"""A gigabyte of weights from a trainer to three generators by `Buffer`, against memory copies in the same round.

The yardstick is `memmove` of as many bytes between warm memory of one process. Three generators read in turn, each into
warm memory of its own, with no message but the call that asks it to; the generator's own clock says how long its copy
took. The first read is cold: the generator's mapping has no pages yet. The notebook holds nothing of the gigabyte, and
its memory says so.

    python -m benchmarks.actor_buffers [--quick]
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.actor import Actor, Buffer, endpoint, shutdown_context, this_host

NUM_READERS = 3
LIMIT_SHARE = 0.7  # of memory-copy bandwidth, for each reader in turn
LIMIT_MIB = 64.0  # what the notebook may have grown by: nothing of the weights


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


class Generator(Actor):
    def __init__(self, nbytes: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.weights, self.other = torch.zeros(nbytes // 4), torch.ones(nbytes // 4)

    @endpoint
    def read(self, buffer: Buffer, value: float) -> tuple[float, float]:
        """Milliseconds of the processor's own copy of as many bytes, and of reading them."""
        started = time.perf_counter()
        ctypes.memmove(self.weights.data_ptr(), self.other.data_ptr(), 4 * self.weights.numel())
        copied = time.perf_counter()
        buffer.read_into(self.weights).get()
        read = time.perf_counter()
        if float(self.weights[-1]) != value:
            raise RuntimeError(f"read {float(self.weights[-1])} where the trainer had written {value}")
        return 1e3 * (copied - started), 1e3 * (read - copied)


def measure(quick: bool, folder: Path) -> Report:
    nbytes = 64_000_000 if quick else 1_000_000_000
    report = Report("actor_buffers", f"{nbytes // 1_000_000:,} MB from a trainer to {NUM_READERS} generators")
    host = this_host()
    try:
        trainer = host.spawn_procs({"gpus": 1}).spawn("trainer", Trainer, nbytes)
        generators = host.spawn_procs({"gpus": NUM_READERS}).spawn("generators", Generator, nbytes)
        resident_mib = workbench.rss_mib(os.getpid())
        buffer = trainer.buffer.call_one().get()
        times: list[tuple[float, float]] = []
        for round_ in range(3 if quick else 8):
            trainer.set.call_one(float(round_)).get()
            for reader in range(NUM_READERS):
                times.append(generators.slice(gpus=reader).read.call_one(buffer, float(round_)).get())
        grown_mib = workbench.rss_mib(os.getpid()) - resident_mib
    finally:
        shutdown_context().get()
    report.add("a copy", [copy for copy, _ in times], "ms")
    report.add("the first read", [read for _, read in times[:NUM_READERS]], "ms", against="a copy")
    report.add("a read", [read for _, read in times[NUM_READERS:]], "ms", against="a copy")
    report.promise("a read, in copies", report.ratio("a read"), 1 / LIMIT_SHARE, "x")
    report.promise("growth of the notebook's memory (RSS)", grown_mib, LIMIT_MIB, "MiB")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
