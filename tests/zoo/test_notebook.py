"""notebooks/debugging_a_hang.ipynb and surviving_failures.ipynb, executed as a reader would: three hangs explained and
gone on from, and a training that survives the loss of a rank."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.commands import meshbook

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_notebook_about_a_hang_tells_its_story(tmp_path: Path) -> None:
    path = ROOT / "notebooks" / "debugging_a_hang.ipynb"
    done = meshbook("run", str(path), "--out", str(tmp_path), cwd=tmp_path)
    assert done.status == 0, done.err
    # What each cell shows, by its number.
    shown = dict(re.findall(r"^\[ *(\d+)/\d+\][^\n]*\n(.*?)(?=^\[|\Z)", done.out, re.MULTILINE | re.DOTALL))
    why, stacks = [text for text in shown.values() if "Next:" in text], shown["5"]
    assert len(why) == 3
    assert "Rank 3 has ended cell 2 without coming to all_reduce #11, where ranks 0-2 wait (cell 2, line 7" in why[0]
    assert "rank 3 made 10 collectives of the group" in why[0]
    assert "> cell 2, line 7 in train: dist.all_reduce(gradient)" in stacks
    assert "Rank 2 waits for a queue at cell 8, line 11" in why[1]
    assert re.search(r"Rank 1 (is late but moves|comes last)", why[2])
    assert shown["18"].split()[0] == "4.0"


def test_the_notebook_about_failures_kills_a_rank_and_ends_with_the_curve_of_an_undisturbed_run(tmp_path: Path) -> None:
    path = ROOT / "notebooks" / "surviving_failures.ipynb"
    done = meshbook("run", str(path), "--out", str(tmp_path), cwd=tmp_path)
    assert done.status == 0, done.err
    assert re.search(r"rank 2 \(pid \d+ on .*\) was killed by SIGKILL while the cell ran", done.out)
    assert re.search(r"rank 2 is back \(fresh process, .*model, opt, losses", done.out)
    assert re.search(r"elastic: goes on at step \d+", done.out)
    assert "120 losses; the two curves differ by at most 0.0e+00" in done.out
    assert "120 losses are back" in done.out
