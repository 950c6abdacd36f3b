"""Connections break and processes are killed: nothing is lost but what they held, and no line is shown twice."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import attach, create_mesh
from meshbook.errors import CellInterrupted, NotAttached
from meshbook.wire import keys
from meshbook.wire.checkpoint_folders import list_checkpoints
from meshbook.wire.processes import forks_of
from tests.budget import WAIT_S, when
from tests.connections import cut
from tests.controller.test_heal import kill
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")

NUMBERS = list(range(100))


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with create_mesh(2) as mesh:
        yield mesh


def numbers_in(output: str) -> list[int]:
    """The numbers that a cell printed, one a line, behind the mark of its rank."""
    return [int(line.split()[-1]) for line in output.splitlines() if line.split()[-1].isdecimal()]


# ---- connections


def test_no_line_and_no_outcome_is_lost_when_a_ranks_connections_break(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = mesh.run(
        f"""
        import os, signal
        from tests.connections import cut, narrow, num_unread_bytes

        narrow("-service.sock")
        os.kill({mesh.status().supervisor_pid}, signal.SIGSTOP)  # so that it does not read what will be lost
        for number in range(100):
            print("x" * 2000, number)
        while not num_unread_bytes("-service.sock"):
            pass
        cut("-service.sock")
        os.kill({mesh.status().supervisor_pid}, signal.SIGCONT)
        cut("-work.sock")
        """,
        ranks=(0,),
    )
    assert numbers_in(capsys.readouterr().out) == NUMBERS
    assert ran.values[0] == 1
    for _ in range(5):  # the command of the next cell meets a connection that is broken
        mesh.run("cut('-work.sock')", ranks=(0,), echo=False)


def test_no_line_and_no_outcome_is_lost_when_a_clients_connections_break(
    mesh: Mesh, capsys: pytest.CaptureFixture[str], gate: Gate
) -> None:
    source = f"for number in range(100):\n    print(number)\n    if number == 50:\n        {gate.wait}\n'end'"
    running = mesh.run(source, ranks=(1,), wait=False)
    when(lambda: cut("control.sock") == 2)
    gate.open()
    cut("control.sock")
    assert running.result(WAIT_S).values[1] == "end"
    for _ in range(5):
        cut("control.sock")
        assert mesh.run("rank", echo=False).values.item(rank=1) == 1
    assert numbers_in(capsys.readouterr().out) == NUMBERS


# ---- the supervisor: its standby takes over

KILL = """
import os, signal

def kill_supervisor(pid):
    if rank == 0:
        os.kill(pid, signal.SIGKILL)

class Killer:  # its state is read as a checkpoint begins
    def state_dict(self):
        kill_supervisor(self.pid)
        return {"weight": torch.ones(4)}
    def load_state_dict(self, state):
        self.loaded = float(state["weight"].sum())
"""


def supervisor_of(mesh: Mesh) -> int:
    return mesh.session.info.supervisor_pid


def kill_and_wait(mesh: Mesh) -> None:
    """Kill the supervisor; return when this process knows its successor."""
    former = supervisor_of(mesh)
    os.kill(former, signal.SIGKILL)
    when(lambda: supervisor_of(mesh) != former)


@pytest.fixture(scope="module")
def pair() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}) as mesh:
        mesh.run(KILL, setup=True)
        mesh.run("kept = rank", setup=True)
        yield mesh


@pytest.fixture
def two(pair: Mesh) -> Iterator[Mesh]:
    """A mesh whose supervisor is to be killed; afterwards both ranks have what they had."""
    yield pair
    assert dict(pair.run("kept", echo=False).values) == {0: 0, 1: 1}
    log = (keys.runtime_folder() / pair.name / "supervisor.log").read_text()
    assert "defect" not in log, log


def test_the_next_cell_runs_and_one_notice_says_that_the_supervisor_was_replaced(
    two: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    former = supervisor_of(two)
    os.kill(former, signal.SIGKILL)
    assert dict(two.run("kept", ranks=(0,)).values) == {0: 0}
    assert supervisor_of(two) != former
    two.run("pass")
    said = "".join(capsys.readouterr())
    assert len(re.findall(rf"the supervisor \(pid {former}\) was killed; its standby \(pid \d+\) took over", said)) == 1
    (found,) = [connection for connection in keys.list_connections() if connection.name == two.name]
    assert found.pid == supervisor_of(two)
    other = attach(two.name)
    assert dict(other.run("kept", echo=False).values) == {0: 0, 1: 1}
    other.detach()


def test_each_line_of_a_cell_is_shown_once_when_two_supervisors_in_a_row_are_killed(
    two: Mesh, capsys: pytest.CaptureFixture[str], gate: Gate
) -> None:
    source = f"for number in range(100):\n    print(number)\n    if number == 50:\n        {gate.wait}\n'end'"
    running = two.run(source, ranks=(1,), wait=False)  # lines of ranks that are not in step are shown for each
    kill_and_wait(two)
    os.kill(supervisor_of(two), signal.SIGKILL)
    gate.open()
    assert running.result(WAIT_S).values.same() == "end"
    assert numbers_in(capsys.readouterr().out) == NUMBERS


def test_ranks_that_are_stuck_in_a_collective_can_be_stopped_after_a_kill(two: Mesh) -> None:
    pid = supervisor_of(two)
    running = two.run(f"kill_supervisor({pid})\nif rank == 0: dist.all_reduce(torch.ones(1))", wait=False)
    when(lambda: supervisor_of(two) != pid)
    when(lambda: two.status().ranks[0].state == "busy")
    two.interrupt()
    with pytest.raises(CellInterrupted):
        running.result(WAIT_S)
    assert two.run("total = torch.ones(1)\ndist.all_reduce(total)\nint(total)", echo=False).values.same() == 2


def test_large_values_arrive_whole_when_the_supervisor_is_killed_as_they_are_sent(two: Mesh) -> None:
    source = "kill_supervisor({}), torch.full((16 << 20,), rank + 1.0)"
    values = two.run(source.format(supervisor_of(two)), echo=False).values
    for rank in range(2):
        _, value = values[rank]
        assert value.shape == (16 << 20,)
        assert bool((value == rank + 1).all())
    os.kill(supervisor_of(two), signal.SIGKILL)
    two.push(large=torch.arange(8 << 20))
    assert two.run("int(large[-1])", echo=False).values.same() == (8 << 20) - 1


def test_a_checkpoint_is_committed_once_when_the_supervisor_is_killed_as_it_is_saved(two: Mesh, tmp_path: Path) -> None:
    two.run(f"killer = Killer()\nkiller.pid = {supervisor_of(two)}", echo=False)
    saving = two.checkpoint(tmp_path, "killer", "kept", step=1)
    os.kill(supervisor_of(two), signal.SIGKILL)  # whether or not the ranks have begun
    saving.result(WAIT_S)
    assert [entry.manifest.step for entry in list_checkpoints(tmp_path)] == [1]
    assert two.restore(tmp_path).step == 1
    when(lambda: os.listdir(tmp_path) == ["step-00000001"])


def test_a_rank_is_healed_when_the_supervisor_is_killed_meanwhile(two: Mesh, tmp_path: Path) -> None:
    server = two.run("os.getppid()", echo=False).values[0]
    path = tmp_path / "supervisor"
    source = (
        f"from pathlib import Path\nif Path({str(path)!r}).exists():\n"
        f"    os.kill(int(Path({str(path)!r}).read_text()), 9)\n    Path({str(path)!r}).unlink()"
    )
    two.run(source, setup=True)
    kill(two, 1)
    former = supervisor_of(two)
    path.write_text(str(former))
    healed = two.heal()
    assert healed.ranks == (1,)
    assert not path.exists()
    when(lambda: supervisor_of(two) != former)
    assert dict(two.run("os.getppid()", echo=False).values) == {0: server, 1: server}, "the fork server goes on"
    kill_and_wait(two)
    kill(two, 1)
    assert two.heal().ranks == (1,)


def test_remote_tensors_and_actors_go_on_when_the_supervisor_is_killed_between_their_operations(two: Mesh) -> None:
    from tests.actors.example_actors import Counter

    plain = torch.arange(16.0).reshape(4, 4)
    there = meshbook.distribute(plain, two, sharding_spec=["dp", None])
    counters = two.spawn("counters", Counter, 0)
    for turn in range(12):
        if turn in (4, 8):
            os.kill(two.status().supervisor_pid, signal.SIGKILL)
        there, plain = (there * 3 + turn) % 97, (plain * 3 + turn) % 97
        assert list(counters.add.call().get(WAIT_S).values()) == [turn + 1] * 2
    assert torch.equal(there.full_tensor(), plain)
    counters.stop().get(WAIT_S)


def test_a_standby_that_is_killed_is_replaced_and_takes_over_all_the_same(two: Mesh) -> None:
    supervisor = supervisor_of(two)
    killed: set[int] = set()

    def is_killed() -> bool:  # it is replaced as often as a process ends, such as an actor's: also between two looks
        for standby in forks_of(supervisor):
            with suppress(ProcessLookupError):
                os.kill(standby, signal.SIGKILL)
                killed.add(standby)
        return bool(killed)

    when(is_killed)
    when(lambda: set(forks_of(supervisor)) - killed)
    assert two.status().supervisor_pid == supervisor
    kill_and_wait(two)
    assert supervisor_of(two) not in killed


def test_after_many_takeovers_the_supervisor_has_no_more_open_files(two: Mesh) -> None:
    kill_and_wait(two)
    two.run("pass")
    two.stacks()  # asks by the ranks' other connection
    before = psutil.Process(supervisor_of(two)).num_fds()
    for _ in range(5):
        kill_and_wait(two)
        two.run("pass", echo=False)
    when(lambda: psutil.Process(supervisor_of(two)).num_fds() <= before + 3)


def test_the_mesh_ends_with_its_last_client_by_sigterm_and_by_stop_also_after_a_takeover() -> None:
    for name, end in (
        ("a", lambda mesh: mesh.stop()),
        ("b", lambda mesh: mesh.detach(orphan_ttl_s=0.2)),
        ("c", lambda mesh: os.kill(supervisor_of(mesh), signal.SIGTERM)),
    ):
        mesh = create_mesh(1, name=name, process_group=False)
        kill_and_wait(mesh)
        processes = [mesh.status().ranks[0].pid, supervisor_of(mesh), *forks_of(supervisor_of(mesh))]
        end(mesh)
        when(lambda pids=processes: not any(psutil.pid_exists(pid) for pid in pids))
        when(lambda name=name: not (keys.runtime_folder() / name).exists())
        if name == "c":
            with pytest.raises(NotAttached, match="SIGTERM"):
                mesh.run("1")


def test_a_mesh_that_listens_on_tcp_and_is_resized_has_a_standby_too() -> None:
    with create_mesh({"dp": 2}, listen="tcp://127.0.0.1:0") as mesh:
        mesh.run("kept = 5")
        kill_and_wait(mesh)
        mesh.resize(dp=1)
        os.kill(supervisor_of(mesh), signal.SIGKILL)
        assert dict(mesh.run("kept", echo=False).values) == {0: 5}
