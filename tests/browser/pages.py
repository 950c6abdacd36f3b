"""JupyterLab and marimo, served for a while, and their notebooks as pages that are clicked and typed into.

Nothing here sleeps: it waits until the page shows something, with a deadline.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from tests.budget import WAIT_S, when

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

# Seconds that a page is given to show what it is to show. All but the first page take far less on a quiet machine.
TIMEOUT_S = WAIT_S
# Seconds that a server is given to end its kernels and then itself.
END_S = WAIT_S

# What a newcomer is asked and told first, and limits that a loaded machine does not keep.
_LAB_SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "completer-extension/manager": {"providerTimeout": 20_000},  # milliseconds
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are in the page too
}
LAB_READY = """async () => {
    const notebook = jupyterapp.shell.currentWidget;
    await notebook.context.ready;
    await notebook.context.sessionContext.ready;
    await notebook.context.sessionContext.session.kernel.info;
}"""
_ADD_CELL = """source => {
    const cells = jupyterapp.shell.currentWidget.content.model.sharedModel;
    cells.insertCell(cells.cells.length, {cell_type: "code", source});
    return cells.cells.length - 1;
}"""
_WATCH_KERNEL = """() => {
    window.kernelStates = [];
    const kernel = jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
    kernel.statusChanged.connect((_, state) => window.kernelStates.push(state));
}"""
_RESTARTED = """() => {
    const began = window.kernelStates.indexOf("restarting");
    return began >= 0 && window.kernelStates.slice(began).includes("idle");
}"""


_DESCRIBE = """() => {
    const {content, context} = jupyterapp.shell.currentWidget;
    const {kernel} = context.sessionContext.session;
    const cells = [...document.querySelectorAll(".jp-Notebook .jp-Cell")].map(cell => cell.innerText);
    const dialogs = [...document.querySelectorAll(".jp-Dialog")].map(dialog => dialog.innerText);
    return [
        `kernel: ${kernel.status}, ${kernel.connectionStatus}`,
        `active cell: ${content.activeCellIndex}, ${content.mode} mode; focus: ${document.activeElement.className}`,
        ...dialogs.map(text => `dialog: ${text}`),
        ...cells.map((text, index) => `--- cell ${index}\\n${text}`),
    ].join("\\n");
}"""


@contextmanager
def _run_server(
    command: list[str], folder: Path, ready_pattern: re.Pattern[str], environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server in a folder for as long as the block.

    Args:
        ready_pattern: what it prints once it listens; the first group is the port.

    Yields:
        Its port.
    """
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env={**os.environ, "HOME": str(folder.parent), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:

        def find_port() -> re.Match[str] | None:
            assert server.poll() is None, f"{command[0]} has ended:\n{log.read_text()}"
            return ready_pattern.search(log.read_text(errors="replace"))

        when(lambda: find_port() is not None, f"{command[0]} is up, which")
        found = find_port()
        assert found is not None
        yield found[1]
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(END_S)
            raise AssertionError(f"{command[0]} did not end when told to:\n{log.read_text()}") from None


@contextmanager
def _page(browser: Browser, url: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.set_default_timeout(TIMEOUT_S * 1000)
    try:
        page.goto(url, wait_until="domcontentloaded")
        yield page
    finally:
        page.close()


# ---------------------------------------------------------------------------------------------------------------------
# JupyterLab


@contextmanager
def lab(browser: Browser, folder: Path) -> Iterator[Lab]:
    """JupyterLab on a folder, as `jupyter lab` serves it, for as long as the block. Kernels start two ranks."""
    settings = folder.with_name(f"{folder.name}-settings")
    for name, setting in _LAB_SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(setting))
    token = secrets.token_hex(16)
    command = [
        "jupyterlab",
        "--no-browser",
        "--ServerApp.allow_root=True",  # as containers do
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        "--LabApp.expose_app_in_browser=True",
    ]
    environment = {"JUPYTER_TOKEN": token, "JUPYTERLAB_SETTINGS_DIR": str(settings), "MESHBOOK_RANKS": "2"}
    with _run_server(command, folder, re.compile(r"http://127\.0\.0\.1:(\d+)/lab"), environment) as port:
        yield Lab(browser, f"http://127.0.0.1:{port}", token, folder)


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that runs."""

    browser: Browser
    address: str
    token: str
    folder: Path

    @contextmanager
    def notebook(self, kernel: str) -> Iterator[LabNotebook]:
        """A new notebook, open and its kernel ready. At the end the page is closed; the kernel goes with the server.

        It has a workspace of its own: else a page that is reloaded shows the notebooks of others as well.
        """
        document = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": kernel, "display_name": kernel}})  # type: ignore[no-untyped-call]
        name = f"{kernel}-{secrets.token_hex(4)}"
        nbformat.write(document, self.folder / f"{name}.ipynb")  # type: ignore[no-untyped-call]
        address = f"{self.address}/lab/workspaces/{name}/tree/{name}.ipynb?token={self.token}"
        with _page(self.browser, address) as page:
            page.wait_for_selector(".jp-NotebookPanel .jp-Notebook")
            page.evaluate(LAB_READY)
            yield LabNotebook(page)


class LabNotebook:
    """A notebook on JupyterLab's page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.stop_button = page.locator('.jp-NotebookPanel-toolbar [data-jp-item-name="interrupt"] jp-button')

    def add(self, source: str) -> LabCell:
        """A new cell at the end, which does not run yet."""
        return LabCell(self.page, self.page.evaluate(_ADD_CELL, source))

    def start(self, source: str) -> LabCell:
        """A new cell at the end, running."""
        cell = self.add(source)
        cell.start()
        return cell

    def run(self, source: str) -> LabCell:
        """A new cell at the end, run to its end."""
        cell = self.start(source)
        cell.wait()
        return cell

    def describe(self) -> str:
        """What the page shows, for the report of a test that failed."""
        return str(self.page.evaluate(_DESCRIBE))

    def choose(self, menu: str, entry: str) -> None:
        """Choose from a menu."""
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.locator(".lm-Menu-item", has_text=entry).filter(visible=True).first.click()

    def restart(self) -> None:
        """Restart the kernel from the menu, and wait until it is up."""
        self.page.evaluate(_WATCH_KERNEL)
        self.choose("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_function(_RESTARTED)

    def use_theme(self, name: str) -> None:
        """Draw the page in JupyterLab's light or dark theme."""
        self.page.evaluate("name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
        light = str(name == "JupyterLab Light").lower()
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")


class LabCell:
    """A code cell on JupyterLab's page.

    Attributes:
        prompt: reads `[ ]:`, `[*]:` while it runs or waits to, `[7]:` when it has ended.
        editor: where its source is typed.
        output: all of what it has shown.
        result: its value.
        error: its traceback.
    """

    def __init__(self, page: Page, index: int) -> None:
        self.page = page
        self.index = index
        cell = page.locator(".jp-Notebook .jp-Cell").nth(index)
        self.prompt: Locator = cell.locator(".jp-InputPrompt")
        self.editor: Locator = cell.locator(".cm-content")
        self.output: Locator = cell.locator(".jp-OutputArea-output")
        self.result: Locator = cell.locator(".jp-OutputArea-executeResult .jp-OutputArea-output")
        self.error: Locator = self.output.filter(has_text="Traceback (most recent call last)")

    def start(self) -> None:
        self.editor.click()
        self.page.keyboard.press("Control+Enter")

    def wait(self) -> None:
        """Until it has ended, well or not."""
        ended = "i => /\\[\\d+\\]/.test(document.querySelectorAll('.jp-Notebook .jp-InputPrompt')[i].innerText)"
        self.page.wait_for_function(ended, arg=self.index)


# ---------------------------------------------------------------------------------------------------------------------
# marimo


@contextmanager
def marimo(browser: Browser, folder: Path, source: str) -> Iterator[MarimoNotebook]:
    """A notebook in `marimo edit` for as long as the block. Nothing in it has run."""
    (folder / "notebook.py").write_text(source)
    token = folder.with_suffix(".token")
    token.write_text(secrets.token_hex(16))
    command = ["marimo", "edit", "notebook.py", "--headless", "--host", "127.0.0.1", "--skip-update-check"]
    command += ["--token-password-file", str(token)]
    # Settings and histories of its own. Where these are unset, they are below HOME.
    environment = {f"XDG_{kind}_HOME": str(folder.with_suffix(".home") / kind) for kind in ("CONFIG", "STATE", "CACHE")}
    with (
        _run_server(command, folder, re.compile(r"http://[\w.]+:(\d+)"), environment) as port,
        _page(browser, f"http://127.0.0.1:{port}/?access_token={token.read_text()}") as page,
    ):
        page.wait_for_selector('[data-testid="cell-editor"]')
        yield MarimoNotebook(page)


class MarimoNotebook:
    """A notebook on marimo's page."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def cell(self, index: int) -> MarimoCell:
        return MarimoCell(self.page.locator(".marimo-cell").nth(index))


class MarimoCell:
    """A cell on marimo's page.

    Attributes:
        result: its value.
    """

    def __init__(self, cell: Locator) -> None:
        self._cell = cell
        self.result: Locator = cell.locator('[id^="output-"]')

    def start(self) -> None:
        """Click its run button; cells that depend on it follow."""
        self._cell.hover()
        self._cell.get_by_test_id("run-button").first.click()  # the second is its stop button
