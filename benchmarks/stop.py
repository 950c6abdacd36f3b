"""Stop, pressed while three ranks wait in an all_reduce that the fourth never joins; while all sleep; all compute. And
what ends a cell by itself there: the fourth rank raises, or is killed.

Two times are taken: until every rank is back, and until an all_reduce over the same four ranks has given the right sum
again. Names that were bound before must still be there. A mesh's first Stop of a kind is told apart from those after
it: what shows where it stopped may read and parse the files of torch for the first time.

    python -m benchmarks.stop [--quick]
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost

RANKS = 4
LIMIT_S = 1.0
LOST_LIMIT_S = 2.0

# Each is at its second line when Stop is pressed.
CELLS = {
    "an all_reduce that one rank never joins": (
        "t = torch.ones(1)\ndist.all_reduce(t) if rank != world_size - 1 else __import__('time').sleep(1000)"
    ),
    "time.sleep": "import time\ntime.sleep(1000)",
    "a loop in Python": "n = 0\nwhile True: n += 1",
}
WAITS = "import time\nt = torch.ones(1)\ndist.all_reduce(t) if rank != world_size - 1 else "
AGAIN = "t = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\n(t.item(), kept)"

_STUCK_TIMEOUT_S = 30.0


def measure(quick: bool, folder: Path) -> Report:
    report = Report("stop", f"Stop, with {RANKS} ranks")
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(1 if quick else 3):
        with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
            mesh.run("kept = rank")
            for what, source in CELLS.items():
                for nth in ("first", *["later"] * (1 if quick else 4)):
                    taken.setdefault((what, nth), []).append(stop_once(mesh, source))
    for (what, nth), times in taken.items():
        back, usable = zip(*times, strict=True)
        report.add(f"{what}, {nth}: all ranks are back", back, "s")
        seconds = report.add(f"{what}, {nth}: an all_reduce has worked again", usable, "s")
        report.promise(f"Stop on {what}, {nth}, until the group is usable", seconds, LIMIT_S, "s")
    raised, killed = [], []
    for _ in range(1 if quick else 5):
        with create_mesh(RANKS, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
            raised.append(raise_once(mesh))
            killed.append(kill_once(mesh))
    seconds = report.add("one rank raises while the others wait for it: the cell has ended", raised, "s")
    report.promise("a cell whose one rank raises while the others wait for it", seconds, LIMIT_S, "s")
    seconds = report.add("a rank is killed while the others wait for it: the cell has ended", killed, "s")
    report.promise("a cell whose one rank is killed while the others wait for it", seconds, LOST_LIMIT_S, "s")
    return report


def raise_once(mesh: Mesh) -> float:
    """Seconds from a rank's error, by its own clock, until the cell has ended."""
    future = mesh.run(WAITS + "(time.sleep(1), setattr(time, 'raised', time.monotonic()), 1 / 0)", wait=False)
    if "ZeroDivisionError" not in str(future.exception(_STUCK_TIMEOUT_S)):
        raise RuntimeError("the cell did not end with the rank's error")
    ended = time.monotonic()
    return ended - float(mesh.run("time.raised", ranks=[RANKS - 1]).values.same())


def kill_once(mesh: Mesh) -> float:
    """Seconds from a rank's death until the cell has ended."""
    pid = mesh.status().ranks[-1].pid
    assert pid is not None
    future = mesh.run(WAITS + "time.sleep(1000)", wait=False)
    wait_until_at_line(mesh, 3)
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    if not isinstance(future.exception(_STUCK_TIMEOUT_S), RankLost):
        raise RuntimeError("the cell did not end with the loss of the rank")
    return time.perf_counter() - killed


def stop_once(mesh: Mesh, source: str) -> tuple[float, float]:
    """Seconds from Stop until all ranks are back, and until they have summed over all of them again."""
    running = mesh.run(source, wait=False)
    wait_until_at_line(mesh, 2)
    pressed = time.perf_counter()
    running.interrupt()
    if running.exception(_STUCK_TIMEOUT_S) is None:
        raise RuntimeError(f"the cell ended by itself:\n{source}")
    back = time.perf_counter() - pressed
    values = mesh.run(AGAIN).values
    usable = time.perf_counter() - pressed
    expected = {rank: (RANKS * (RANKS + 1) / 2, rank) for rank in range(RANKS)}
    if dict(values) != expected:
        raise RuntimeError(f"after Stop the ranks gave {dict(values)}, not {expected}")
    return back, usable


def wait_until_at_line(mesh: Mesh, line: int) -> None:
    """Wait until every rank has been seen at this line of its cell: they tell once per second where they are."""
    deadline = time.monotonic() + _STUCK_TIMEOUT_S
    while time.monotonic() < deadline:
        if all(rank.line == line for rank in mesh.status().ranks):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the ranks did not get to line {line}: {[rank.line for rank in mesh.status().ranks]}")


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
