"""A host agent that is a process of its own is killed: its standby goes on, and no rank is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellInterrupted
from meshbook.wire.processes import forks_of
from tests.budget import WAIT_S, when
from tests.host_processes import agent_of, keeper_of, kill_agent, standby_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("starts_meshes")]

# A cell that follows a kill begins within so many seconds.
NEXT_CELL_S = 5.0
SUM = "t = torch.ones(1)\ndist.all_reduce(t)\nint(t)"


@pytest.fixture(scope="module")
def shared() -> Iterator[Mesh]:
    with create_mesh({"dp": 2}, num_hosts=2) as mesh:
        mesh.run("import time\nkept = rank", echo=False)
        yield mesh


@pytest.fixture
def mesh(shared: Mesh) -> Iterator[Mesh]:
    """The mesh, which has lost nothing after the test."""
    when(lambda: standby_of(keeper_of(shared.name, 1)) is not None)
    pids = [rank.pid for rank in shared.status().ranks]
    yield shared
    assert [rank.pid for rank in shared.status().ranks] == pids
    assert dict(shared.run("kept", echo=False).values) == {0: 0, 1: 1}
    when(lambda: standby_of(keeper_of(shared.name, 1)) is not None)


def begin(mesh: Mesh, source: str) -> Any:
    future = mesh.run(source, wait=False, echo=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    return future


def check_next_cell(mesh: Mesh) -> str:
    """Check that the next cell runs, in time; return its output."""
    future = mesh.run(SUM, wait=False, echo=False)
    assert when(future.done, "the next cell", within_s=WAIT_S) < NEXT_CELL_S
    assert future.result(WAIT_S).values.same() == 2
    return future.result(WAIT_S).output


def test_the_next_cell_after_an_idle_agent_was_killed_says_so_once(mesh: Mesh) -> None:
    killed = kill_agent(mesh.name, 1)
    said = check_next_cell(mesh) + mesh.run("None", echo=False).output
    standby = agent_of(keeper_of(mesh.name, 1))
    assert standby not in (None, killed)
    assert said.count(f"the host agent of host 1 (pid {killed}) was killed; its standby (pid {standby}) took over") == 1


def test_ranks_that_wait_in_a_collective_go_on_and_stop_reaches_them(mesh: Mesh) -> None:
    future = begin(mesh, "dist.barrier() if rank else time.sleep(1000)")
    kill_agent(mesh.name, 1)
    when(lambda: "has not come to barrier" in mesh.why().text)
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)
    check_next_cell(mesh)


def test_a_value_that_is_fetched_meanwhile_is_whole(mesh: Mesh) -> None:
    mesh.run("big = torch.full((16 << 20,), float(rank))", echo=False)
    agent = agent_of(keeper_of(mesh.name, 1))
    assert agent is not None
    future = mesh.run("big", wait=False, echo=False)
    os.kill(agent, signal.SIGKILL)
    values = future.result(WAIT_S).values
    assert all(bool((values[rank] == rank).all()) and len(values[rank]) == 16 << 20 for rank in (0, 1))


def kill_standby(mesh: Mesh) -> None:
    keeper = keeper_of(mesh.name, 1)
    former = standby_of(keeper)
    assert former is not None
    os.kill(former, signal.SIGKILL)
    when(lambda: standby_of(keeper) not in (None, former))
    kill_agent(mesh.name, 1)


def stop_and_kill(mesh: Mesh) -> None:
    agent = agent_of(keeper_of(mesh.name, 1))
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    mesh.run("None", ranks=0, echo=False)
    os.kill(agent, signal.SIGKILL)


def kill_twice(mesh: Mesh) -> None:
    keeper, killed = keeper_of(mesh.name, 1), kill_agent(mesh.name, 1)
    when(lambda: agent_of(keeper) not in (None, killed))
    when(lambda: standby_of(keeper) is not None)  # it has one before it says a word
    kill_agent(mesh.name, 1)


def kill_both_agents(mesh: Mesh) -> None:
    for host in (0, 1):
        kill_agent(mesh.name, host)


def kill_agent_and_standby_of_supervisor(mesh: Mesh) -> None:
    kill_agent(mesh.name, 1)
    for standby in forks_of(mesh.session.info.supervisor_pid):
        os.kill(standby, signal.SIGKILL)


@pytest.mark.parametrize(
    "harm", [kill_standby, stop_and_kill, kill_twice, kill_both_agents, kill_agent_and_standby_of_supervisor]
)
def test_lines_and_values_are_whole_after(mesh: Mesh, harm: Callable[[Mesh], None]) -> None:
    future = begin(mesh, "for step in range(150):\n    if rank: print('step', step)\n    time.sleep(0.01)\nrank")
    harm(mesh)
    result = future.result(WAIT_S)
    assert dict(result.values) == {0: 0, 1: 1}
    assert [line.split()[-1] for line in result.output.splitlines() if "step" in line] == [str(n) for n in range(150)]
    check_next_cell(mesh)


def test_a_host_ends_with_its_keeper_and_its_former_agents_are_healed() -> None:
    with create_mesh(2, num_hosts=2, torch=False) as mesh:
        keeper = keeper_of(mesh.name, 1)
        kill_agent(mesh.name, 1)
        when(lambda: standby_of(keeper) is not None)
        os.kill(keeper, signal.SIGKILL)
        when(lambda: mesh.session.lost == (1,))
        mesh.heal()
        assert keeper_of(mesh.name, 1) != keeper
        kill_agent(mesh.name, 1)
        assert dict(mesh.run("rank", echo=False).values) == {0: 0, 1: 1}
