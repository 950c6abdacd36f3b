"""64 MB to all of four ranks, and back from one, through a mesh as a notebook uses it: in copies of 64 MB.

The yardstick is a copy into warm memory (np.copyto), made in every round. The first round is cold: fresh pages on both
sides. In the second, memory is used again for the first time, and gets huge pages; warm are those after it. A value
that was pushed is mapped and not yet read, so the time until every rank has also summed all of it is a row of its own.

    python -m benchmarks.bulk [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

RANKS = 4
NUM_BYTES = 64_000_000
LIMIT_COPIES = 3.0
# What the controller may have grown by in the end: a quarter of one value.
LIMIT_MIB = 16.0


def measure(quick: bool, folder: Path) -> Report:
    report = Report("bulk", f"{NUM_BYTES // 1_000_000} MB to {RANKS} ranks, and back from one")
    source, target = np.ones(NUM_BYTES // 8), np.ones(NUM_BYTES // 8)
    # A virtual machine's memory is slow to touch for the first time ever, and cold is to mean fresh pages, not that.
    np.ones(NUM_BYTES)
    steps: dict[str, list[float]] = {}

    def take(step: str, act: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = act()
        steps.setdefault(step, []).append(1e3 * (time.perf_counter() - started))
        return result

    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        mesh.run("import numpy as np")
        mesh.push(small=1)
        values = {"numpy": source, "torch": as_tensor(source)}
        resident_mib = workbench.rss_mib(os.getpid())
        for _ in range(4 if quick else 20):
            take("copy", lambda: np.copyto(target, source))
            for kind, value in values.items():
                one_round(mesh, kind, value, take)
        grown_mib = workbench.rss_mib(os.getpid()) - resident_mib

    report.add("a copy", steps.pop("copy"), "ms")
    for step, (cold, second, *warm) in steps.items():
        report.add(f"{step}, cold", cold, "ms", against="a copy")
        report.add(f"{step}, second", second, "ms", against="a copy")
        report.add(f"{step}, warm", warm, "ms", against="a copy")
    report.add("growth of the controller's memory (RSS), first round to last", grown_mib, "MiB")
    for kind in values:
        for what, step in (("to all ranks", f"{kind}: push"), ("back from one", f"{kind}: pull")):
            report.promise(f"{kind}, {what}, warm, in copies", report.ratio(f"{step}, warm"), LIMIT_COPIES, "x")
    report.promise("the controller's memory afterwards, over that before", grown_mib, LIMIT_MIB, "MiB")
    return report


def one_round(mesh: Mesh, kind: str, value: Any, take: Callable[[str, Callable[[], Any]], Any]) -> None:
    take(f"{kind}: push", lambda: mesh.push(x=value))
    take(f"{kind}: every rank sums it", lambda: mesh.run("total = float(x.sum())"))
    mesh.run("y = x + rank")  # what is pulled is the rank's own, and new
    back = take(f"{kind}: pull", lambda: mesh.pull("y", ranks=1)[1])
    total = take(f"{kind}: pulled, summing it", lambda: float(back.sum()))
    if total != 2 * value.shape[0]:
        raise RuntimeError(f"{kind}: {total} came back for {2 * value.shape[0]}")


def as_tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    torch.set_num_threads(1)
    return torch.from_numpy(array.copy())


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
