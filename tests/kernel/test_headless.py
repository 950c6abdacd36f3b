"""A notebook that nobody looks at: papermill, which runs it by nbclient, on the Meshbook kernel."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import pytest

pytestmark = pytest.mark.usefixtures("starts_kernels")


def notebook(*cells: str) -> Any:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    made.metadata["kernelspec"] = {"name": "meshbook", "display_name": "Meshbook", "language": "python"}
    return made


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
    assert [output["data"]["text/plain"] for output in doubled.outputs] == ["1.0"]
    assert after.outputs == []
