"""The dashboard in JupyterLab, in marimo and as a page of its own, as somebody at the browser has it."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshbook.controller.mesh import Mesh, attach, create_mesh
from meshbook.dashboard.desk import Desk
from meshbook.dashboard.page import Server, open_page
from meshbook.wire.keys import list_connections
from tests.browser.pages import LAB_READY, TIMEOUT_S, Lab, LabNotebook, marimo
from tests.kernel.frontend import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=TIMEOUT_S * 1000)

RUNS = "[*]:"
ENDED = re.compile(r"\[\d+\]:")


def chips(where: Any) -> Locator:
    """How many ranks look how: "1 waiting", "1 busy"."""
    found: Locator = where.locator(".mbd-states")
    return found


def press(where: Any, name: str) -> None:
    where.locator(".mbd-actions").get_by_role("button", name=name).click()


def test_in_lab_it_lives_and_answers_while_a_cell_hangs_also_after_a_reload(notebook: LabNotebook, gate: Path) -> None:
    notebook.run("%%controller\nmesh.dashboard()")
    page = notebook.page
    expect(chips(page)).to_have_text("2 idle")
    running = notebook.start(
        f"t = torch.ones(1)\nif rank == 1:\n    wait_for({str(gate)!r})\nimport meshbook\nmeshbook.log(seen=rank)\ndist.all_reduce(t)"
    )
    expect(chips(page)).to_have_text(re.compile("1 waiting"))
    press(page, "Stacks")
    tree = page.locator(".mbd-tree")
    expect(tree).to_contain_text("wait_for")
    expect(tree.locator(".mbd-ranks", has_text="rank 1")).to_be_visible()
    press(page, "Why?")
    expect(page.locator(".mbd-finding h3").first).to_contain_text("ank 1")
    expect(running.prompt).to_have_text(RUNS)

    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.reload(wait_until="domcontentloaded")
    expect(chips(page)).to_have_text(re.compile("1 waiting"))
    press(page, "Stacks")
    expect(page.locator(".mbd-tree")).to_contain_text("wait_for")
    assert not gate.exists()
    gate.touch()
    expect(chips(page)).to_have_text("2 idle")
    page.evaluate(LAB_READY)


def test_in_an_ordinary_kernel_its_buttons_are_answered_while_a_cell_runs(jupyterlab: Lab, gate: Path) -> None:
    with jupyterlab.notebook("python3") as notebook:
        notebook.run("%load_ext meshbook\n%mesh start -n 2")
        notebook.run("%mesh dashboard")
        page = notebook.page
        expect(chips(page)).to_have_text("2 idle")
        running = notebook.start(
            f"%%mesh\nimport os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
        )
        expect(chips(page)).to_have_text("2 busy")
        press(page, "Stacks")
        expect(page.locator(".mbd-tree")).to_contain_text("line 4")
        page.locator(".mbd-chip").click()
        press(page, "Interrupt")
        expect(running.error).to_contain_text("KeyboardInterrupt")
        assert not gate.exists()
        notebook.run("%mesh stop")
        expect(page.locator(".mbd-live")).to_contain_text("ended")


MARIMO = """
import marimo

app = marimo.App()


@app.cell
def _():
    import os

    import marimo as mo
    import meshbook

    mesh = meshbook.create_mesh(2)
    mo.ui.anywidget(mesh.dashboard())
    return mesh, os


@app.cell
def _(mesh, os):
    mesh.run("import os, time\\nwhile not os.path.exists('gate'):\\n    time.sleep(0.01)")
    return


if __name__ == "__main__":
    app.run()
"""


def test_in_marimo_its_buttons_are_answered_while_a_cell_runs(browser: Browser, tmp_path: Path) -> None:
    before = {connection.name for connection in list_connections()}
    folder = tmp_path / "marimo"
    folder.mkdir()
    try:
        with marimo(browser, folder, MARIMO) as notebook:
            shown = notebook.cell(0).result
            notebook.cell(1).start()
            expect(chips(shown)).to_have_text("2 busy")
            press(shown, "Stacks")
            expect(shown.locator(".mbd-tree")).to_contain_text("line 3")
            expect(chips(shown)).to_have_text("2 busy")
            (folder / "gate").touch()
            expect(chips(shown)).to_have_text("2 idle")
    finally:
        (folder / "gate").touch()
        for connection in list_connections():
            if connection.name not in before:
                attach(connection.name).stop()
