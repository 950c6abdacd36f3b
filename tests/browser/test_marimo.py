"""Meshbook in `marimo edit`, as somebody at the browser has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshbook.controller.starting import attach
from meshbook.wire.keys import list_connections
from tests.browser.pages import TIMEOUT_S, MarimoNotebook, marimo

if TYPE_CHECKING:
    from playwright.sync_api import Browser

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=TIMEOUT_S * 1000)

SOURCE = """
import marimo

app = marimo.App()


@app.cell
def _():
    import os
    import meshbook

    mesh = meshbook.create_mesh(2)
    return mesh, os


@app.cell
def _(mesh):
    @mesh.cell
    def count():
        runs = globals().get("runs", 0) + 1
        total = torch.tensor(runs)
        dist.all_reduce(total)
        print(f"run {runs}, together {total.item()}")

    mesh.run("rank * 10").values
    return


@app.cell
def _(mesh, os):
    if os.path.exists("be stuck"):
        mesh.run("if rank == 0:\\n    print('stuck')\\n    dist.barrier()")
    return


if __name__ == "__main__":
    app.run()
"""
MESH, COUNT, STUCK = range(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marimo")


@pytest.fixture(scope="module")
def notebook(browser: Browser, folder: Path) -> Iterator[MarimoNotebook]:
    """A notebook whose mesh runs."""
    before = {connection.name for connection in list_connections()}
    try:
        with marimo(browser, folder, SOURCE) as notebook:
            notebook.cell(COUNT).start()
            expect(notebook.cell(COUNT).result).to_have_text(re.compile(r"\[0\] 0"))
            yield notebook
    finally:
        # A kernel that ends leaves its mesh to the next one of the notebook.
        for connection in list_connections():
            if connection.name not in before:
                attach(connection.name).stop()


def runs(notebook: MarimoNotebook) -> int:
    """How often the ranks have counted, as the page shows it."""
    found = re.search(r"run (\d+), together (\d+)", notebook.cell(COUNT).printed.inner_text())
    assert found is not None
    assert int(found[2]) == 2 * int(found[1])
    return int(found[1])


def test_a_cell_on_the_ranks_shows_what_they_print_and_their_values(notebook: MarimoNotebook) -> None:
    assert notebook.cell(COUNT).result.inner_text().strip() == "[0] 0\n[1] 10"
    assert runs(notebook) >= 1


def test_the_mesh_cell_run_again_finds_its_mesh_and_what_is_on_it(notebook: MarimoNotebook) -> None:
    before, meshes = runs(notebook), list_connections()
    notebook.cell(MESH).start()
    expect(notebook.cell(COUNT).printed).to_contain_text(f"run {before + 1}, together {2 * before + 2}")
    assert list_connections() == meshes


def test_the_stop_button_ends_a_stuck_collective_and_the_next_cell_works(
    notebook: MarimoNotebook, folder: Path
) -> None:
    switch = folder / "be stuck"
    switch.touch()
    try:
        notebook.cell(STUCK).start()
        expect(notebook.cell(STUCK).printed).to_contain_text("stuck")
        notebook.stop_button.click()
        expect(notebook.cell(STUCK).result).to_contain_text("interrupted")
    finally:
        switch.unlink()
    before = runs(notebook)
    notebook.cell(COUNT).start()
    expect(notebook.cell(COUNT).printed).to_contain_text(f"run {before + 1}, together {2 * before + 2}")
