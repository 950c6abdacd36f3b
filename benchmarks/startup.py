"""Four ranks from nothing, from a warm fork server, as fresh interpreters: seconds until they are ready, and memory.

Ready means that torch is imported, the process group is up and a cell has run. "From nothing" begins where a program
calls `create_mesh`. Memory is PSS, which counts a page that n processes share as an n-th in each, of ranks that have
run one cell and wait.

    python -m benchmarks.startup [--quick]
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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

_WARM_UP_TIMEOUT_S = 60.0
# Seconds without work after which a fork server has nothing left to import; CPU seconds that its imports take at least.
_STILL_S, _IMPORTS_S = 0.3, 0.3


FRESH, NOTHING, WARM = "four fresh interpreters", "from nothing", "from a warm fork server"
FRESH_PSS = "PSS of a fresh interpreter as a rank"


def measure(quick: bool, folder: Path) -> Report:
    report = Report("startup", f"nothing to {RANKS} ready ranks")
    contestants: dict[str, Callable[[], Started]] = {
        FRESH: functools.partial(from_nothing, "fresh"),
        NOTHING: functools.partial(from_nothing, "fork"),
        WARM: from_warm_server,
    }
    taken = workbench.take_turns(contestants, 1 if quick else 7, warm_up=0 if quick else 1)
    for what, starts in taken.items():
        report.add(what, [start.seconds for start in starts], "s", against=None if what == FRESH else FRESH)
    report.add(FRESH_PSS, [mib for start in taken[FRESH] for mib in start.ranks_mib], "MiB")
    forked = [mib for start in taken[NOTHING] for mib in start.ranks_mib]
    pss = report.add("PSS of a forked rank", forked, "MiB", against=FRESH_PSS)
    helpers = [start.whole_mib - sum(start.ranks_mib) for start in taken[NOTHING]]
    report.add("PSS of supervisor, fork server and store together", helpers, "MiB")
    report.promise(f"{RANKS} ready ranks {NOTHING}", report.row(NOTHING).median, FROM_NOTHING_S, "s")
    report.promise(f"{RANKS} ready ranks {WARM}", report.row(WARM).median, WARM_S, "s")
    report.promise("PSS of an idle rank", pss, PSS_MIB, "MiB")
    return report


class Started(NamedTuple):
    """A mesh that was started: how long it took, and the PSS of each rank and of all its processes."""

    seconds: float
    ranks_mib: tuple[float, ...]
    whole_mib: float


def from_nothing(start_method: str) -> Started:
    started = time.perf_counter()
    with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S, start_method=start_method) as mesh:
        return ready(mesh, started)


def from_warm_server() -> Started:
    """As a kernel does it: its supervisor is launched with it, and the ranks are asked for at the first cell."""
    grid = MeshAxes.of(RANKS)
    found = launch_supervisor(generate_mesh_name())
    connection = SupervisorConnection(found, kind="script", orphan_ttl_s=workbench.ORPHAN_TTL_S)
    session = Session(connection, stop_at_exit=True)
    try:
        wait_until_warm(found.pid)
        started = time.perf_counter()
        session.start(grid, make_spec(grid), timeout_s=60.0)
        return ready(Mesh.of(session, grid), started)
    finally:
        session.stop()


def ready(mesh: Mesh, started: float) -> Started:
    mesh.run("assert dist.get_world_size() == world_size")
    seconds = time.perf_counter() - started
    pids = mesh.execute(os.getpid).values()
    return Started(seconds, tuple(map(workbench.pss_mib, pids)), workbench.mesh_pss_mib(mesh.status().supervisor_pid))


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
