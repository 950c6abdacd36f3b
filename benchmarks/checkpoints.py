"""Checkpoints of 1 GB over four ranks: how long training stands still, and how fast they are written.

The machine's own times are taken in the same rounds: as many processes copy as many bytes in memory, and write and sync
them.

    python -m benchmarks.checkpoints [--quick]
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 4
STALL_LIMIT_S = 0.15
STALL_SHARE = 1.25  # of the time in which the machine copies as much
BANDWIDTH_SHARE = 0.8
PIECES = 16  # tensors of the model on each rank
_PIECE_BYTES = 1 << 24

MODEL = """
from torch.distributed.tensor import distribute_tensor, Shard
mesh_of_all = torch.distributed.init_device_mesh(device.type, (world_size,))
model = torch.nn.ParameterList(
    torch.nn.Parameter(distribute_tensor(torch.randn(world_size * {rows}, 1024), mesh_of_all, [Shard(0)]))
    for _ in range({pieces})
)
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("checkpoints", f"Checkpoints, with {RANKS} ranks")
    rounds = 2 if quick else 6
    piece_bytes = _PIECE_BYTES >> (4 if quick else 0)
    total = RANKS * PIECES * piece_bytes
    stalls, calls, writes, raws, copies, loads = [], [], [], [], [], []
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run(MODEL.format(rows=piece_bytes // 4096, pieces=PIECES))
        save(mesh, folder / "cold")
        shutil.rmtree(folder / "cold")
        for _ in range(rounds):
            raws.append(write_raw(folder / "raw", total // RANKS))
            shutil.rmtree(folder / "raw")
            copies.append(copy_raw(total // RANKS))
            call_s, stall_s, write_s = save(mesh, folder / "run")
            calls.append(call_s)
            stalls.append(stall_s)
            writes.append(write_s)
            began = time.perf_counter()
            mesh.restore(folder / "run")
            loads.append(time.perf_counter() - began)
            shutil.rmtree(folder / "run")
    report.add("the call, until training goes on", calls, "s")
    stall = report.add("the slowest rank's stall", stalls, "s")
    copied = report.add("memory alone: as many bytes by as many processes", copies, "s")
    written = report.add("from there to the commit", writes, "s")
    raw = report.add("the disk alone: as many bytes by as many processes", raws, "s")
    report.add("restored, digests checked", loads, "s")
    report.promise(f"the stall of a save of {total / 1e9:.2f} GB", stall, STALL_LIMIT_S, "s")
    report.promise(f"the stall; the limit is memory's own time by {STALL_SHARE}", stall, copied * STALL_SHARE, "s")
    report.promise(
        f"written; the limit is the disk's own time by {BANDWIDTH_SHARE}", written, raw / BANDWIDTH_SHARE, "s"
    )
    return report


def save(mesh: Mesh, path: Path) -> tuple[float, float, float]:
    """Save once. Seconds of the call, of the slowest rank's stall, and from the call's end to the commit."""
    began = time.perf_counter()
    opened = mesh.checkpoint(path, "model")
    staged = time.perf_counter()
    opened.result(300)
    return staged - began, opened.seconds, time.perf_counter() - staged


def write_raw(folder: Path, num_bytes: int) -> float:
    """Seconds in which RANKS processes write and sync this many bytes each, as large writes."""
    folder.mkdir()
    return _together(_write_file, [(folder / str(number), num_bytes) for number in range(RANKS)])


def copy_raw(num_bytes: int) -> float:
    """Seconds in which RANKS processes copy this many bytes each, into memory that they have used before."""
    return _together(_copy_memory, [(num_bytes,)] * RANKS)


def _together(work: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> float:
    """Seconds of work that processes do at the same time, between two waits at a barrier: the last argument."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(arguments) + 1)
    workers = [context.Process(target=work, args=(*given, barrier)) for given in arguments]
    for worker in workers:
        worker.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return seconds


def _copy_memory(num_bytes: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    barrier.wait()
    target[:] = source
    barrier.wait()


def _write_file(path: Path, num_bytes: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    data = memoryview(bytearray(os.urandom(1 << 20)) * (num_bytes >> 20))
    barrier.wait()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    remaining = data
    while remaining:
        start = num_bytes - len(remaining)
        count = os.write(descriptor, remaining[: 1 << 23])
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)  # the disk begins at once, as in a save
        remaining = remaining[count:]
    os.fsync(descriptor)
    os.close(descriptor)
    barrier.wait()


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
