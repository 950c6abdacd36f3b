"""A cell in the Meshbook kernel with 4 and with 8 ranks, and the same cell in a plain ipykernel.

From the front end's request until it has both the reply and the kernel's `idle`. Three notebooks are open at once and
take turns, cell by cell, so the third pair of columns is not the difference of two runs.

    python -m benchmarks.cell_round_trip [--quick]
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jupyter_client.manager import start_new_kernel

from benchmarks import workbench
from benchmarks.report import Report

# What is run, and what a plain kernel is given in its place: it has no `rank`.
CELLS = {"pass": "pass", "1+1": "1+1", "print(rank)": "print(0)"}

# Ranks, and the milliseconds over a plain kernel that we allow ourselves with so many.
LIMITS_MS = {4: 2.0, 8: 4.0}

_TIMEOUT_S = 60.0

RunCell = Callable[[str], None]


def measure(quick: bool, folder: Path) -> Report:
    report = Report("cell_round_trip", "a cell, from the front end's request to reply and idle")
    with contextlib.ExitStack() as notebooks:
        plain = notebooks.enter_context(opened("python3", folder))
        meshes = {ranks: notebooks.enter_context(opened("meshbook", folder, ranks)) for ranks in LIMITS_MS}
        for run in meshes.values():
            run("pass")  # starts the ranks
        for cell, stand_in in CELLS.items():
            base = f"{cell}: plain ipykernel"
            ours = {ranks: f"{cell}: Meshbook, {ranks} ranks" for ranks in LIMITS_MS}
            contestants = {base: asker(plain, stand_in)} | {ours[ranks]: asker(meshes[ranks], cell) for ranks in ours}
            taken = workbench.take_turns(contestants, 5 if quick else 100)
            report.add(base, taken[base], "ms")
            for ranks, limit_ms in LIMITS_MS.items():
                report.add(ours[ranks], taken[ours[ranks]], "ms", against=base)
                over = report.difference(f"{cell}: {ranks} ranks over plain", ours[ranks], base)
                report.promise(f"`{cell}` on {ranks} ranks, over a plain ipykernel", over, limit_ms, "ms")
    return report


def asker(run: RunCell, cell: str) -> Callable[[], float]:
    return workbench.milliseconds(lambda: run(cell))


@contextlib.contextmanager
def opened(kernel: str, folder: Path, ranks: int = 0) -> Iterator[RunCell]:
    """A notebook on a new kernel, as a function that runs a cell to its end. A failed cell raises RuntimeError."""
    # Above the level at which every kernel on TCP says that TCP is not encrypted.
    options = {"cwd": str(folder), "extra_arguments": ["--log-level=40"]}
    environment = os.environ | {"MESHBOOK_RANKS": str(ranks)}
    manager, client = start_new_kernel(_TIMEOUT_S, kernel, env=environment, **options)

    def run(source: str) -> None:
        reply = client.execute_interactive(
            source, allow_stdin=False, timeout=_TIMEOUT_S, output_hook=lambda message: None
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"].get("traceback", [reply["content"]["status"]])))

    try:
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
