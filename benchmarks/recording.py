"""What recorded cells cost: a cell with a training step of a GPT under DDP, recorded and not, in turns.

Each cell reads the model and its optimizer, so a record copies these, and the gradients that DDP sums. One step a cell
is the dearest case, for which nothing is promised: of more steps the first alone copies the model.

    python -m benchmarks.recording [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 2

SETUP = """
from benchmarks.gpt import GPT, adamw, data, train_step
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(GPT(WIDTH, 4, 128))
optimizer = adamw(model)
x, y, places = data(16, 128)
x, y = x.chunk(world_size)[rank], y.reshape(16, 128).chunk(world_size)[rank].reshape(-1)
def steps(number):
    for _ in range(number): train_step(model, optimizer, x, y, places)
steps(3)
sum(p.numel() for p in model.parameters()) * 16 / 2**20
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("recording", f"cells of {RANKS} ranks that train a GPT under DDP, recorded and not")
    os.chdir(folder)
    for width in (128,) if quick else (128, 256):
        with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
            size = mesh.run(f"WIDTH = {width}\n{SETUP}", echo=False).values[0]
            for number in (1, 10):
                _measure_cells(mesh, report, f"{number} steps a cell, width {width}", number, rounds=3 if quick else 10)
            mesh.record()
            mesh.run("steps(1)", echo=False)
            saved = mesh.save_record()
            written = max(saved.num_bytes.values()) / 2**20
            report.add(f"model, gradients and optimizer, width {width}", [size], "MiB")
            report.add(f"a bundle of one step, width {width}", [written], "MiB")
            report.promise(f"a bundle, width {width}, of what the cell reads", written / size, 1.5, "x")
    return report


def _measure_cells(mesh: Mesh, report: Report, name: str, number: int, *, rounds: int) -> None:
    pids = [rank.pid for rank in mesh.status().ranks]

    def cell(recorded: bool) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            mesh.record(recorded)
            before, started = sum(map(workbench.cpu_s, pids)), time.perf_counter()
            mesh.run(f"steps({number})", echo=False)
            return 1e3 * (time.perf_counter() - started), 1e3 * (sum(map(workbench.cpu_s, pids)) - before) / RANKS

        return run

    taken = workbench.take_turns({"plain": cell(False), "recorded": cell(True)}, rounds, warm_up=1)
    mesh.record(False)
    for index, what in enumerate(("on the clock", "CPU of a rank")):
        plain = report.add(f"{name}: {what}", [one[index] for one in taken["plain"]], "ms")
        recorded = report.add(
            f"{name}, recorded: {what}", [one[index] for one in taken["recorded"]], "ms", against=f"{name}: {what}"
        )
        if number > 1:
            report.promise(f"{name}: a record, {what}", max(0.0, 100 * (recorded / plain - 1)), 5.0, "%")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
