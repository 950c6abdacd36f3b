"""The front end's modules, as files and joined into one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from meshbook.dashboard import assets
from tests.budget import WAIT_S


def test_joined_modules_import_nothing_and_export_only_what_a_widget_is() -> None:
    joined = assets.bundle("anywidget.js")
    assert not re.search(r"^import ", joined, re.MULTILINE)
    assert re.findall(r"^export .*", joined, re.MULTILINE) == ["export default { render };"]


def test_names_of_all_modules_are_different_for_they_are_joined() -> None:
    joined = assets.bundle("anywidget.js")
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", joined, re.MULTILINE)
    assert len(names) > 40
    assert sorted(names) == sorted(set(names))


def test_nothing_that_ranks_say_can_become_markup() -> None:
    for name in assets.asset_names():
        text = assets.read_asset(name)
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, f"{name} uses {way}"


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# What front ends have behind a cell's output: JupyterLab, marimo, VS Code, our own page.
BEHIND = {
    ".mbd {": ("#ffffff", "#fcfcfc", "#f8f8f8"),
    '.mbd[data-theme="dark"] {': ("#111111", "#181c1a", "#1f1f1f", "#0d1117"),
}


@pytest.mark.parametrize("theme", BEHIND)
def test_all_that_is_written_can_be_read_on_what_is_behind_it(theme: str) -> None:
    block = assets.read_asset("dashboard.css").partition(theme)[2].partition("}")[0]
    colours = dict(re.findall(r"--mbd-([a-z]+): (#[0-9a-f]{6})", block))
    written = ("text", "muted", "starting", "idle", "busy", "waiting", "silent", "dead")
    for behind in (*BEHIND[theme], colours["panel"]):
        for name in written:
            assert contrast(colours[name], behind) >= 4.5, f"{name} on {behind}"
    for name in ("dead", "waiting", "busy"):
        assert contrast(colours["on"], colours[name]) >= 4.5, f"what stands on {name}"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to read JavaScript with")
@pytest.mark.usefixtures("starts_processes")
def test_the_joined_module_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "joined.mjs"
    path.write_text(assets.bundle("anywidget.js"))
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
