"""A cell in the Meshbook kernel with 4 and with 8 ranks, and the same cell in a plain ipykernel.

From the front end's request until it has both the reply and the kernel's `idle`. Three notebooks are open at once and
take turns, cell by cell, so the third pair of columns is not the difference of two runs.

    python -m benchmarks.cell_round_trip [--quick]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from benchmarks import notebook, workbench
from benchmarks.report import Report

# What is run, and what a plain kernel is given in its place: it has no `rank`.
CELLS = {"pass": "pass", "1+1": "1+1", "print(rank)": "print(0)"}

# Ranks, and the milliseconds over a plain kernel that we allow ourselves with so many.
LIMITS_MS = {4: 2.0, 8: 4.0}


def measure(quick: bool, folder: Path) -> Report:
    report = Report("cell_round_trip", "a cell, from the front end's request to reply and idle")
    rounds = 5 if quick else 100
    with contextlib.ExitStack() as open_notebooks:
        plain = open_notebooks.enter_context(notebook.opened("python3", folder))
        meshes = {
            ranks: open_notebooks.enter_context(notebook.opened("meshbook", folder, env={"MESHBOOK_RANKS": str(ranks)}))
            for ranks in LIMITS_MS
        }
        for mesh in meshes.values():
            mesh.run("pass")  # starts the ranks
        for cell, stand_in in CELLS.items():
            contestants = {"plain": asker(plain, stand_in)}
            contestants |= {f"{ranks}": asker(mesh, cell) for ranks, mesh in meshes.items()}
            taken = workbench.take_turns(contestants, rounds)
            base = f"{cell}: plain ipykernel"
            report.add(base, taken["plain"], "ms")
            for ranks, limit_ms in LIMITS_MS.items():
                own = f"{cell}: Meshbook, {ranks} ranks"
                report.add(own, taken[f"{ranks}"], "ms", against=base)
                over = report.difference(f"{cell}: {ranks} ranks over plain", own, base)
                report.promise(f"`{cell}` on {ranks} ranks, over a plain ipykernel", over, limit_ms, "ms")
    return report


def asker(page: notebook.Notebook, cell: str) -> Callable[[], float]:
    """Runs a cell once; how long it took, in milliseconds."""
    return lambda: 1e3 * page.run(cell)


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
