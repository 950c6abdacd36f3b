"""What `mesh.resilient` costs without a fault: the same steps in a plain loop and in a resilient one, in turns.

Two ranks, whose model is replicated, cut over the axis, or built there by FSDP2; the first two also with recorded steps
(`@meshbook.record`). A block of 50 steps of the resilient
loop has exactly one snapshot in it, and ends when the ranks have done all of it.

    python -m benchmarks.resilient [--quick]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshbook
from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 2
EVERY = 50
_CUT = {"0.*": [Shard(0)], "2.weight": [Shard(1)], "*": [Replicate()]}


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1536), nn.ReLU(), nn.Linear(1536, 256))


MODELS: dict[str, Callable[[Mesh], nn.Module]] = {
    "replicated": lambda mesh: meshbook.module_to_mesh(_network(), mesh),
    "cut": lambda mesh: meshbook.module_to_mesh(_network(), mesh, _CUT),
    "FSDP2 on the ranks": lambda mesh: meshbook.distribute(_network, mesh, strategy="fsdp"),
}


def measure(quick: bool, folder: Path) -> Report:
    report = Report("resilient", f"{EVERY} steps on {RANKS} ranks, with a snapshot among them and without")
    for name, make in MODELS.items():
        with create_mesh({"dp": RANKS}, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
            for recorded in (False, True) if name in ("replicated", "cut") else (False,):
                _measure_model(mesh, report, name, make(mesh), rounds=2 if quick else 8, recorded=recorded)
    return report


def _measure_model(mesh: Mesh, report: Report, name: str, model: nn.Module, *, rounds: int, recorded: bool) -> None:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows: Any = None if name == "cut" else "dp"
    x = meshbook.distribute(torch.randn(256, 256), mesh, sharding_spec=[rows, None])

    @meshbook.record(enabled=recorded)
    def step() -> None:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    def wait() -> None:
        x.engine.wait()  # type: ignore[attr-defined]

    def timed(act: Callable[[], object]) -> float:
        wait()
        begun = time.perf_counter()
        act()
        wait()
        return 1e3 * (time.perf_counter() - begun)

    with mesh.resilient(model, opt, every=EVERY) as run:
        loop = run.steps(lambda: itertools.repeat(None))

        def block(batches: Any) -> None:
            for _ in range(EVERY):
                next(batches)
                step()

        taken = workbench.take_turns(
            {
                "plain": lambda: timed(lambda: block(itertools.repeat(None))),
                "resilient": lambda: timed(lambda: block(loop)),
                "snapshot": lambda: timed(lambda: run.take(loop)),
            },
            rounds,
            warm_up=1,
        )
    name += ", recorded" if recorded else ""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
    plain = f"{name} ({size:.1f} MiB of parameters), {EVERY} steps, plain"
    report.add(plain, taken["plain"], "ms")
    report.add(f"{name}, resilient", taken["resilient"], "ms", against=plain)
    snapshot = report.add(f"{name}, one snapshot", taken["snapshot"], "ms")
    # A snapshot is small against the noise of the steps: so it is timed alone, not as a difference of two blocks.
    report.promise(f"{name}: a snapshot in {EVERY} steps", 100 * snapshot / report.row(plain).median, 3.0, "%")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
