"""SIGTERM for real: to a rank, to the supervisor, to all; in cells, loops, collectives, saves and heals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted, HealError, NotAttached, RankLost, UsageError
from meshbook.wire import checkpoint_folders, keys
from tests.budget import WAIT_S, when, when_printed
from tests.controller.elastic_training import CELL, curve, set_up
from tests.gate import Gate
from tests.host_processes import pid_of

pytestmark = pytest.mark.usefixtures("starts_meshes")

LOOP = """
import meshbook
steps = 0
while not meshbook.preempted():
    total = torch.ones(1)
    dist.all_reduce(total)  # a rank that left the loop a step early would leave the others here
    steps += 1
    if steps == 1: print("at work")
steps
"""
STUCK = "print('at work')\nif rank: dist.all_reduce(torch.ones(1))\nelse:\n    import time\n    time.sleep(1000)"


@pytest.fixture
def mesh(three: Mesh) -> Iterator[Mesh]:
    """The shared mesh, without a plan; healed after the test."""
    three.on_preemption(grace_s=20)
    yield three
    three.heal()


def sigterm(mesh: Mesh, *ranks: int) -> None:
    """SIGTERM to ranks; to none: the supervisor."""
    for pid in [pid_of(mesh, rank) for rank in ranks] or [mesh.session.info.supervisor_pid]:
        os.kill(pid, signal.SIGTERM)


def begin(mesh: Mesh, source: str) -> Any:
    """A cell that runs on all ranks: all have printed `at work`, which no other cell has since the call of this."""
    before = [mesh.logs(rank).count("at work") for rank in mesh.ranks]
    future = mesh.run(source, wait=False)
    when(lambda: all(mesh.logs(rank).count("at work") > before[rank] for rank in mesh.ranks))
    return future


def ended(mesh: Mesh) -> str:
    """Why the mesh has ended; nothing of it is left."""
    supervisor = mesh.session.info.supervisor_pid
    when(lambda: mesh.session.ended is not None)
    when(lambda: not psutil.pid_exists(supervisor))
    assert mesh.session.info.name not in [found.name for found in keys.list_connections()]
    return str(mesh.session.ended)


def exit_of(mesh: Mesh, rank: int) -> str | None:
    when(lambda: rank in mesh.session.lost)
    return mesh.status().ranks[rank].exit


# ---- one rank


def test_a_loop_that_asks_ends_on_all_ranks_at_the_same_step_and_is_saved_and_the_rank_leaves(
    mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.run("weights = torch.arange(4.0)")
    mesh.on_preemption(tmp_path / "run1", "weights", "steps", grace_s=60)
    cell = begin(mesh, LOOP)
    sigterm(mesh, 2)
    done = cell.result(WAIT_S).values.same()
    assert exit_of(mesh, 2) == "left (SIGTERM)"
    text = capsys.readouterr().err
    assert f"rank 2 received SIGTERM: weights, steps will be saved in {tmp_path / 'run1'} when the cell has" in text
    assert "weights, steps are saved in" in text
    assert "rank 2 leaves; %mesh heal puts a new process in its place" in text
    mesh.heal()
    mesh.run("weights = torch.zeros(4); steps = 0")
    mesh.restore(tmp_path / "run1")
    assert mesh.run("(steps, weights.sum().item())").values.same() == (done, 6.0)


def test_an_elastic_loop_ends_after_a_step_and_goes_on_there_after_the_heal(mesh: Mesh, tmp_path: Path) -> None:
    set_up(mesh, "ddp")
    mesh.run(CELL)
    expected = curve(mesh)
    gate = Gate(tmp_path / "gate")
    # steps that take so long that the loop does not end before the ranks have agreed on one
    slow = f"step >= 15 and not __import__('os').path.exists({str(gate.path)!r})"
    set_up(mesh, "ddp", fault=f"if {slow}: print('at work'); __import__('time').sleep(0.3)")
    mesh.on_preemption(tmp_path / "run1", "model", "opt", "losses", grace_s=120)
    cell = begin(mesh, CELL)
    sigterm(mesh, 1)
    with pytest.raises(CellError, match=r"rank 1 received SIGTERM; the loop was ended after step \d+"):
        cell.result(WAIT_S)
    gate.open()
    assert exit_of(mesh, 1) == "left (SIGTERM)"
    reached = len(mesh.run("losses", ranks=[0], echo=False).values[0])
    mesh.heal()
    mesh.run(CELL)  # goes on after that step, not after step 10
    assert curve(mesh) == expected
    mesh.restore(tmp_path / "run1")
    assert {len(losses) for losses, _ in curve(mesh).values()} == {reached}
    assert curve(mesh)[0][0] == expected[0][0][:reached]


def test_without_a_plan_a_rank_leaves_its_cell_at_once(pair: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    cell = begin(pair, STUCK)
    sigterm(pair, 1)
    with pytest.raises(RankLost, match=r"rank 1 .*left \(SIGTERM\)"):
        cell.result(WAIT_S)
    assert "nothing is saved, because nothing was asked for (mesh.on_preemption)" in capsys.readouterr().err
    assert exit_of(pair, 1) == "left (SIGTERM)"
    assert pair.heal().ranks == (1,)


def test_a_handler_of_the_users_own_stays_the_users(mesh: Mesh, tmp_path: Path) -> None:
    mesh.on_preemption(tmp_path / "run1", "caught", grace_s=60)
    mesh.run("import signal\ncaught = []\nbefore = signal.signal(signal.SIGTERM, lambda *_: caught.append(rank))")
    sigterm(mesh, 0)
    when(lambda: mesh.run("len(caught)", echo=False).values[0] == 1)
    assert not (tmp_path / "run1").exists()
    mesh.run("_ = signal.signal(signal.SIGTERM, before)")


@pytest.mark.thorough
def test_what_a_cell_has_cut_that_had_to_be_stopped_is_not_saved(
    mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.run("x = 1")
    mesh.checkpoint(tmp_path / "run1", "x", asynchronous=False)
    mesh.on_preemption(tmp_path / "run1", "x", grace_s=120)
    cell = begin(mesh, STUCK)
    sigterm(mesh, 2)
    text = when_printed("rank 2 received SIGTERM", capsys)
    cell.interrupt()  # what the supervisor does after 80 s
    with pytest.raises(CellInterrupted):
        cell.result(WAIT_S)
    assert exit_of(mesh, 2) == "left (SIGTERM)"
    text += when_printed("rank 2 leaves", capsys)
    assert "no checkpoint was written: the cell was stopped, perhaps in the middle of a step" in text
    assert f"the last one is {tmp_path / 'run1' / 'save-0001'}" in text
    assert len(checkpoint_folders.list_checkpoints(tmp_path / "run1")) == 1


# ---- the supervisor, and all


def test_a_supervisor_saves_what_was_asked_for_and_ends_with_status_0(pair: Mesh, tmp_path: Path) -> None:
    pair.run("x = torch.arange(3)")
    pair.on_preemption(tmp_path / "run1", "x")
    sigterm(pair)
    reason = ended(pair)
    entry = checkpoint_folders.find_checkpoint(tmp_path / "run1")
    assert f"x is saved in {entry.folder}: on a new mesh, %mesh restore {tmp_path / 'run1'}" in reason
    with pytest.raises(NotAttached, match="received SIGTERM; x is saved in"):
        pair.run("x")


@pytest.mark.thorough
def test_of_an_elastic_loop_that_has_to_be_stopped_the_last_snapshot_is_saved(
    pair: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(pair, "ddp", fault="if step == 15: print('at work'); __import__('time').sleep(1000)")
    pair.on_preemption(tmp_path / "run1", "model", "losses", "attempt", grace_s=120)
    cell = begin(pair, CELL)
    sigterm(pair)
    when_printed("received SIGTERM", capsys)
    cell.interrupt()
    assert "model, losses are saved in" in (reason := ended(pair))
    assert "as of step 10 of the elastic loop that was cut off, without attempt" in reason
    with create_mesh(2) as later:
        set_up(later, "ddp")
        later.run("losses = []")
        later.restore(tmp_path / "run1")
        assert {len(losses) for losses, _ in curve(later).values()} == {10}


def test_sigterm_to_every_process_of_a_job_saves_once_and_leaves_nothing(pair: Mesh, tmp_path: Path) -> None:
    pair.run("x = rank")
    pair.on_preemption(tmp_path / "run1", "x", "steps")
    begin(pair, LOOP)
    supervisor = psutil.Process(pair.session.info.supervisor_pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            process.send_signal(signal.SIGTERM)
    assert "x, steps are saved in" in ended(pair)
    assert len(checkpoint_folders.list_checkpoints(tmp_path / "run1")) == 1
    when(lambda: not any(process.is_running() for process in processes))


@pytest.mark.thorough
def test_the_ranks_of_a_host_that_receives_sigterm_leave_after_the_save(tmp_path: Path) -> None:
    with create_mesh(2, num_hosts=2) as mesh:
        mesh.run("x = rank")
        mesh.on_preemption(tmp_path / "run1", "x")
        supervisor = psutil.Process(mesh.session.info.supervisor_pid)
        hosts = [child for child in supervisor.children() if "meshbook.host.main" in child.cmdline()]
        (second,) = [host for host in hosts if host.cmdline()[-3] == "1"]
        second.send_signal(signal.SIGTERM)
        assert exit_of(mesh, 1) == "left (SIGTERM)"
        assert checkpoint_folders.find_checkpoint(tmp_path / "run1").manifest.world_size == 2

        def is_healed() -> bool:  # the supervisor learns of the host's end a moment after the rank's
            try:
                return mesh.heal().ranks == (1,)
            except HealError:
                return False

        when(is_healed)  # the host is started again
        assert mesh.run("rank").values.stack().tolist() == [0, 1]


# ---- while something else is under way


@pytest.mark.thorough
def test_sigterm_while_a_checkpoint_is_saved_leaves_both(pair: Mesh, tmp_path: Path) -> None:
    pair.run("x = torch.ones(1 << 22) * rank")
    pair.on_preemption(tmp_path / "run1", "x")
    pair.checkpoint(tmp_path / "run1", "x", step=800)
    sigterm(pair)
    assert "x is saved in" in ended(pair)
    assert len(checkpoint_folders.list_checkpoints(tmp_path / "run1")) == 2


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("run1",), {}, "a path and names go together"),
        ((None, "x"), {}, "a path and names go together"),
        (("run1", "x y"), {}, "is not a name that a cell has bound"),
        (("run1", "x"), {"grace_s": 0}, "grace_s is the number of seconds between SIGTERM and SIGKILL, not 0"),
        (("run1", "x"), {"grace_s": "30"}, "grace_s is the number of seconds"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    mesh: Mesh, arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        mesh.on_preemption(*arguments, **options)
