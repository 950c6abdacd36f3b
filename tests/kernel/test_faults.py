"""Ranks that die under a notebook."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook.controller.starting import attach
from meshbook.wire.checkpoint_folders import find_checkpoint
from meshbook.wire.process_control import kill_supervisor
from tests.budget import when
from tests.gate import Gate
from tests.kernel.frontend import FrontEnd, has_exited, kernel

pytestmark = pytest.mark.usefixtures("starts_kernels")


@pytest.fixture
def front(run: object) -> Iterator[FrontEnd]:
    with kernel() as front:
        assert front.run("import time, os\nx = rank\nprint('x is', x)").status == "ok"
        yield front


def test_a_rank_that_died_between_cells_is_named_with_the_next_one_and_missed_in_those_after_it(
    front: FrontEnd,
) -> None:
    pid = front.pids()["rank 1"]
    os.kill(pid, signal.SIGTERM)
    when(lambda: has_exited(pid), "the rank's end")
    when(lambda: front.value("get_ipython().meshbook.mesh.session.lost") == (1,), "the news of it")
    cell = front.run("x")
    assert f"rank 1 (pid {pid}" in cell.notes
    assert "while no cell ran" in cell.notes
    assert cell.result == "0"
    assert front.run("x").notes == "on rank 0: rank 1 is lost; %mesh heal puts a new process in its place"
    assert front.run("%%mesh --ranks 0\nx").notes == ""


def test_what_was_asked_for_is_saved_although_the_kernel_stops_its_mesh_meanwhile(
    front: FrontEnd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run1"
    front.run(f"%mesh checkpoint {folder} x --on-preemption --grace 60")
    pids, gate, said = front.pids(), Gate(tmp_path / "gate"), [""]

    def hears(text: str) -> bool:
        said[0] += capsys.readouterr().err
        return text in said[0]

    other = attach(front.value("get_ipython().meshbook.mesh.name"))
    try:
        # Another client's cell: jupyter_client interrupts a kernel, and what it runs, before it shuts it down.
        other.run(f"print('at it', flush=True)\n{gate.wait}", wait=False)
        when(lambda: all("at it" in other.logs(rank) for rank in other.ranks), "the beginning of the cell")
        os.kill(pids["supervisor"], signal.SIGTERM)
        when(lambda: hears("received SIGTERM"), "the news of it")
        front.manager.shutdown_wait_time = 5.0  # jupyter_client's own: the kernel waits for the save
        front.manager.shutdown_kernel()  # as JupyterLab does with its kernels when it receives SIGTERM
        gate.open()
        when(lambda: all(map(has_exited, pids.values())), "the end of the mesh")
    finally:
        other.session.close()
    assert find_checkpoint(folder).folder.name == "save-0001"


def test_when_the_supervisor_and_its_standby_die_the_cell_ends_and_a_new_mesh_can_be_had(front: FrontEnd) -> None:
    pids = front.pids()
    cell = front.send("print('at it', flush=True)\ntime.sleep(60)")
    front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
    kill_supervisor(pids["supervisor"])
    assert front.wait(cell).reply["ename"] == "NotAttached"
    assert "%mesh start" in front.run("x").traceback
    when(lambda: all(map(has_exited, pids.values())), "the end of its ranks")
    assert front.run("%mesh start -n 2\nrank").result == "[0] 0\n[1] 1"


def test_a_notebook_goes_on_when_the_supervisor_is_killed_as_a_cell_asks_and_as_one_is_stopped(front: FrontEnd) -> None:
    killing = "os.kill({}, 9) if rank == 0 else None"
    front.input_replies[:] = ["yes", "yes"]
    cell = front.run(killing.format(front.pids()["supervisor"]) + "\ninput('go on? ')")
    assert cell.result == "'yes'", cell.text
    later = front.run("x")
    front.wait_until_shown(later, lambda later: "its standby" in cell.text + later.text)
    cell = front.send(killing.format(front.pids()["supervisor"]) + "\nprint('at it', flush=True)\ntime.sleep(60)")
    front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    assert front.run("x").result == "[0] 0\n[1] 1"


def test_a_mesh_is_healed_by_a_line_and_the_notebook_goes_on(front: FrontEnd) -> None:
    front.run("%%mesh --setup\nclass Net(torch.nn.Linear):\n    def double(self): return self.weight * 2")
    front.run("step = 7\nbest = max(3, 4)\nshare = torch.ones(2) * (rank + 1)")
    pids = front.pids()
    cell = front.send("print('busy', flush=True)\ndist.barrier() if rank == 0 else time.sleep(60)")
    front.wait_until_shown(cell, lambda cell: "busy" in cell.stdout)
    os.kill(pids["rank 1"], signal.SIGKILL)
    front.wait(cell)
    for part in ("rank 1", f"pid {pids['rank 1']}", "SIGKILL", "Rank 0 keeps its state"):
        assert part in cell.traceback
    assert front.run("%%controller\nx").result == "[0] 0"
    assert "Next: %mesh heal puts a new process in its place, and the others keep what they hold" in cell.traceback
    assert "Rank 1 is gone; " in front.run("%mesh status").result
    assert "%mesh heal puts a new process in its place" in front.run("%mesh status").result
    healed = front.run("%mesh heal")
    assert healed.status == "ok", healed.traceback
    assert "rank 1 is back (fresh process" in healed.stdout
    assert "setup replayed (1 cell)" in healed.stdout
    assert "not on rank 1: share (cells compute it from the rank)" in healed.stdout
    assert "not on rank 1: best (rank 0 is the only other: nothing to compare with)" in healed.stdout
    assert "if these do not: %mesh heal --copy best\n" in healed.stdout
    assert front.run("%mesh heal --copy best").stdout == (
        "best from rank 0 (rank 0 is the only other: nothing to compare with), copied to rank 1\n"
    )
    assert front.run("step, tuple(Net(2, 2).double().shape), best, 'share' in globals()").result == (
        "[0] (7, (2, 2), 4, True)\n[1] (7, (2, 2), 4, False)"
    )
    assert front.run("t = torch.ones(1)\ndist.all_reduce(t)\nint(t)").result == "2"
    assert "gone" not in front.run("%mesh status").result
    assert "nothing to heal: all 2 ranks are alive" in front.run("%mesh heal").stdout


def test_a_mesh_is_resized_by_a_line_and_the_notebook_goes_on(front: FrontEnd) -> None:
    front.run("%%mesh --setup\nimport math")
    resized = front.run("%mesh resize 3")
    assert resized.status == "ok", resized.traceback
    assert "2 → 3 ranks" in resized.stdout
    assert "rank 2 is new · setup replayed (1 cell)" in resized.stdout
    assert front.run("t = torch.ones(1)\ndist.all_reduce(t)\nint(t), world_size").result == "(3, 3)"
    assert front.value("len(get_ipython().meshbook.mesh)") == 3
    assert "ranks 1-2 left" in front.run("%mesh resize rank=1").stdout
    assert front.run("world_size").result == "1"
    for wrong in ("", "many", "2 3"):
        refused = front.run(f"%mesh resize {wrong}")
        assert refused.reply["ename"] == "UsageError"
        assert "%mesh resize 6" in refused.reply["evalue"]
    front.run("%%mesh --bg\nprint('busy', flush=True)\ntime.sleep(60)")
    assert "runs on rank 0; wait for it, or press Stop" in front.run("%mesh resize 2").reply["evalue"]
    front.run("%mesh interrupt")
