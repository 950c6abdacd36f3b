"""`%mesh history` and `%mesh fold`: which cells ran on a mesh, what was printed, and how it is shown."""

from __future__ import annotations

import argparse

from meshbook.controller.mesh import Mesh
from meshbook.controller.past_cells import fetch_past_cells
from meshbook.controller.tables import Table, history_table
from meshbook.kernel.notebook import Notebook

_FOLDS = {
    "numbers": "Lines that are equal, or differ only in numbers, are shown once, with the ranks' numbers.",
    "equal": "Equal lines of several ranks are shown once; others by rank.",
    "off": "Each rank's lines are shown by themselves.",
}


def show_history(notebook: Notebook, mesh: Mesh, options: argparse.Namespace) -> Table | None:
    """Return the cells that ran; with a number, show under the current cell what the latest such cell showed.

    Raises:
        UsageError: no output of a cell with this number is kept.
    """
    if options.number is None:
        return history_table(mesh.history())
    *earlier, latest = fetch_past_cells(mesh.session, options.number)
    for cell in (*(earlier if options.all else ()), latest):
        notebook.front_end.show_past_cell(cell)
    if earlier and not options.all:
        others = "an earlier cell" if len(earlier) == 1 else f"{len(earlier)} earlier cells"
        notebook.front_end.show_note(f"{others} had the same number: %mesh history {options.number} --all")
    return None


def set_fold(mesh: Mesh, options: argparse.Namespace) -> None:
    """Set which lines of several ranks are shown as one, or say which are (None)."""
    mesh.fold = options.lines or mesh.fold
    print(_FOLDS[mesh.fold])
