"""What a cell costs with 8, 64 and 256 ranks, and whose time it is: the supervisor's, the controller's.

The ranks are light (no torch) and live in simulated hosts of eight: processes of their own that share this machine. The
cell's whole time grows with the ranks, for two cores have to run them all; what must not is the CPU time of the two
processes that there is one of. So the same 64 ranks are also spread over two hosts, and compared with 16 in two hosts.

With one host the supervisor does the host's work itself; its figures are then those of both.

    python -m benchmarks.scale [--quick]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

# (ranks, hosts)
SIZES = ((8, 1), (16, 2), (64, 2), (64, 8), (256, 32))
QUICK = ((8, 1), (4, 2), (16, 2))
CELLS = {"pass": "pass", "print": "print('step', 17)"}

# Four times the ranks in as many hosts: what is allowed to the supervisor's and to the controller's share of a cell.
LIMIT_X = 1.5


@dataclass(frozen=True)
class Cost:
    """Of one cell, in milliseconds."""

    wall: list[float]
    supervisor: float  # CPU, its own threads
    controller: float  # CPU


def measure(quick: bool, folder: Path) -> Report:
    report = Report("scale", "a cell on light ranks in simulated hosts")
    cells = 10 if quick else 60
    costs: dict[tuple[int, int, str], Cost] = {}
    for ranks, hosts in QUICK if quick else SIZES:
        where = f"{ranks} ranks in {hosts} host{'s' if hosts > 1 else ''}"
        started = time.perf_counter()
        with create_mesh(
            ranks, num_hosts=hosts, torch=False, process_group=False, orphan_ttl_s=workbench.ORPHAN_TTL_S
        ) as mesh:
            report.add(f"{where}: start", time.perf_counter() - started, "s")
            report.add(f"{where}: PSS of everything but this process", memory_mib(mesh), "MiB")
            report.add(f"{where}: supervisor's CPU with nothing to do", idle_ms_per_s(mesh), "ms/s")
            for cell, source in CELLS.items():
                cost = costs[ranks, hosts, cell] = run_cells(mesh, source, cells)
                report.add(f"{where}: `{cell}`", cost.wall, "ms")
                report.add(f"{where}: `{cell}`, supervisor's CPU", cost.supervisor, "ms")
                report.add(f"{where}: `{cell}`, controller's CPU", cost.controller, "ms")
    few, many = ((4, 2), (16, 2)) if quick else ((16, 2), (64, 2))
    for cell in CELLS:
        less, more = costs[*few, cell], costs[*many, cell]
        for who in ("supervisor", "controller"):
            growth = getattr(more, who) / getattr(less, who)
            text = f"`{cell}`, the {who}'s CPU with {many[0]} ranks over that with {few[0]} in as many hosts"
            report.promise(text, growth, LIMIT_X, "x")
    return report


def run_cells(mesh: Mesh, source: str, cells: int) -> Cost:
    for _ in range(3):
        mesh.run(source, echo=False)
    supervisor = mesh.status().supervisor_pid
    wall = []
    supervisor_before, controller_before = workbench.cpu_s(supervisor), time.process_time()
    for _ in range(cells):
        started = time.perf_counter()
        mesh.run(source, echo=False)
        wall.append(1e3 * (time.perf_counter() - started))
    spent = workbench.cpu_s(supervisor) - supervisor_before, time.process_time() - controller_before
    return Cost(wall, *(1e3 * seconds / cells for seconds in spent))


def idle_ms_per_s(mesh: Mesh, seconds: float = 2.0) -> float:
    supervisor = mesh.status().supervisor_pid
    before = workbench.cpu_s(supervisor)
    time.sleep(seconds)
    return 1e3 * (workbench.cpu_s(supervisor) - before) / seconds


def memory_mib(mesh: Mesh) -> float:
    """Supervisor, hosts, fork servers and ranks."""
    supervisor = psutil.Process(mesh.status().supervisor_pid)
    return sum(workbench.pss_mib(process.pid) for process in (supervisor, *supervisor.children(recursive=True)))


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
