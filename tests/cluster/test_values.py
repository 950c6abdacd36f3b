"""Values between the notebook and ranks on other machines."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError
from tests.budget import WAIT_S, when
from tests.cluster.bed import Bed
from tests.host_processes import agent_of, keeper_of, keepers_among, standby_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]


@pytest.fixture(scope="module", params=["through ssh", "by data connections"])
def mesh(request: pytest.FixtureRequest, bed: Bed) -> Iterator[Mesh]:
    is_direct = request.param == "by data connections"  # where the supervisor can connect to the machines' ports
    with contextlib.ExitStack() as stack:
        with bed.here() if is_direct else contextlib.nullcontext():
            mesh = stack.enter_context(create_mesh(4, on="ssh://n1,n2", torch=False))
        way = "directly" if is_direct else "as messages"
        when(lambda: all(host.values == way for host in mesh.hosts()))
        yield mesh
        when(lambda: all(host.values == way for host in mesh.hosts()))  # again, after whatever was killed


@pytest.fixture(scope="module")
def large() -> np.ndarray:
    return np.random.default_rng(7).random(1 << 20)  # 8 MiB


def test_a_large_value_reaches_every_rank_and_comes_back(mesh: Mesh, large: np.ndarray) -> None:
    mesh.push(large=large)
    values = mesh.pull("large")
    assert all(np.array_equal(values[rank], large) for rank in range(4))


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_a_value_on_its_way_when_a_host_agent_is_killed_is_whole_or_an_error_that_says_so(
    mesh: Mesh, delay_s: float
) -> None:
    mesh.run("import numpy as np\nbig = np.full(4 << 20, 1.0 + rank)")  # 32 MiB
    pids = [rank.pid for rank in mesh.status().ranks]
    keeper = keeper_of(mesh.name, 1)
    for up in (True, False):
        when(lambda: standby_of(keeper) is not None)
        agent = agent_of(keeper)
        assert agent is not None
        killer = threading.Timer(delay_s, lambda agent=agent: os.kill(agent, signal.SIGKILL))  # type: ignore[misc]
        killer.start()  # any moment will do
        if up:  # what the machine is asked for again is in its ranks' memory
            assert all((value == 1.0 + rank).all() for rank, value in mesh.run("big", echo=False).values.items())
        else:
            try:
                mesh.push(small=np.full(4 << 20, 7.0))
                why = None
            except CellError as error:
                why = str(error)
            assert why is not None or mesh.run("(small == 7.0).all()", echo=False).values.same()
            assert why is None or "send it again" in why or "resend it" in why
        killer.join()
    assert [rank.pid for rank in mesh.status().ranks] == pids
    mesh.push(small=np.full(4 << 20, 8.0))
    assert mesh.run("(small == 8.0).all()", echo=False).values.same()


def test_it_crosses_to_each_machine_once(mesh: Mesh, large: np.ndarray) -> None:
    mesh.push(large=large)
    mesh.run("address = large.ctypes.data")
    inodes = mesh.run("""
for line in open('/proc/self/maps'):
    start, end = (int(number, 16) for number in line.split()[0].split('-'))
    if start <= address < end:
        inode = line.split()[4]
inode""").values
    assert inodes[0] == inodes[1]
    assert inodes[2] == inodes[3]


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_a_value_on_its_way_when_the_supervisor_is_killed_is_whole_or_an_error_that_says_so(
    mesh: Mesh, delay_s: float
) -> None:
    mesh.run("import numpy as np\nbig = np.full(4 << 20, 1.0 + rank)")  # 32 MiB
    former = mesh.session.info.supervisor_pid
    future = mesh.run("big", wait=False, echo=False)
    time.sleep(delay_s)  # any moment will do
    os.kill(former, signal.SIGKILL)
    try:
        values, why = future.result(WAIT_S).values, None
    except CellError as error:
        values, why = {}, str(error)
    assert all((value == 1.0 + rank).all() for rank, value in values.items())
    assert why is None or "the mesh's supervisor was killed while it was on its way; ask for it again" in why
    again = mesh.pull("big")
    assert all((again[rank] == 1.0 + rank).all() for rank in range(4))
    mesh.push(big=np.zeros(4 << 20))
    assert mesh.run("float(big.sum())").values.same() == 0.0


@pytest.mark.parametrize("cut_s", [1.0, pytest.param(8.0, marks=pytest.mark.thorough)])
def test_a_value_on_its_way_when_a_machine_is_cut_off_for_a_while_arrives(mesh: Mesh, bed: Bed, cut_s: float) -> None:
    mesh.run("import numpy as np\nbig = np.full(8 << 20, 1.0 + rank)")  # 64 MiB
    for up in (True, False):
        future = mesh.run("big", wait=False, echo=False) if up else None
        timers = [threading.Timer(0.1, bed.cut, ["n2"]), threading.Timer(0.1 + cut_s, bed.restore, ["n2"])]
        for timer in timers:  # any moment will do
            timer.start()
        try:
            if future is not None:
                assert all((value == 1.0 + rank).all() for rank, value in future.result(WAIT_S).values.items())
            else:
                mesh.push(big=np.full(8 << 20, 7.0))
        finally:
            for timer in timers:
                timer.join()
        assert mesh.run("float(big.min())").values[2] == (3.0 if up else 7.0)


def test_arguments_of_functions_arrive_too(mesh: Mesh, large: np.ndarray) -> None:
    assert mesh.execute(lambda x: float(x.sum()), large).same() == float(large.sum())


def test_memory_is_given_back_on_both_sides(mesh: Mesh, large: np.ndarray) -> None:
    pool = mesh.session.transfer._pool
    mesh.push(large=large)
    when(lambda: pool.used_bytes == 0)  # the machines have it; nobody reads this process's copy any more
    mesh.run("del large")


def test_a_value_that_does_not_reach_one_machine_fails_the_call_on_all(mesh: Mesh, bed: Bed, large: np.ndarray) -> None:
    mesh.run("large = None")
    (keeper,) = keepers_among(bed.processes("n2"))
    agent = agent_of(keeper)
    assert agent is not None
    limits = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    used = {int(number) for number in os.listdir(f"/proc/{agent}/fd")}
    lowest_free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))  # no descriptor is left for the memory
    try:
        with pytest.raises(CellError, match="did not reach all machines, so the call was run on none") as raised:
            mesh.push(large=np.ones(1 << 17))  # of a size for which there is no memory that is free again
        assert raised.value.failures[0].ranks == (0, 1, 2, 3)
    finally:
        resource.prlimit(agent, resource.RLIMIT_NOFILE, limits)
    assert mesh.run("large is None").values.same()
    mesh.push(large=large)
    assert mesh.run("large is None").values.same() is False
