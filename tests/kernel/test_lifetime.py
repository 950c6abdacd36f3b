"""Kernels come and go; what that does to meshes. Real kernels, ended in every way there is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from meshbook.controller.starting import attach
from meshbook.kernel.warm_start import mesh_name_stem
from meshbook.supervisor.clients import EMPTY_TTL_S
from meshbook.wire.folders import runtime_folder
from tests.budget import when
from tests.conftest import ROOT
from tests.kernel.frontend import FrontEnd, has_exited, kernel
from tests.leaks import Run

pytestmark = pytest.mark.usefixtures("starts_kernels")


@pytest.fixture(autouse=True)
def own_runtime_folder(run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test counts the meshes that there are: those of its own kernels."""
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(run.runtime_dir_of(request.node.nodeid)))


def folders() -> list[str]:
    """Of the meshes of this test."""
    return sorted(place.name for place in runtime_folder().iterdir() if not place.name.startswith("."))


def again(front: FrontEnd) -> FrontEnd:
    """A front end for the kernel that came after this one's."""
    front.close()
    return FrontEnd(front.manager)


def test_a_kernel_that_ran_no_cell_leaves_nothing_either() -> None:
    with kernel() as front:
        assert front.run("1 + 1", store_history=False).result == "2"
        when(lambda: folders() != [], "a warm supervisor")
    when(lambda: folders() == [], "its end")


def test_a_warm_supervisor_is_the_one_that_the_first_cell_uses_and_shutting_the_kernel_down_leaves_nothing() -> None:
    with kernel() as front:
        when(lambda: folders() != [], "a warm supervisor")
        (warm,) = folders()
        assert "started 2 ranks in" in front.run("1").notes
        assert folders() == [warm]
        assert front.value("get_ipython().meshbook.mesh.name") == warm
        pids = front.pids()
    when(lambda: all(map(has_exited, pids.values())), "the end of the mesh")
    assert folders() == []


def test_a_restarted_kernel_is_back_on_its_mesh() -> None:
    with kernel() as front:
        front.run("import time\nx = rank\nlater = 1")
        pids = front.pids()
        running = front.send("print('at it', flush=True)\ntime.sleep(60)")
        front.wait_until_shown(running, lambda cell: "at it" in cell.stdout)
        front.manager.restart_kernel()
        front = again(front)
        cell = front.run("%%controller\nx")
        assert cell.result == "[0] 0\n[1] 1"
        assert "kept what they hold (" in cell.notes
        assert "later" in cell.notes
        assert front.run("x + 1").result == "[0] 1\n[1] 2"  # what the old kernel ran was interrupted
        assert front.pids() == pids
        front.close()
        front.manager.shutdown_kernel()
        when(lambda: all(map(has_exited, pids.values())), "the end of the mesh")


def test_a_mesh_to_which_another_kernel_is_attached_is_left_to_that_with_a_word() -> None:
    with kernel() as front:
        front.run("kept = rank")
        pids = front.pids()
        (name,) = folders()
        mesh = attach(name, kind="kernel")
        front.manager.restart_kernel()
        front = again(front)
        notes = front.run("%%controller\n1").notes
        assert re.search(
            rf"mesh {name} is left to .*kernel \(pid {os.getpid()}\).*%mesh attach {name} goes back", notes
        )
        front.run(f"%mesh attach {name}")
        assert front.pids() == pids
        front.close()
        mesh.stop()


def test_a_mesh_that_is_to_be_kept_outlives_the_kernel_and_another_notebook_can_have_it() -> None:
    with kernel() as front:
        front.run("%mesh start -n 2 --name kept-by-test --keep\nx = rank")
        pids = front.pids()
    assert not any(map(has_exited, pids.values()))
    with kernel() as front:
        cell = front.run("%mesh attach kept-by-test\nx")
        assert cell.result == "[0] 0\n[1] 1"
        front.run("%mesh stop")
    when(lambda: all(map(has_exited, pids.values())), "the end of the mesh")


def test_a_notebook_that_starts_its_mesh_may_be_run_again_and_restarted() -> None:
    cells = ("%mesh start -n 2", "x = rank", "x * 10")
    with kernel() as front:
        for _ in range(2):
            found = [front.run(cell) for cell in cells]
            assert [cell.status for cell in found] == ["ok", "ok", "ok"]
            assert found[-1].result == "[0] 0\n[1] 10"
        assert "is running already; its ranks keep what they hold (x)" in found[0].stdout
        pids = front.pids()
        front.manager.restart_kernel()
        front = again(front)
        first = front.run("%mesh start -n 2")
        assert first.status == "ok"
        assert "is running already; its ranks keep what they hold (x). %mesh restart gives fresh ones" in first.stdout
        assert "%mesh restart gives fresh ranks" in first.notes
        assert front.pids() == pids
        assert front.run("x").result == "[0] 0\n[1] 1"
        front.close()
        front.manager.shutdown_kernel()
        when(lambda: all(map(has_exited, pids.values())), "the end of the mesh")


def test_one_line_says_what_a_start_waits_for_and_is_gone_when_the_ranks_are_ready() -> None:
    with kernel() as front:
        cell = front.send("%mesh start -n 2 --fresh")
        front.wait_until_shown(cell, lambda cell: "of 2 ranks are ready" in cell.text)
        assert "is ready, after" in front.wait(cell).stdout
        assert [output["data"]["text/plain"] for output in cell.outputs if output["type"] == "display_data"] == [""]


def test_a_mesh_that_is_not_what_start_asks_for_is_replaced_by_restart() -> None:
    with kernel() as front:
        front.run("x = rank")
        pids, name = front.pids(), front.value("get_ipython().meshbook.mesh.name")
        refused = front.run("%mesh start -n 1")
        assert refused.reply["ename"] == "MeshInUse"
        assert "it has 2 ranks, and 1 are asked for. %mesh restart, with the same options" in refused.reply["evalue"]
        assert front.run("x").result == "[0] 0\n[1] 1"
        assert "has fresh ranks" in front.run("%mesh restart --axes dp=1,tp=2").stdout
        assert all(map(has_exited, pids.values()))
        assert front.value("get_ipython().meshbook.mesh.name") == name
        assert front.run("'x' in dir(), mesh.mesh_dim_names").result == "(False, ('dp', 'tp'))"
        assert "is running already" in front.run("%mesh start --axes dp=1,tp=2").stdout
        assert "axes dp=2,tp=1 are asked for" in front.run("%mesh start --axes dp=2,tp=1").reply["evalue"]


@pytest.mark.thorough
def test_a_mesh_with_a_dead_rank_is_not_what_start_asks_for_and_one_without_living_ranks_is_replaced() -> None:
    with kernel() as front:
        front.run("import os\nx = rank")
        pids = front.pids()
        front.run("if rank == 1: os._exit(3)")
        assert "of its ranks 1 is gone. %mesh restart" in front.run("%mesh start -n 2").reply["evalue"]
        assert front.run("x").result == "0"
        front.run("os._exit(3)")
        assert "%mesh heal puts new processes in their place" in front.run("x").reply["evalue"]
        assert "is ready, after" in front.run("%mesh start -n 2").stdout
        assert front.run("rank").result == "[0] 0\n[1] 1"
        assert all(map(has_exited, pids.values()))
        front.run("os._exit(3)")
        assert "has fresh ranks" in front.run("%mesh restart").stdout
        assert front.run("world_size").result == "2"


@pytest.mark.thorough
def test_a_restarted_kernel_does_not_go_back_to_a_mesh_whose_ranks_are_all_dead() -> None:
    with kernel() as front:
        front.run("import os")
        pids = front.pids()
        front.run("os._exit(3)")
        front.manager.restart_kernel()
        front = again(front)
        cell = front.run("rank")
        assert "every rank of this notebook's mesh" in cell.notes
        assert cell.result == "[0] 0\n[1] 1"
        when(lambda: all(map(has_exited, pids.values())), "the end of the old mesh")
        front.close()
        front.manager.shutdown_kernel()


def test_an_orphaned_mesh_ends_after_the_time_to_live_that_the_last_start_asked_for() -> None:
    with kernel() as front:
        front.run("%mesh start -n 1")
        assert "is running already" in front.run("%mesh start -n 1 --ttl 1").stdout
        pids = front.pids()
        os.kill(front.pid, signal.SIGKILL)
        when(lambda: all(map(has_exited, pids.values())), "the end of the mesh")


@pytest.mark.timeout(EMPTY_TTL_S + 120)
@pytest.mark.thorough
def test_a_warm_supervisor_whose_kernel_crashed_ends_soon() -> None:
    with kernel() as front:
        when(lambda: folders() != [], "a warm supervisor")
        connection = runtime_folder() / folders()[0] / "mesh.json"
        when(connection.exists, "its connection file")
        front.run("1", store_history=False)
        os.kill(front.pid, signal.SIGKILL)
        when(lambda: folders() == [], "its end", within_s=EMPTY_TTL_S + 60)


@pytest.mark.thorough
def test_what_was_set_in_the_environment_since_the_kernel_began_reaches_the_ranks() -> None:
    with kernel() as front:
        front.run("%%controller\nimport os\nos.environ['SET_BY_TEST'] = 'yes'")
        assert front.run("import os\nos.environ['SET_BY_TEST']").result == "'yes'"


@pytest.mark.thorough
def test_a_kernel_starts_in_a_folder_whose_files_are_named_like_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')\n")
    with kernel(cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}) as front:
        assert front.run("%%controller\n1 + 1").result == "2"


@pytest.mark.thorough
def test_settings_that_cannot_be_read_are_told_of_by_the_first_cell_and_the_kernel_lives() -> None:
    with kernel(env={"MESHBOOK_RANKS": "many"}) as front:
        cell = front.run("1")
        assert cell.reply["ename"] == "UsageError"
        assert "MESHBOOK_RANKS='many' is not a number of ranks" in cell.traceback
        assert front.run("%%controller\n1 + 1").result == "2"


@pytest.mark.parametrize(
    ("owner", "stem"),
    [
        ("/home/me/train.ipynb", "train"),
        ("/run/user/1/jupyter/kernel-0f1c-22.json", "notebook"),
        ("pid 12", "notebook"),
    ],
)
def test_a_mesh_is_named_after_its_notebook(owner: str, stem: str) -> None:
    assert mesh_name_stem(owner) == stem
