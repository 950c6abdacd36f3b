"""The notebook about remote tensors, run to its end: its own asserts compare the losses with those of one process."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_kernels")

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "remote_tensors.ipynb"


def test_the_notebook_about_remote_tensors_runs_to_its_end(run: object) -> None:
    made = nbformat.read(NOTEBOOK, as_version=4)
    done = NotebookClient(made, timeout=2 * WAIT_S, kernel_name="meshbook").execute()
    shown = {cell.id: cell.outputs for cell in done.cells if cell.cell_type == "code"}
    drawing = "".join(output.get("data", {}).get("text/html", "") for output in shown["tensor"])
    assert "dp=2: dim 0 cut" in drawing
    said = "".join(output.get("text", "") for output in shown["here"])
    assert "of its calls in one message" in said
    assert "fsdp over dp=2, 2 blocks" in "".join(output.get("text", "") for output in shown["there"])
