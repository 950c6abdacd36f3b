"""Four ranks from nothing, from a warm fork server, as fresh interpreters: seconds until they are ready, and memory.

Ready means that torch is imported, the process group is up and a cell has run. "From nothing" begins where a program
calls `create_mesh`. Memory is PSS, which counts a page that n
processes share as an n-th in each, of ranks that have run one cell and wait.

    python -m benchmarks.startup [--quick]
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.launch import launch_supervisor
from meshbook.controller.mesh import Mesh
from meshbook.controller.session import Session
from meshbook.controller.starting import create_mesh, generate_mesh_name, make_spec
from meshbook.mesh_axes import MeshAxes

RANKS = 4
FROM_NOTHING_S, WARM_S, PSS_MIB = 3.0, 0.5, 60.0

READY = "assert dist.get_world_size() == world_size"
_WARM_UP_TIMEOUT_S = 60.0
# Seconds without work after which a fork server has nothing left to import; CPU seconds that its imports take at least.
_STILL_S, _IMPORTS_S = 0.3, 0.3


def measure(quick: bool, folder: Path) -> Report:
    report = Report("startup", f"nothing to {RANKS} ready ranks")
    memory: dict[str, list[float]] = {"forked": [], "fresh": [], "helpers": []}

    def starting(start_method: str, ranks_mib: list[float], helpers_mib: list[float]) -> Callable[[], float]:
        def start() -> float:
            started = time.perf_counter()
            with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S, start_method=start_method) as mesh:
                mesh.run(READY)
                seconds = time.perf_counter() - started
                look(mesh, ranks_mib, helpers_mib)
            return seconds

        return start

    contestants: dict[str, Callable[[], float]] = {
        "fresh": starting("fresh", memory["fresh"], []),
        "nothing": starting("fork", memory["forked"], memory["helpers"]),
        "warm": from_warm_server,
    }
    taken = workbench.take_turns(contestants, 1 if quick else 7, warm_up=0 if quick else 1)
    fresh = "four fresh interpreters"
    report.add(fresh, taken["fresh"], "s")
    report.add("from nothing", taken["nothing"], "s", against=fresh)
    report.add("from a warm fork server", taken["warm"], "s", against=fresh)
    report.add("PSS of a fresh interpreter as a rank", memory["fresh"], "MiB")
    pss = report.add("PSS of a forked rank", memory["forked"], "MiB", against="PSS of a fresh interpreter as a rank")
    report.add("PSS of supervisor, fork server and store together", memory["helpers"], "MiB")
    report.promise(f"{RANKS} ready ranks from nothing", statistics.median(taken["nothing"]), FROM_NOTHING_S, "s")
    report.promise(f"{RANKS} ready ranks from a warm fork server", statistics.median(taken["warm"]), WARM_S, "s")
    report.promise("PSS of an idle rank", pss, PSS_MIB, "MiB")
    return report


def look(mesh: Mesh, ranks_mib: list[float], helpers_mib: list[float]) -> None:
    """Add the PSS of each rank to one list, and that of the processes around them to the other."""
    ranks = set(mesh.execute(os.getpid).values())
    info = mesh.status()
    ranks_mib += [workbench.pss_mib(pid) for pid in ranks]
    supervisor = psutil.Process(info.supervisor_pid)
    around = [supervisor, *supervisor.children(recursive=True)]
    helpers_mib.append(sum(workbench.pss_mib(process.pid) for process in around if process.pid not in ranks))


def from_warm_server() -> float:
    """As a kernel does it: its supervisor is launched with it, and the ranks are asked for at the first cell."""
    grid = MeshAxes.of(RANKS)
    with a_session() as session:
        wait_until_warm(session.connection.connection_info.pid)
        started = time.perf_counter()
        session.start(grid, make_spec(grid), timeout_s=60.0)
        Mesh.of(session, grid).run(READY)
        return time.perf_counter() - started


@contextlib.contextmanager
def a_session() -> Iterator[Session]:
    """A supervisor without ranks, and a line to it."""
    found = launch_supervisor(generate_mesh_name())
    session = Session(
        SupervisorConnection(found, kind="script", orphan_ttl_s=workbench.ORPHAN_TTL_S), stop_at_exit=True
    )
    try:
        yield session
    finally:
        session.stop()


def wait_until_warm(supervisor: int) -> None:
    """Wait until the supervisor's fork server has done its imports: it has worked, and now has nothing to do.

    It tells its supervisor and nobody else, so its CPU time is looked at from outside.
    """
    deadline = time.monotonic() + _WARM_UP_TIMEOUT_S
    spent_before = 0.0
    while time.monotonic() < deadline:
        children = psutil.Process(supervisor).children()
        servers = [child.pid for child in children if "meshbook.rank.forkserver" in child.cmdline()]
        spent = sum(map(workbench.cpu_s, servers))
        if servers and spent == spent_before and spent > _IMPORTS_S:
            return
        spent_before = spent
        time.sleep(_STILL_S)
    raise TimeoutError(f"the fork server was not warm after {_WARM_UP_TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
