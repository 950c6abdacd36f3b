"""What `mesh.elastic` costs without a fault: the same steps in a plain loop and in an elastic one, in turns.

Two ranks, one snapshot in each block of 50 steps. A block of the elastic loop has exactly one snapshot in it.

    python -m benchmarks.elastic [--quick]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 2
EVERY = 50

_COMMON = """
import itertools, time
import torch.nn as nn, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
"""
_MLP = """
network = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 256))
x = torch.randn(64, 256)
"""
_TRANSFORMER = """
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
network = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
x = torch.randn(4, 64, 128)
"""
_DDP = "model = DDP(network)\n"
_FSDP = "model = fully_shard(network, mesh=mesh)\n"
MODELS = {
    "DDP, MLP": _MLP + _DDP,
    "FSDP2, MLP": _MLP + _FSDP,
    "DDP, transformer": _TRANSFORMER + _DDP,
    "FSDP2, transformer": _TRANSFORMER + _FSDP,
}
_MEASURE = f"""
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
def step():
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
for _ in range(10):
    step()
loop = iter(mesh.elastic(itertools.repeat(None), state=("model", "opt"), every={EVERY}))
for _ in range({EVERY}):
    next(loop)
    step()
def timed(act, name):
    dist.barrier()
    begun, spent = time.perf_counter(), time.process_time()
    act()
    taken.setdefault(name, []).append((1e3 * (time.perf_counter() - begun), 1e3 * (time.process_time() - spent)))
def block(batches):
    for _ in range({EVERY}):
        next(batches)
        step()
taken = {{}}
for at in range(ROUNDS):
    for name in ("plain", "elastic")[:: 1 if at % 2 else -1]:
        timed(lambda: block(loop if name == "elastic" else itertools.repeat(None)), name)
    for _ in range(3):
        timed(loop._take_snapshot, "snapshot")
size = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters()) / 2**20
taken, size
"""


def measure(quick: bool, folder: Path) -> Report:
    report = Report("elastic", f"a step of {RANKS} ranks, with a snapshot every {EVERY} steps and without")
    for name, model in MODELS.items():
        with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
            _measure_model(mesh, report, name, model, rounds=1 if quick else 4)
    return report


def _measure_model(mesh: Mesh, report: Report, name: str, model: str, *, rounds: int) -> None:
    mesh.run(_COMMON + model)
    taken, size = mesh.run(f"ROUNDS = {rounds}\n{_MEASURE}", echo=False).values[0]
    for index, what in enumerate(("on the clock", "CPU of a rank")):
        plain = f"{name} ({size:.1f} MiB of parameters), {EVERY} steps, plain: {what}"
        report.add(plain, [one[index] for one in taken["plain"]], "ms")
        report.add(f"{name}, elastic: {what}", [one[index] for one in taken["elastic"]], "ms", against=plain)
        snapshot = report.add(f"{name}, one snapshot: {what}", [one[index] for one in taken["snapshot"]], "ms")
        overhead = 100 * snapshot / report.row(plain).median
        # A snapshot is small against the noise of the steps: so it is timed alone, not as a difference of two blocks.
        report.promise(f"{name}: a snapshot in {EVERY} steps, {what}", overhead, 3.0, "%")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
