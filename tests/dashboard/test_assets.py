"""The front end's modules, as files and joined into one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from meshbook.dashboard import assets


def test_joined_modules_import_nothing_and_export_only_what_a_widget_is() -> None:
    joined = assets.joined("anywidget.js")
    assert not re.search(r"^import ", joined, re.MULTILINE)
    assert re.findall(r"^export .*", joined, re.MULTILINE) == ["export default { render };"]


def test_names_of_all_modules_are_different_for_they_are_joined() -> None:
    joined = assets.joined("anywidget.js")
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", joined, re.MULTILINE)
    assert len(names) > 40
    assert sorted(names) == sorted(set(names))


def test_nothing_that_ranks_say_can_become_markup() -> None:
    for name in assets.names():
        text = assets.text(name)
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, f"{name} uses {way}"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to read JavaScript with")
def test_the_joined_module_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "joined.mjs"
    path.write_text(assets.joined("anywidget.js"))
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
