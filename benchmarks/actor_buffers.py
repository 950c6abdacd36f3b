"""A gigabyte of weights from a trainer to three generators by `Buffer`, against memory copies in the same round.

The yardstick is `memmove` of as many bytes between warm memory of one process. Three generators read in turn, each into
warm memory of its own, with no message but the call that tells it to; the generator's own clock says how long its copy
took. The first read is cold: the generator's mapping has no pages yet. The notebook holds nothing of the gigabyte, and
its memory says so. Making the buffer the first time moves the tensor into shared memory, at the price of fresh pages:
beside it stands how long it takes to write as many fresh pages that nobody shares.

    python -m benchmarks.actor_buffers [--quick]
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.actor import Actor, Buffer, endpoint, shutdown_context, this_host

NUM_READERS = 3
# Of memory-copy bandwidth, for each reader in turn.
LIMIT_SHARE = 0.7
# What the notebook may have grown by: nothing of the weights.
LIMIT_MIB = 64.0


class Trainer(Actor):
    def __init__(self, nbytes: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.weights = torch.ones(nbytes // 4)

    @endpoint
    def buffer(self) -> tuple[Buffer, float]:
        """And how many milliseconds it took."""
        started = time.perf_counter()
        made = Buffer(self.weights)
        return made, 1e3 * (time.perf_counter() - started)

    @endpoint
    def fresh_pages(self) -> float:
        """Milliseconds to copy as many bytes into memory that was never touched."""
        started = time.perf_counter()
        copy = self.weights.clone()
        taken = 1e3 * (time.perf_counter() - started)
        del copy
        return taken

    @endpoint
    def set(self, value: float) -> None:
        self.weights.fill_(value)


class Generator(Actor):
    def __init__(self, nbytes: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.weights = torch.zeros(nbytes // 4)
        self.other = torch.ones(nbytes // 4)

    @endpoint
    def read(self, buffer: Buffer) -> tuple[float, float]:
        """Milliseconds; and what one of the weights is now."""
        started = time.perf_counter()
        buffer.read_into(self.weights).get()
        return 1e3 * (time.perf_counter() - started), float(self.weights[-1])

    @endpoint
    def copy(self) -> float:
        """Milliseconds that the processor's own copy of as many bytes takes."""
        nbytes = 4 * self.weights.numel()
        started = time.perf_counter()
        ctypes.memmove(self.weights.data_ptr(), self.other.data_ptr(), nbytes)
        return 1e3 * (time.perf_counter() - started)


def measure(quick: bool, folder: Path) -> Report:
    nbytes = 64_000_000 if quick else 1_000_000_000
    report = Report("actor_buffers", f"{nbytes // 1_000_000:,} MB from a trainer to {NUM_READERS} generators")
    host = this_host()
    try:
        trainer = host.spawn_procs({"gpus": 1}).spawn("trainer", Trainer, nbytes)
        generators = host.spawn_procs({"gpus": NUM_READERS}).spawn("generators", Generator, nbytes)
        trainer.fresh_pages.call_one().get()  # a virtual machine's memory is slow the first time ever
        resident_mib = workbench.rss_mib(os.getpid())
        report.add("writing fresh pages", trainer.fresh_pages.call_one().get(), "ms")
        buffer, taken = trainer.buffer.call_one().get()
        report.add("making the buffer, first time", taken, "ms", against="writing fresh pages")
        again, taken = trainer.buffer.call_one().get()
        report.add("making a buffer of it again", taken, "ms")
        again.drop()
        times: dict[str, list[float]] = {"a copy": [], "the first read": [], "a read": []}
        for round_ in range(3 if quick else 8):
            trainer.set.call_one(float(round_)).get()
            for reader in range(NUM_READERS):
                generator = generators.slice(gpus=reader)
                times["a copy"].append(generator.copy.call_one().get())
                times["the first read" if round_ == 0 else "a read"].append(_read(generator, buffer, round_))
        grown_mib = workbench.rss_mib(os.getpid()) - resident_mib
    finally:
        shutdown_context().get()
    report.add("a copy", times["a copy"], "ms")
    report.add("the first read", times["the first read"], "ms", against="a copy")
    report.add("a read", times["a read"], "ms", against="a copy")
    report.add("growth of the notebook's memory (RSS)", grown_mib, "MiB")
    report.promise("a read, in copies", report.ratio("a read"), 1 / LIMIT_SHARE, "x")
    report.promise("growth of the notebook's memory", grown_mib, LIMIT_MIB, "MiB")
    return report


def _read(generator: Any, buffer: Buffer, value: float) -> float:
    taken, found = generator.read.call_one(buffer).get()
    if found != value:
        raise RuntimeError(f"read {found} where the trainer had written {value}")
    return float(taken)


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
