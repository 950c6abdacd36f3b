"""One browser, and one server of each kind, for all tests here.

The browser is this package's and no more: while it is open, Playwright keeps an event loop in this thread, and other
tests run their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.budget import WAIT_S
from tests.leaks import Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.pages import Lab, LabNotebook

# No sandbox, because containers have none to offer; no shared memory, because they offer little; and nothing that
# Chromium does of its own accord.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what its page shows, and what the ranks wait for."""
    report = yield
    from tests.browser.pages import LabNotebook

    pages = [used for used in getattr(item, "funcargs", {}).values() if isinstance(used, LabNotebook)]
    if report.failed and pages:
        why = subprocess.run(
            [sys.executable, "-m", "meshbook.cli.main", "why"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        report.sections += [("the page", page.describe()) for page in pages]
        report.sections.append(("meshbook why", why.stdout + why.stderr))
    return report


@pytest.fixture(scope="package")
def browser(run: Run, chromium: str) -> Iterator[Browser]:
    """Headless Chromium. Each page of it is one of a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def jupyterlab(run: Run, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab that serves a folder of its own."""
    from tests.browser.pages import lab

    with lab(browser, tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="package")
def notebook(jupyterlab: Lab) -> Iterator[LabNotebook]:
    """A notebook of the Meshbook kernel, with two ranks. Each test adds its cells at the end, and leaves the ranks
    idle."""
    with jupyterlab.notebook("meshbook") as notebook:
        notebook.run(
            "import os, time\ndef wait_for(path):\n    while not os.path.exists(path):\n        time.sleep(0.01)\n"
        )
        yield notebook


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that is not there, for cells to wait for. It is made at the latest when the test has ended."""
    path = tmp_path / "gate"
    yield path
    path.touch()
