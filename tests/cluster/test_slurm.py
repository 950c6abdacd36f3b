"""A mesh in a Slurm allocation. What every mesh must do is in tests/engines/test_conformance.py."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import HealError, RankLost, StartError
from meshbook.wire.process_control import kill_supervisor
from tests.budget import WAIT_S, when
from tests.cluster.bed import NETWORK, Bed
from tests.host_processes import keepers_among

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]


def start(slurm: Bed, on: str = "slurm://", **options: Any) -> Mesh:
    """Start light ranks, one per node."""
    with slurm.here():
        return create_mesh(on=on, **{"nodes": 2, "gpus_per_node": 1, "torch": False, **options})


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def jobs() -> list[str]:
    """Numbers of the jobs that Slurm has not ended, the latest first."""
    return command("squeue", "-h", "-S", "-i", "-o", "%i").split()


def host_pid(slurm: Bed, node: str) -> int:
    """The latest host on a machine, as seen from here; not the shells and slurmstepd above it."""
    return max(keepers_among(pid for pid, words in slurm.processes(node).items() if " -P -m meshbook.host" in words))


class WhenWritten(io.StringIO):
    """Does something when a text is written."""

    def __init__(self, text: str, action: Any) -> None:
        super().__init__()
        self._text, self._action = text, action

    def write(self, text: str) -> int:
        if self._text in text:
            self._action()
        return super().write(text)


def test_a_start_shows_why_it_waits_and_goes_on_when_nodes_are_free(slurm: Bed) -> None:
    other = command("sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 1000")
    when(lambda: command("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
    written = WhenWritten("PENDING (Resources)", lambda: command("scancel", other))
    with contextlib.redirect_stdout(written):
        mesh = start(slurm)
    with mesh:
        assert dict(mesh.run("__import__('socket').gethostname()").values) == {0: "n1", 1: "n2"}
        assert [host.name for host in mesh.hosts()] == ["n1", "n2"]
    when(lambda: jobs() == [])


def test_the_time_left_is_shown_and_all_who_are_attached_are_warned_of_the_end_once(slurm: Bed) -> None:
    written = io.StringIO()
    with contextlib.redirect_stderr(written), start(slurm, "slurm://?time=4") as mesh:
        when(lambda: "comes to its time limit at " in written.getvalue())
        assert re.search(r"Time left: \d.*; its job comes to its time limit at ", str(mesh.status()))
        mesh.run("rank", echo=False)
        assert written.getvalue().count("comes to its time limit at ") == 1


def test_stop_while_a_start_waits_cancels_the_job(slurm: Bed) -> None:
    other = command("sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 1000")
    when(lambda: command("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
    stop = WhenWritten("PENDING (Resources)", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(stop):
        start(slurm)
    when(lambda: jobs() == [other])
    command("scancel", other)
    when(lambda: jobs() == [])


@pytest.mark.parametrize(
    ("on", "options", "words"),
    [
        ("slurm://nope", {}, "Invalid partition name specified"),
        ("slurm://?blub=1", {}, "unrecognized option '--blub=1'"),
        ("slurm://?gres=gpu:2", {}, "Invalid generic resource (gres) specification"),
        ("slurm://small", {}, "Slurm would never run the job: the partition does not "),
        ("slurm://?python=/no/python", {}, " has no interpreter /no/python"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(slurm: Bed, on: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError) as raised:
        start(slurm, on, **options)
    assert words in str(raised.value)
    when(lambda: jobs() == [])


def test_a_machine_without_slurm_is_no_place_to_start_from(
    slurm: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match="there is no sbatch on this machine"):
        start(slurm)


def test_a_node_that_cannot_connect_to_the_supervisor_is_named_before_the_start_has_taken_its_time(
    slurm: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meshbook.toml").write_text("lost_after_s = 5\nstart_timeout_s = 300")
    monkeypatch.chdir(tmp_path)
    slurm.run("n2", "ip", "route", "add", "blackhole", f"{NETWORK}.200/32")
    try:
        with pytest.raises(
            StartError, match=r"n2 is out of reach.* is there a firewall\? No connection to .* for 10 s"
        ):
            start(slurm)
    finally:
        slurm.run("n2", "ip", "route", "del", "blackhole", f"{NETWORK}.200/32")
    when(lambda: jobs() == [])


def test_a_lost_host_is_healed_in_the_same_job(slurm: Bed) -> None:
    with start(slurm) as mesh:
        (job,) = jobs()
        mesh.run("x = 10 + rank")
        future = mesh.run("import time; time.sleep(1000)", wait=False)
        when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
        os.kill(host_pid(slurm, "n2"), signal.SIGKILL)
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert error.ranks == (1,)
        mesh.heal()
        assert dict(mesh.run("x", ranks=(0,)).values) == {0: 10}
        assert dict(mesh.run("__import__('socket').gethostname()").values) == {0: "n1", 1: "n2"}
        assert jobs() == [job]


def test_two_meshes_live_side_by_side_and_one_that_is_cancelled_says_so(slurm: Bed) -> None:
    with start(slurm) as one:
        (job,) = jobs()
        with start(slurm) as other:
            future = one.run("import time; time.sleep(1000)", wait=False)
            when(lambda: all(rank.state == "busy" for rank in one.status().ranks))
            command("scancel", job)
            error = future.exception(WAIT_S)
            assert "received SIGTERM" in str(error)
            assert dict(other.run("rank").values) == {0: 0, 1: 1}


def test_before_the_time_limit_the_mesh_is_preempted(slurm: Bed) -> None:
    with start(slurm) as mesh:
        (job,) = jobs()
        mesh.on_preemption(grace_s=20)
        future = mesh.run("import meshbook, time\nwhile not meshbook.preempted(): time.sleep(0.01)\n'safe'", wait=False)
        when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
        command("scancel", "--signal=TERM", job)  # as --signal=TERM@60 does: to all steps
        assert future.result(WAIT_S).values.same() == "safe"
        when(lambda: jobs() == [])  # the mesh has ended, and its job with it


@pytest.fixture(scope="module")
def abandoned_job(slurm: Bed) -> str:
    """The job of a mesh whose supervisor was killed; it ends while the next test waits for Slurm."""
    mesh = start(slurm)
    (job,) = jobs()

    def sleeps() -> set[int]:
        return {pid for pid, words in slurm.processes("n1").items() if words == "sleep 2"}

    before = sleeps()
    when(lambda: bool(sleeps() - before))  # the job's script has seen the host
    kill_supervisor(mesh.status().supervisor_pid)
    return job


@pytest.mark.usefixtures("abandoned_job")
def test_a_node_that_fails_is_named_and_cannot_be_had_back(slurm: Bed) -> None:
    with start(slurm) as mesh:
        job = jobs()[0]  # the latest
        mesh.run("x = 10 + rank")
        future = mesh.run("import time; time.sleep(1000)", wait=False)
        when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
        slurm.power_off("n2")
        try:
            error = future.exception(WAIT_S)
            assert isinstance(error, RankLost)
            assert "machine n2 has not answered for" in str(error)
            when(lambda: command("squeue", "-h", "-j", job, "-o", "%N") == "n1")
            with pytest.raises(HealError, match=f"Slurm has taken it out of job {job}"):
                mesh.heal()
            assert dict(mesh.run("x").values) == {0: 10}
        finally:
            slurm.power_on("n2")
    when(lambda: "idle" in command("sinfo", "-h", "-n", "n2", "-o", "%T"))


def test_a_job_ends_soon_after_its_supervisor(slurm: Bed, abandoned_job: str) -> None:
    when(lambda: abandoned_job not in jobs())  # 20 s after its last host
    when(lambda: slurm.processes("n1") == {})


def test_doctor_looks_at_partitions_and_whether_a_job_could_start(slurm: Bed) -> None:
    def doctor(on: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "meshbook", "doctor", "--on", on]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    status, text = doctor("slurm://")
    assert status == 0
    assert "partition main" in text
    assert "a job may run for 1:00:00" in text
    assert "one of a single node could start at" in text
    status, text = doctor("slurm://nope?time=10")
    assert status == 1
    assert "there is no partition nope" in text
    assert "name one of these: main, small" in text
