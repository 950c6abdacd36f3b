"""Ranks that die under a notebook."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.kernel.frontend import FrontEnd, has_exited, kernel, wait_until


@pytest.fixture
def front(run: object) -> Iterator[FrontEnd]:
    with kernel() as front:
        assert front.run("import time, os\nx = rank\nprint('x is', x)").status == "ok"
        yield front


@pytest.mark.parametrize(
    "busy", ["time.sleep(60)", "dist.barrier() if rank == 0 else time.sleep(60)", "while True: pass"]
)
def test_a_killed_rank_ends_the_cell_and_the_others_keep_their_state(front: FrontEnd, busy: str) -> None:
    pids = front.pids()
    cell = front.send(f"print('the last words', flush=True)\n{busy}")
    front.wait_until_shown(cell, lambda cell: "last words" in cell.stdout)
    os.kill(pids["rank 1"], signal.SIGKILL)
    front.wait(cell)
    assert cell.reply["ename"] == "RankLost"
    assert "KeyboardInterrupt" not in cell.traceback
    for part in ("rank 1", f"pid {pids['rank 1']}", "SIGKILL", "the last words", "Rank 0 keeps its state"):
        assert part in cell.traceback
    assert front.run("x").result == "0"
    assert front.run("%%controller\nx").result == "[0] 0"
    assert front.run("%%controller\nfloat(x + 1)").result == "1.0"


def test_a_rank_that_leaves_by_itself_is_named_with_its_status(front: FrontEnd) -> None:
    cell = front.run("if rank == 1: os._exit(3)\ntime.sleep(60)")
    assert cell.reply["ename"] == "RankLost"
    assert "exited with status 3" in cell.traceback


def test_a_rank_that_died_between_cells_is_told_of_with_the_next_one_once(front: FrontEnd) -> None:
    pid = front.pids()["rank 1"]
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: has_exited(pid), 5, "the rank's end")
    wait_until(lambda: front.value("get_ipython().meshbook.mesh.session.lost") == (1,), 5, "the news of it")
    cell = front.run("x")
    assert f"rank 1 (pid {pid}" in cell.notes
    assert "while no cell ran" in cell.notes
    assert cell.result == "0"
    assert front.run("x").notes == ""


def test_a_cell_for_a_rank_that_is_gone_is_refused(front: FrontEnd) -> None:
    front.run("if rank == 1: os._exit(3)")
    cell = front.run("%%mesh --ranks 1\nx")
    assert cell.reply["ename"] == "RankLost"
    assert "nothing was run" in cell.reply["evalue"]


def test_when_the_supervisor_dies_the_cell_ends_and_a_new_mesh_can_be_had(front: FrontEnd) -> None:
    pids = front.pids()
    cell = front.send("print('at it', flush=True)\ntime.sleep(60)")
    front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
    os.kill(pids["supervisor"], signal.SIGKILL)
    assert front.wait(cell, timeout_s=10).reply["ename"] == "NotAttached"
    assert "%mesh start" in front.run("x").traceback
    wait_until(lambda: all(map(has_exited, pids.values())), 10, "the end of its ranks")
    assert front.run("%mesh start -n 2\nrank").result == "[0] 0\n[1] 1"
