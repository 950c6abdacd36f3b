"""A mesh on a Ray cluster. What every mesh must do is in tests/engines/test_conformance.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import RankLost, StartError
from meshbook.wire.process_control import kill_supervisor
from meshbook.wire.processes import children_of, forks_of
from tests.budget import WAIT_S, when
from tests.cluster.ray_bed import HEAD, RAY_TIMEOUT_S, RayOnBed
from tests.cluster.test_slurm import WhenWritten
from tests.host_processes import keepers_among

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.ray,
    pytest.mark.timeout(RAY_TIMEOUT_S),
    pytest.mark.usefixtures("starts_meshes"),
]

NOTHING = {"groups": 0, "actors": 0}


def start(cluster: RayOnBed, on: str = "ray://auto", **options: Any) -> Mesh:
    """Start light ranks, one per node."""
    with cluster.here():
        return create_mesh(on=on, **{"nodes": 2, "gpus_per_node": 1, "torch": False, **options})


def begin_to_sleep(mesh: Mesh) -> Any:
    future = mesh.run("import time; time.sleep(1000)", wait=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    return future


def pids(cluster: RayOnBed, node: str, words: str) -> list[int]:
    return [pid for pid, command in cluster.bed.commands(node).items() if words in command]


def has_no_host(cluster: RayOnBed) -> bool:
    return not any(pids(cluster, node, "meshbook.host.remote") for node in ("n1", "n2"))


def names(mesh: Mesh) -> list[str]:
    return sorted(mesh.run("__import__('socket').gethostname()").values.values())


def test_a_second_mesh_shows_what_it_waits_for_and_goes_on_when_nodes_are_free(ray_cluster: RayOnBed) -> None:
    first = start(ray_cluster, "ray://auto?num_cpus=5")
    waits = "Ray: waiting for 2 nodes with 5 CPUs each; the cluster has 2, and too few of them are free"
    written = WhenWritten(waits, first.stop)
    with contextlib.redirect_stdout(written):
        second = start(ray_cluster, f"ray://{HEAD}?num_cpus=5")
    with second:
        assert waits in written.getvalue()
        assert names(second) == ["n1", "n2"]
        assert sorted(host.name for host in second.hosts()) == ["n1", "n2"]


def test_stop_while_a_start_waits_leaves_nothing(ray_cluster: RayOnBed) -> None:
    waits = "Ray: waiting for 2 nodes with 2 GPUs and 1 CPU each; the cluster has none"
    stop = WhenWritten(waits, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(stop):
        start(ray_cluster, "ray://auto?num_gpus=2")
    when(lambda: ray_cluster.holds() == NOTHING)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("ray://10.77.0.200:6380", "Ray's head does not answer"),
        ("ray://auto?python=/no/python", "has no interpreter /no/python"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_to_do(ray_cluster: RayOnBed, on: str, words: str) -> None:
    with pytest.raises(StartError) as raised:
        start(ray_cluster, on)
    assert words in str(raised.value)


def test_a_lost_host_is_healed_on_its_node_and_another_mesh_does_not_notice(ray_cluster: RayOnBed) -> None:
    with start(ray_cluster) as other, start(ray_cluster) as mesh:
        mesh.run("x = 10 + rank")
        future = begin_to_sleep(mesh)
        victim = next(host for host in mesh.hosts() if 1 in host.ranks).name
        newest = max(keepers_among(pids(ray_cluster, victim, "-P -m meshbook.host.remote")))
        os.kill(newest, signal.SIGKILL)
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert error.ranks == (1,)
        assert f"machine {victim} has lost its host process" in str(error)
        mesh.heal()
        assert dict(mesh.run("x", ranks=(0,)).values) == {0: 10}
        assert names(mesh) == names(other) == ["n1", "n2"]


def test_a_node_without_power_is_named_and_healed_when_it_is_back(ray_cluster: RayOnBed) -> None:
    with start(ray_cluster) as mesh:
        lost = next(rank for host in mesh.hosts() if host.name == "n2" for rank in host.ranks)
        mesh.run("x = 10 + rank")
        future = begin_to_sleep(mesh)
        ray_cluster.bed.power_off("n2")
        try:
            error = future.exception(WAIT_S)
        finally:
            ray_cluster.bed.power_on("n2")
            ray_cluster.start_node("n2")
        assert isinstance(error, RankLost)
        assert error.ranks == (lost,)
        assert "machine n2 has not answered for" in str(error)
        mesh.heal()
        assert dict(mesh.run("x", ranks=(1 - lost,)).values) == {1 - lost: 11 - lost}
        assert names(mesh) == ["n1", "n2"]


def test_a_mesh_whose_driver_of_ray_is_killed_says_so_and_is_healed_with_another(ray_cluster: RayOnBed) -> None:
    with start(ray_cluster) as mesh:
        supervisor = mesh.status().supervisor_pid
        (driver,) = set(children_of(supervisor)) - set(forks_of(supervisor))
        future = begin_to_sleep(mesh)
        os.kill(driver, signal.SIGKILL)
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert "driver of Ray has ended" in str(error)
        mesh.heal()
        assert names(mesh) == ["n1", "n2"]


def test_hosts_end_when_the_supervisor_is_killed(ray_cluster: RayOnBed) -> None:
    mesh = start(ray_cluster)
    kill_supervisor(mesh.status().supervisor_pid)
    when(lambda: has_no_host(ray_cluster))
    when(lambda: ray_cluster.holds() == NOTHING)


def test_doctor_looks_at_the_nodes_of_the_cluster(ray_cluster: RayOnBed) -> None:
    def doctor(on: str) -> tuple[int, str]:
        with ray_cluster.here():
            words = [sys.executable, "-m", "meshbook", "doctor", "--on", on]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    status, text = doctor("ray://auto?num_gpus=1")
    assert status == 0
    assert "a cluster of 3" in text
    assert "node n1" in text
    assert "at 10.77.0.1, 8 CPUs, 0 GPUs" in text
    assert "none has num_gpus=1" in text
    status, text = doctor("ray://10.77.0.200:6380")
    assert status == 1
    assert "Ray's head does not answer" in text
