"""What a cell costs with 8 to 1,024 ranks, and whose time it is: the supervisor's, the controller's.

The ranks are light (no torch) and live in simulated hosts of eight: processes of their own that share this machine. The
cell's whole time grows with the ranks, for two cores have to run them all; what must not is the CPU time of the two
processes that there is one of. So the same 64 ranks are also spread over two hosts, and compared with 16 in two hosts.
With one host the supervisor does the host's work itself; its figures are then those of both.

For 1,024 ranks there is no room: there the ranks are made up, on up to 128 hosts of eight that are as if reached by ssh
(`simulated_hosts`). What the supervisor uses without any cell is what heartbeats take, and is not counted to the cells.

    python -m benchmarks.scale [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from benchmarks.simulated_hosts import create_simulated_mesh
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh

# (ranks, hosts); and of these, those that are compared.
SIZES, FEW, MANY = ((8, 1), (16, 2), (64, 2), (64, 8), (256, 32)), (16, 2), (64, 2)
QUICK, QUICK_FEW, QUICK_MANY = ((4, 2), (16, 2)), (4, 2), (16, 2)
CELLS = {"pass": "pass", "print": "print('step', 17)"}

# Hosts of eight ranks that are made up; the last are those of the promises.
RANKS_PER_HOST = 8
SIMULATED_HOSTS, QUICK_SIMULATED_HOSTS = (16, 32, 128), (2, 4)
# Milliseconds of the supervisor per `pass` on 1,024 ranks, and percent of a core for their heartbeats.
LIMIT_MS, LIMIT_PERCENT = 10.0, 5.0

# Four times the ranks in as many hosts: what is allowed to the supervisor's and to the controller's share of a cell.
LIMIT_X = 1.5


def measure(quick: bool, folder: Path) -> Report:
    report = Report("scale", "a cell on light ranks in simulated hosts")
    options = {"torch": False, "process_group": False, "orphan_ttl_s": workbench.ORPHAN_TTL_S}
    for ranks, hosts in QUICK if quick else SIZES:
        where = f"{ranks} ranks in {hosts} host(s)"
        started = time.perf_counter()
        with create_mesh(ranks, num_hosts=hosts, **options) as mesh:
            report.add(f"{where}: start", time.perf_counter() - started, "s")
            memory_mib = workbench.mesh_pss_mib(mesh.status().supervisor_pid)
            report.add(f"{where}: PSS of everything but this process", memory_mib, "MiB")
            for cell, source in CELLS.items():
                run_cells(report, f"{where}: `{cell}`", mesh, source, 10 if quick else 60)
    few, many = (QUICK_FEW, QUICK_MANY) if quick else (FEW, MANY)
    for cell in CELLS:
        for who in ("supervisor", "controller"):
            less, more = (
                report.row(f"{ranks} ranks in {hosts} host(s): `{cell}`, {who}'s CPU").median
                for ranks, hosts in (few, many)
            )
            text = f"`{cell}`, the {who}'s CPU with {many[0]} ranks over that with {few[0]} in as many hosts"
            report.promise(text, more / less, LIMIT_X, "x")
    for hosts in QUICK_SIMULATED_HOSTS if quick else SIMULATED_HOSTS:
        with create_simulated_mesh(f"scale{hosts}", hosts, RANKS_PER_HOST) as mesh:
            cell_ms, idle = measure_supervisor(report, mesh, hosts, quick=quick)
    size = f"{hosts * RANKS_PER_HOST:,} ranks on {hosts} simulated hosts"
    report.promise(f"`pass` on {size}, the supervisor's CPU", cell_ms, LIMIT_MS, "ms")
    report.promise(f"heartbeats of {size}, of a core of the supervisor", idle, LIMIT_PERCENT, "%")
    return report


def measure_supervisor(report: Report, mesh: Mesh, hosts: int, *, quick: bool) -> tuple[float, float]:
    """Add rows of what the supervisor of a mesh with simulated hosts uses.

    Returns:
        Milliseconds per `pass` beside the heartbeats, and percent of a core for heartbeats while no cell runs.
    """
    pid, seconds, cells = mesh.status().supervisor_pid, (1.0 if quick else 5.0), (5 if quick else 100)

    def used_s(act: Callable[[], object]) -> tuple[float, float]:
        """Return the CPU seconds of the supervisor, and those that passed."""
        before, began_at = workbench.cpu_s(pid), time.perf_counter()
        act()
        return workbench.cpu_s(pid) - before, time.perf_counter() - began_at

    def percent(act: Callable[[], object]) -> float:
        cpu_s, passed_s = used_s(act)
        return 100 * cpu_s / passed_s

    def run_all() -> None:
        for _ in range(cells):
            mesh.run("pass", echo=False)

    run_all()
    where = f"{hosts * RANKS_PER_HOST:,} ranks on {hosts} simulated hosts"
    idle = report.add(f"{where}: heartbeats, supervisor's CPU", percent(lambda: time.sleep(seconds)), "% of a core")
    sleeping = lambda: mesh.run(f"time.sleep({seconds})", echo=False)  # noqa: E731
    report.add(f"{where}: heartbeats in a cell, supervisor's CPU", percent(sleeping), "% of a core")
    cpu_s, passed_s = used_s(run_all)
    cell_ms = 1e3 * (cpu_s - idle / 100 * passed_s) / cells
    return report.add(f"{where}: `pass`, supervisor's CPU", cell_ms, "ms"), idle


def run_cells(report: Report, what: str, mesh: Mesh, source: str, cells: int) -> None:
    for _ in range(3):
        mesh.run(source, echo=False)
    supervisor = mesh.status().supervisor_pid
    before, own = workbench.cpu_s(supervisor), time.process_time()
    taken = [workbench.milliseconds(lambda: mesh.run(source, echo=False))() for _ in range(cells)]
    report.add(what, taken, "ms")
    report.add(f"{what}, supervisor's CPU", 1e3 * (workbench.cpu_s(supervisor) - before) / cells, "ms")
    report.add(f"{what}, controller's CPU", 1e3 * (time.process_time() - own) / cells, "ms")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
