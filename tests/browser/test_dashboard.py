"""The dashboard in JupyterLab, in marimo and as a page of its own, as somebody at the browser has it."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshbook.actor import Actor, ActorError, endpoint
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach, create_mesh
from meshbook.dashboard.hub import DashboardHub
from meshbook.dashboard.web_server import DashboardServer, start_server
from meshbook.wire.keys import list_connections
from tests.browser.pages import LAB_READY, TIMEOUT_S, Lab, LabNotebook, marimo
from tests.budget import WAIT_S, when

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

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
    running = notebook.start(f"t = torch.ones(1)\nif rank == 1:\n    wait_for({str(gate)!r})\ndist.all_reduce(t)")
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


def test_debug_stops_a_cell_that_runs_and_replay_is_there_after_a_recorded_failure(notebook: LabNotebook) -> None:
    shown = notebook.run("%%controller\nmesh.dashboard()").output
    debug, replay = (shown.locator(".mbd-actions").get_by_role("button", name=name) for name in ("Debug", "Replay"))
    expect(chips(shown)).to_have_text("2 idle")
    expect(debug).to_be_hidden()
    expect(replay).to_be_hidden()
    running = notebook.start("import time\ndone = False\nwhile not done: time.sleep(0.01)")
    debug.click()
    expect(shown.locator(".mbd-told")).to_contain_text("ranks 0-1 stop in the debugger, with its prompt below cell")
    for prompt, command in (("(ranks 0-1 · h lists the commands)", "done = True"), ("(ranks 0-1)", "c")):
        box = running.output.filter(has_text=prompt).locator(".jp-Stdin-input")
        box.fill(command)
        box.press("Enter")
    expect(running.prompt).to_have_text(ENDED)
    expect(debug).to_be_hidden()
    failed = notebook.start("%%mesh --record\n1 / (1 - rank)")
    expect(failed.error).to_contain_text("ZeroDivisionError")
    replay.click()
    expect(shown.locator(".mbd-told")).to_contain_text(re.compile("meshbook replay .*failures/f1 --rank 1"))


@pytest.mark.thorough
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


@pytest.mark.thorough
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


# ---------------------------------------------------------------------------------------------------------------------
# A page of its own


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh({"dp": 2, "tp": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def server(mesh: Mesh) -> Iterator[DashboardServer]:
    server = start_server(mesh)
    yield server
    server.close()


@pytest.fixture
def board(browser: Browser, server: DashboardServer) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.goto(server.address)
    expect(chips(page)).to_have_text("4 idle")
    yield page
    page.close()


def fetch(address: str, host: str | None = None) -> int:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.usefixtures("starts_meshes")
def test_a_page_without_its_token_or_under_a_foreign_name_is_refused(server: DashboardServer) -> None:
    root = f"http://127.0.0.1:{server.port}"
    assert fetch(server.address) == 200
    assert fetch(f"{server.address}dashboard.css") == 200
    assert fetch(f"{root}/") == 403
    assert fetch(f"{root}/{'x' * len(server.token)}/") == 403
    assert fetch(f"{root}/{'x' * len(server.token)}/live") == 403
    assert fetch(server.address, host=f"evil.example:{server.port}") == 403
    assert fetch(f"{server.address}../pyproject.toml") == 404
    assert server.address.startswith("http://127.0.0.1:")


def test_ranks_are_chosen_by_axis_by_click_and_by_key_and_killed_only_after_a_question(board: Page, mesh: Mesh) -> None:
    said = board.locator(".mbd-chosen")
    board.get_by_role("button", name="dp=1").click()
    expect(said).to_have_text("2 of 4 selected: 2-3")
    board.get_by_label("select ranks").fill("dp=0 tp=1")
    board.get_by_label("select ranks").press("Enter")
    expect(said).to_have_text("1 of 4 selected: 1")
    tiles = board.get_by_role("listbox", name="Ranks")
    tiles.click(position={"x": 90, "y": 40})
    expect(said).to_have_text("1 of 4 selected: 0")
    tiles.press("ArrowRight")
    tiles.press("Shift+ArrowDown")
    expect(said).to_have_text("3 of 4 selected: 1-3")
    expect(board.get_by_role("option")).to_have_text(re.compile("rank 3, idle"))
    press(board, "Kill…")
    asked = board.get_by_role("alertdialog")
    expect(asked).to_contain_text("Kill ranks 1-3?")
    board.keyboard.press("Enter")  # Cancel has the focus
    expect(asked).to_be_hidden()
    tiles.press("Escape")
    expect(said).to_have_text("")
    assert [rank.state for rank in mesh.status().ranks] == ["idle"] * 4


def test_what_ranks_print_is_text_and_a_line_of_a_megabyte_is_cut_for_the_eye(board: Page, mesh: Mesh) -> None:
    hostile = "<img src=x onerror='document.title=1'>"
    # The mesh keeps only so much of what was printed: a megabyte is not among it, and what came after it is.
    mesh.run(
        f"print('y' * (1 << 20)); print('z' * 20_000); print({hostile!r}); print('\\x1b[31mred\\x1b[0m')",
        ranks=[2],
        echo=False,
    )
    board.get_by_role("tab", name="Logs").click()
    board.get_by_label("rank", exact=True).fill("2")
    board.get_by_label("rank", exact=True).press("Enter")
    log = board.get_by_role("log")
    expect(log).to_contain_text(hostile)
    expect(log.locator(".mbd-line").last).to_have_text("red")
    expect(log).to_contain_text("more characters")
    board.get_by_label("search in the log").fill("ONERROR")
    expect(log.locator("mark")).to_have_text("onerror")
    expect(log.locator(".mbd-line")).to_have_count(1)
    assert board.locator("img").count() == 0
    assert board.title() == f"{mesh.name} · Meshbook"


class Holds(Actor):
    @endpoint
    def hold(self) -> None:
        self.gate = threading.Event()
        self.gate.wait(TIMEOUT_S)

    @endpoint
    def fail(self) -> None:
        raise ValueError("<b>on purpose</b>")


def test_actors_have_a_panel_once_there_are_some_that_says_what_each_does(board: Page, mesh: Mesh) -> None:
    tab = board.get_by_role("tab", name="Actors")
    expect(board.get_by_role("tab", name="Logs")).to_be_visible()
    expect(tab).to_be_hidden()
    actors = mesh.spawn("holders", Holds)
    with pytest.raises(ActorError):
        actors.slice(dp=0, tp=1).fail.call_one().get(TIMEOUT_S)
    held, waits = (actors.slice(dp=1, tp=1).hold.call_one() for _ in range(2))
    tab.click()
    rows = board.get_by_role("row")
    expect(rows).to_have_count(5)
    expect(rows.nth(2)).to_contain_text("ValueError: <b>on purpose</b>")
    expect(rows.nth(4)).to_contain_text("hold for")
    for future in (held, waits):
        actors.slice(dp=1, tp=1)._apply_concurrently(_let_go).get(TIMEOUT_S)
        future.get(TIMEOUT_S)
    expect(rows.nth(4)).not_to_contain_text("hold for")
    actors.stop().get(TIMEOUT_S)
    expect(board.get_by_role("tabpanel", name="actors")).to_contain_text("No actors are here")


def _let_go(actor: Any) -> None:
    for _ in range(500):
        if (gate := getattr(actor, "gate", None)) is not None and not gate.is_set():
            gate.set()
            return
        threading.Event().wait(0.02)
    raise AssertionError("nothing is held")


def test_the_page_draws_curves_and_finds_the_mesh_again_and_watching_ends_with_the_last_page(
    board: Page, mesh: Mesh
) -> None:
    mesh.run("import meshbook\nfor step in range(20):\n    meshbook.log(loss=1 / (step + 1), step=step)", echo=False)
    board.get_by_role("tab", name="Scalars").click()
    expect(board.locator("figcaption")).to_contain_text("loss")
    expect(board.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"loss: from 0\.05 to 1, 4 lines"))
    board.reload()
    expect(chips(board)).to_have_text("4 idle")
    board.get_by_role("tab", name="Scalars").click()
    expect(board.locator("figcaption")).to_contain_text("loss")
    desk = DashboardHub.of(mesh.session)
    assert desk.is_subscribed
    board.goto("about:blank")
    when(lambda: not desk.is_subscribed, "nobody looks any more, so the watching")
