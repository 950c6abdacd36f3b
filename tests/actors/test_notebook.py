"""notebooks/rl_loop.ipynb, executed as anyone would: it learns, it loses a generator, and it says what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import meshbook

pytestmark = pytest.mark.usefixtures("starts_meshes")

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_notebook_learns_and_goes_on_after_a_generator_was_killed(tmp_path: Path) -> None:
    done = meshbook("run", str(ROOT / "notebooks" / "rl_loop.ipynb"), "--out", str(tmp_path), cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "rank 1 of 'generators' is lost" in done.out
    assert "killed by SIGKILL" in done.out
    assert "two generators left; reward after 20 rounds" in done.out
    assert "scorer runs the new Scorer (changed: score; new: count)" in done.out
    found = re.search(r"accuracy on new digits: (0\.\d+) before, (0\.\d+) after 40 rounds", done.out)
    assert found is not None, done.out
    assert float(found[2]) > 2 * float(found[1])
