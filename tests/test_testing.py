"""The pytest plugin, in runs of pytest as its users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_meshes")

TESTS = """
import time
import pytest, torch
import torch.distributed as dist

SCALE = 3

def helper(number):
    return number * SCALE

@pytest.mark.mesh(ranks=2)
def test_body_on_ranks():
    total = torch.ones(2) * dist.get_rank()
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]

@pytest.mark.mesh(ranks=2)
@pytest.mark.parametrize("number", [1, 2])
def test_arguments(number, tmp_path):
    assert helper(number) == 3 * number and tmp_path.exists()

@pytest.mark.mesh(ranks=2)
def test_one_rank_is_wrong():
    assert dist.get_rank() == 0, "this rank is another"

@pytest.mark.mesh(ranks=2)
def test_skipped_on_ranks():
    pytest.skip("not today")

def test_binds_a_name(mesh):
    mesh.run("left = 1")
    assert len(mesh) == 2

def test_finds_no_name_of_another_test(mesh):
    assert mesh.run("'left' in globals()").values.same() is False

@pytest.mark.mesh(ranks=2, timeout=2)
def test_that_hangs():
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()

@pytest.mark.mesh(ranks=2)
def test_after_a_hang():
    dist.barrier()

def test_kills_a_rank(mesh):
    mesh.kill(1)

@pytest.mark.mesh(axes={"dp": 2})
def test_after_a_kill():
    dist.barrier()

def test_on_a_mesh_after_a_kill(mesh):
    assert len(mesh.run("rank").values) == 2
"""


def run_pytest(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_user.py").write_text(source)
    # An installation from before the plugin has no entry point for it.
    is_installed = bool(entry_points(group="pytest11", name="meshbook"))
    plugin = [] if is_installed else ["-p", "meshbook.testing"]
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=2 * WAIT_S, check=False, env=os.environ
    )


@pytest.mark.timeout(300)  # a dozen tests, and two meshes
def test_bodies_run_on_every_rank_failures_are_folded_and_hangs_explained(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS, "--mesh-ranks=2")
    assert "2 failed, 9 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    report = done.stdout
    assert "rank 1: AssertionError: this rank is another" in report
    assert 'assert dist.get_rank() == 0, "this rank is another"' in report
    assert "During handling" not in report
    assert "test_that_hangs did not end on all ranks within 2 s" in report
    assert "rank 1" in report.partition("within 2 s")[2].partition("short test summary")[0]


@pytest.mark.parametrize(("marker", "wrong"), [("mesh(rank=2)", "does not know rank"), ("mesh(2)", "does not know 2")])
def test_a_marker_that_is_misspelt_ends_the_run_before_it_begins(tmp_path: Path, marker: str, wrong: str) -> None:
    done = run_pytest(tmp_path, f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    assert done.returncode == 4
    assert wrong in done.stderr
