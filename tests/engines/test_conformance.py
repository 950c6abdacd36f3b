"""What a mesh must do however its ranks are started and wherever its hosts are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from meshbook.actor import Actor, endpoint
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, CellInterrupted, RankLost
from tests.budget import WAIT_S, when
from tests.cluster.ray_bed import RAY_TIMEOUT_S
from tests.host_processes import keeper_of, kill_agent

# The first test of each way starts its mesh: in a minute on a busy machine, where each rank or host imports torch.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("starts_meshes")]

WAYS: dict[str, dict[str, Any]] = {
    "forked": {},
    "fresh": {"start_method": "fresh"},
    "two hosts": {"num_hosts": 2},
    "tcp": {"listen": "tcp://127.0.0.1:*"},
    "ssh": {"on": "ssh://n1,n2"},
    "slurm": {"on": "slurm://", "nodes": 2},
    "ray": {"on": "ray://auto", "nodes": 2},
    "monarch": {"on": "monarch://process", "nodes": 2},
}


def marks(way: dict[str, Any]) -> list[pytest.MarkDecorator]:
    on = way.get("on", "")
    if on.startswith("monarch:"):  # its hosts are processes of this machine, and need no bed
        return [pytest.mark.monarch, pytest.mark.thorough]
    found = [pytest.mark.cluster] if on else [] if "num_hosts" in way else [pytest.mark.thorough]
    if on.startswith("ray:"):  # the first test starts the cluster, for which it has several tries
        found += [pytest.mark.ray, pytest.mark.timeout(RAY_TIMEOUT_S)]
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=marks(way)) for way in WAYS.values()],
    ids=WAYS.keys(),
)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    on = request.param.get("on", "")
    if on.startswith("ssh:"):
        request.getfixturevalue("bed")
    cluster = {"slurm": "slurm", "ray": "ray_cluster"}.get(on.partition(":")[0])
    with request.getfixturevalue(cluster).here() if cluster is not None else nullcontext():
        mesh = create_mesh({"dp": 2, "tp": 2}, **request.param)
    with mesh:
        yield mesh


def test_every_rank_answers(mesh: Mesh) -> None:
    assert dict(mesh.run("(rank, world_size)").values) == {rank: (rank, 4) for rank in range(4)}


def test_ranks_know_the_number_of_their_machine_as_under_torchrun(mesh: Mesh) -> None:
    found = dict(mesh.run("import os; int(os.environ['GROUP_RANK'])").values)
    assert found == {rank: host for host, info in enumerate(mesh.hosts()) for rank in info.ranks}


def test_the_process_group_and_the_device_mesh_are_up(mesh: Mesh) -> None:
    source = "t = torch.ones(2) * rank\ndist.all_reduce(t, group=mesh['tp'].get_group())\nt.tolist()"
    assert dict(mesh.run(source).values) == {0: [1, 1], 1: [1, 1], 2: [5, 5], 3: [5, 5]}


def test_equal_lines_are_one_and_lines_of_some_ranks_name_them(mesh: Mesh) -> None:
    output = mesh.run("print('all')\nif rank in (1, 2): print('some')", echo=False).output
    assert output == "all\n[1-2] some\n"


def test_errors_are_folded(mesh: Mesh) -> None:
    with pytest.raises(CellError) as raised:
        mesh.run("if rank: raise ValueError('odd one')")
    assert [(failure.ranks, failure.ename) for failure in raised.value.failures] == [((1, 2, 3), "ValueError")]
    assert raised.value.succeeded == (0,)


def test_values_go_there_and_back(mesh: Mesh) -> None:
    mesh.push(data=list(range(100_000)))
    assert mesh.pull("data")[3][-1] == 99_999


class Asker(Actor):
    @endpoint
    def ask(self, others: Any, value: Any) -> list[Any]:
        return [answer for _, answer in others.echo.call(value).get(WAIT_S)]

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def test_actors_of_all_ranks_answer_each_other(mesh: Mesh) -> None:
    askers, others = mesh.spawn("askers", Asker), mesh.spawn("others", Asker)
    assert [answer for _, answer in askers.ask.call(others, 7).get(WAIT_S)] == [[7] * 4] * 4
    askers.stop().get(WAIT_S)
    others.stop().get(WAIT_S)


def test_a_stuck_collective_is_explained_and_left_and_the_group_is_whole_again(mesh: Mesh) -> None:
    future = mesh.run("dist.barrier() if rank else __import__('time').sleep(1000)", wait=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    when(lambda: "has not come to barrier" in mesh.why().text)
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)
    assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values.same() == 4.0


def test_names_can_be_looked_at_while_a_cell_runs(mesh: Mesh) -> None:
    mesh.run("import time\nseen = 'yes'")
    future = mesh.run("while not seen.isupper(): time.sleep(0.01)", wait=False)
    try:
        assert "yes" in repr(mesh["seen"])
    finally:
        future.interrupt()
        assert isinstance(future.exception(WAIT_S), CellInterrupted)


def test_output_is_shown_and_stacks_are_read_while_a_cell_runs(mesh: Mesh) -> None:
    future = mesh.run("import time\ndef waiting():\n    time.sleep(1000)\nwaiting()", wait=False)
    when(lambda: "waiting" in str(mesh.stacks()))
    future.interrupt()
    assert isinstance(future.exception(WAIT_S), CellInterrupted)


def test_machines_are_listed(mesh: Mesh) -> None:
    hosts = mesh.hosts()
    assert [rank for host in hosts for rank in host.ranks] == [0, 1, 2, 3]
    assert {host.state for host in hosts} == {"ready"}


def test_cells_output_and_values_go_on_when_the_supervisor_is_killed(mesh: Mesh) -> None:
    mesh.run("import time\nkept = torch.full((1 << 20,), float(rank))")
    # of one rank: lines of ranks that are not in step may be shown in pairs
    source = "for step in range(50):\n    if rank == 3: print('step', step)\n    time.sleep(0.02)\nrank"
    future = mesh.run(source, wait=False, echo=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    former = mesh.session.info.supervisor_pid
    os.kill(former, signal.SIGKILL)
    result = future.result(WAIT_S)
    assert dict(result.values) == {rank: rank for rank in range(4)}
    assert [line.split()[-1] for line in result.output.splitlines() if "step" in line] == [str(n) for n in range(50)]
    # shown in the cell, or in the next one if a host, to which the notice travels, has done the cell before
    total = mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()", echo=False)
    assert "took over" in result.output + total.output
    assert total.values.same() == 4.0
    assert mesh.session.info.supervisor_pid != former
    assert [float(value[-1]) for value in mesh.pull("kept").values()] == [0.0, 1.0, 2.0, 3.0]
    assert {host.state for host in mesh.hosts()} == {"ready"}


@pytest.mark.parametrize("with_supervisor", [False, True], ids=["alone", "with the supervisor"])
def test_cells_and_output_go_on_when_a_host_agent_is_killed(mesh: Mesh, with_supervisor: bool) -> None:
    if len(mesh.hosts()) == 1:
        pytest.skip("its host is in the supervisor")
    mesh.run("import time")
    pids = [rank.pid for rank in mesh.status().ranks]
    source = "for step in range(50):\n    if rank == 3: print('step', step)\n    time.sleep(0.02)\nrank"
    future = mesh.run(source, wait=False, echo=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    if with_supervisor:
        os.kill(mesh.session.info.supervisor_pid, signal.SIGKILL)
    kill_agent(mesh.name, 1)
    result = future.result(WAIT_S)
    assert dict(result.values) == {rank: rank for rank in range(4)}
    assert [line.split()[-1] for line in result.output.splitlines() if "step" in line] == [str(n) for n in range(50)]
    assert "the host agent of host 1 (pid " in result.output
    assert [rank.pid for rank in mesh.status().ranks] == pids
    assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values.same() == 4.0
    assert {host.state for host in mesh.hosts()} == {"ready"}


def test_a_killed_rank_is_named_and_the_others_live(mesh: Mesh) -> None:
    # Last in this module: the mesh is not whole afterwards.
    future = mesh.run("import time\ntime.sleep(1000)", wait=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    mesh.kill((2,))  # SIGKILL, by the rank's own host
    error = future.exception(WAIT_S)
    assert isinstance(error, RankLost)
    assert error.ranks == (2,)
    assert list(mesh.run("rank").values.values()) == [0, 1, 3]


def test_light_ranks_need_no_torch() -> None:
    with create_mesh(2, torch=False) as mesh:
        assert dict(mesh.run("import sys\n('torch' in sys.modules, rank)").values) == {0: (False, 0), 1: (False, 1)}


def test_a_lost_host_loses_its_ranks_and_the_others_live() -> None:
    with create_mesh(4, num_hosts=2, torch=False) as mesh:
        host = keeper_of(mesh.name, 1)
        future = mesh.run("import time\ntime.sleep(1000)", wait=False)
        when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
        os.kill(host, signal.SIGKILL)
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert error.ranks == (2, 3)
        assert list(mesh.run("rank").values.values()) == [0, 1]
