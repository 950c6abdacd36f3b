"""Notebooks that tell a story, executed as a reader would: three hangs explained and gone on from, a training that
survives the loss of a rank and a resize, a failure that is replayed in one process, and the origin of a NaN."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import meshbook

pytestmark = pytest.mark.usefixtures("starts_meshes")

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


def test_the_notebook_about_failures_has_an_undisturbed_runs_curve_and_deals_each_row_once(
    tmp_path: Path,
) -> None:
    path = ROOT / "notebooks" / "surviving_failures.ipynb"
    done = meshbook("run", str(path), "--out", str(tmp_path), cwd=tmp_path)
    assert done.status == 0, done.err
    assert re.search(r"rank 2 \(pid \d+ on .*\) was killed by SIGKILL while the cell ran", done.out)
    assert re.search(r"rank 2 is back \(fresh process", done.out)
    # If the loss comes when only some of the others have taken the step, that is said, and the loop goes back further.
    differs = r"(it differs between the other ranks|its replicas on ranks .* differ)"
    had = rf"model.* from rank 0|not on rank 2: .*model.* \({differs}\)"
    assert re.search(had, done.out)
    assert re.search(r"elastic: goes on at step \d+", done.out)
    assert "120 losses; the two curves differ by at most 0.0e+00" in done.out
    assert "120 losses are back" in done.out
    assert "4 → 3 ranks" in done.out
    assert "70 losses; each of 3840 rows was in 1 to 1 batches" in done.out


def test_the_notebook_about_a_replay_ends_in_one_process_as_on_the_mesh(tmp_path: Path) -> None:
    path = tmp_path / "replaying_a_failure.ipynb"  # a copy: bundles are written beside it
    shutil.copy(ROOT / "notebooks" / path.name, path)
    done = meshbook("run", str(path), "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert done.status == 0, done.err
    assert "bundle failures/f1 (" in done.out
    assert done.out.count("as on the mesh: FloatingPointError at line 15 of an earlier cell") == 2
    assert "(Pdb) [[1, 3]]" in done.out
    assert "bundle failures/f2 (of ranks 0-3" in done.out


def test_the_notebook_about_a_nan_names_its_origin_and_what_is_not_equal(tmp_path: Path) -> None:
    path = ROOT / "notebooks" / "finding_a_nan.ipynb"
    done = meshbook("run", str(path), "--out", str(tmp_path), cwd=tmp_path)
    assert done.status == 0, done.err
    found = "first non-finite: step 17, rank 2, model.layers.0 softmax (forward), cell 2, line 15 in forward"
    assert done.out.count(f"{found}; input max") == 2  # under the cell, and asked for
    assert "; reached ranks 0-3 by all_reduce #" in done.out
    assert "25 updates watched, nothing found." in done.out
    assert re.search(r"model, opt: equal on ranks 0-3 \(\d+ tensors and values compared\)", done.out)
    assert re.search(r"model.layers.2.out.bias on ranks 1,3: \d+ of 16 differ", done.out)
    assert "opt.param_groups.0.lr on rank 3: 0.003 instead of 0.001" in done.out
    assert re.search(r"model.layers.2.out.bias on rank 1: 1 of 16 differ, max [\d.e-]+\n", done.out)
    assert "equal: False ['model.layers.2.out.bias']" in done.out
