"""Notebooks that nobody looks at: nbclient and papermill on the Meshbook kernel."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient

from tests.budget import WAIT_S
from tests.kernel.frontend import strip_ansi

pytestmark = pytest.mark.usefixtures("starts_kernels")


def notebook(*cells: str) -> Any:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    made.metadata["kernelspec"] = {"name": "meshbook", "display_name": "Meshbook", "language": "python"}
    return made


def execute(made: Any) -> Any:
    with patch.dict(os.environ, {"MESHBOOK_RANKS": "2"}):
        return NotebookClient(made, timeout=WAIT_S, kernel_name="meshbook").execute()


def texts(cell: Any) -> list[str]:
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]


def test_a_notebook_runs_to_its_end_and_keeps_what_it_showed(run: object) -> None:
    made = execute(
        notebook(
            "x = rank\nif rank == 0: print('hello')", "x + 1", "from tqdm import tqdm\nfor _ in tqdm([1, 2]): pass"
        )
    )
    assert strip_ansi(texts(made.cells[0])[-1]) == "[0] hello\n"
    assert [cell.execution_count for cell in made.cells] == [1, 2, 3]
    assert "1" in texts(made.cells[1])[0]
    assert "2/2" in "".join(texts(made.cells[2]))
    nbformat.validate(made)


def test_papermill_sets_parameters_on_the_ranks_and_ends_with_the_error_that_ranks_wait_for(
    run: object, tmp_path: Path
) -> None:
    papermill = pytest.importorskip("papermill")
    made = notebook("lr = 0.1", "lr * 2", "if rank == 1: raise ValueError(lr)\ndist.barrier()", "ran = True")
    made.cells[0].metadata["tags"] = ["parameters"]
    source, result = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    nbformat.write(made, source)
    with patch.dict(os.environ, {"MESHBOOK_RANKS": "2"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # papermill's own, of its own libraries
        with pytest.raises(papermill.PapermillExecutionError, match="ValueError") as raised:
            papermill.execute_notebook(source, result, parameters={"lr": 0.5}, progress_bar=False)
    assert raised.value.ename == "ValueError"
    assert raised.value.evalue.startswith("rank 1: ValueError: 0.5; rank 0 waited in barrier at line 2")
    written = nbformat.read(result, as_version=4).cells
    *_, doubled, _, after = (cell for cell in written if cell.cell_type == "code")  # it adds remarks of its own
    assert texts(doubled) == ["1.0"]
    assert after.outputs == []
