"""A mesh on the hosts of Monarch's SSHJob. More on Monarch is in tests/engines, whose hosts are on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, RankLost, StartError
from meshbook.wire.process_control import kill_supervisor
from tests.budget import WAIT_S, when
from tests.cluster.bed import NETWORK, Bed
from tests.engines.test_monarch import begin_to_sleep, driver_of

pytestmark = [pytest.mark.cluster, pytest.mark.monarch, pytest.mark.usefixtures("starts_meshes")]

BOTH = f"monarch://ssh?hosts={NETWORK}.1,{NETWORK}.2"


def start(bed: Bed, on: str = BOTH, **options: Any) -> Mesh:
    """Start light ranks, one per host."""
    with bed.here():
        return create_mesh(on=on, **{"nodes": 2, "gpus_per_node": 1, "torch": False, **options})


def workers(bed: Bed) -> list[str]:
    return [command for name in bed.running for command in bed.processes(name).values() if "monarch" in command]


def test_ranks_are_on_both_machines_and_no_worker_of_monarch_is_left(bed: Bed) -> None:
    with start(bed, torch=True) as mesh:
        assert dict(mesh.run("__import__('socket').gethostname()").values) == {0: "n1", 1: "n2"}
        assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values.same() == 2.0
        assert workers(bed)
    when(lambda: not workers(bed))


def test_a_machine_without_power_is_named_and_the_other_goes_on(bed: Bed) -> None:
    with start(bed) as mesh:
        future = begin_to_sleep(mesh)
        bed.power_off("n2")
        try:
            error = future.exception(WAIT_S)
            assert isinstance(error, RankLost)
            assert error.ranks == (1,)
            assert "machine n2 has not answered for" in str(error)
            assert dict(mesh.run("rank").values) == {0: 0}
        finally:
            mesh.stop()
            bed.power_on("n2")


def test_workers_on_machines_end_when_driver_and_supervisor_are_killed(bed: Bed) -> None:
    mesh = start(bed)
    os.kill(driver_of(mesh), signal.SIGKILL)
    kill_supervisor(mesh.status().supervisor_pid)
    when(lambda: not any(bed.processes(name) for name in bed.running))


@pytest.mark.timeout(60)
def test_a_machine_that_cannot_be_reached_is_named_before_monarch_gives_up(bed: Bed) -> None:
    with pytest.raises(StartError) as raised:
        start(bed, f"monarch://ssh?hosts={NETWORK}.1,{NETWORK}.99")
    assert f"ssh to {NETWORK}.99 has ended; see that `ssh {NETWORK}.99 true` works" in str(raised.value)
    when(lambda: not workers(bed))


JOB = f"""
import sys
import monarch.config
from monarch._rust_bindings.monarch_hyperactor.channel import BindSpec
from monarch._src.job.job import SSHJob
job = SSHJob(sys.executable, ["-tt", "-o", "BatchMode=yes"])
job.add_mesh("hosts", ["{NETWORK}.1", "{NETWORK}.2"])
monarch.config.configure(default_transport=BindSpec("tcp://{NETWORK}.200:0"))
"""
ELSEWHERE = "10.88.0.1"  # of this machine, and unknown to the others


def here(bed: Bed, command: str) -> None:
    with bed.here():
        subprocess.run(command.split(), check=True)


@pytest.mark.thorough
def test_hosts_that_cannot_connect_to_this_machine_reach_it_through_monarch(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    here(bed, f"ip address add {ELSEWHERE}/32 dev lo")
    here(bed, f"ip route add default via {NETWORK}.1 src {ELSEWHERE}")
    try:
        with start(bed, f"monarch:{tmp_path}/job.py:job", torch=True) as mesh:
            with pytest.raises(CellError, match="Error"):
                mesh.run(f"import socket; socket.create_connection(('{ELSEWHERE}', 1), 2)")
            assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values.same() == 2.0
            os.kill(mesh.status().supervisor_pid, signal.SIGKILL)
            assert mesh.run("dist.all_reduce(t); t.item()").values.same() == 4.0
    finally:
        here(bed, "ip route del default")
        here(bed, f"ip address del {ELSEWHERE}/32 dev lo")
    when(lambda: not workers(bed))
