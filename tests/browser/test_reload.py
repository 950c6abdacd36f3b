"""A page of JupyterLab that is reloaded while a cell runs: what the cell printed is not lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser.pages import LAB_READY, TIMEOUT_S, Lab

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=TIMEOUT_S * 1000)


def test_a_page_that_was_reloaded_while_a_cell_ran_says_where_its_output_is(
    jupyterlab: Lab, gate: Path, tmp_path: Path
) -> None:
    with jupyterlab.notebook("meshbook") as notebook:
        notebook.run("import os, time")
        running = notebook.start(
            f"for n in range(3 * (rank == 0)):\n    print('before', n)\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
            "for n in range(3 * (rank == 0)):\n    print('after', n)\nrank * 10"
        )
        expect(running.output).to_have_text(re.compile("before 2"))
        notebook.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
        notebook.page.reload(wait_until="domcontentloaded")
        notebook.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook")
        notebook.page.evaluate(LAB_READY)
        gate.touch()
        cell = notebook.run("'here again'")
        expect(cell.output.first).to_have_text(
            "the page was opened or reloaded while cell 2 ran, or just after; its whole output: %mesh history 2"
        )
        expect(cell.result).to_have_text("'here again'")
        assert "after" not in "\n".join(running.output.all_inner_texts())  # JupyterLab has dropped it
        shown = notebook.run("%mesh history 2")
        expect(shown.output.first).to_contain_text("cell 2 of")
        text = "\n".join(shown.output.all_inner_texts())
        assert "".join(f"[0] {when} {n}\n" for when in ("before", "after") for n in range(3)) in f"{text}\n"
        assert "[0] 0\n[1] 10" in text
        marked = notebook.run("%mesh history")
        expect(marked.result).to_contain_text("6 lines")
        notebook.page.screenshot(path=tmp_path / "reloaded.png", full_page=True)
        again = notebook.run("1 + 1")
        expect(again.output).to_have_count(1)  # the note was shown once
