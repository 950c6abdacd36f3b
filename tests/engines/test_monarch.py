"""Meshes on hosts of Monarch jobs. What every mesh must do is in test_conformance.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.cli.doctor_machines import check_machines
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.engines.addresses import Address
from meshbook.engines.driver_messages import AllocateJob
from meshbook.engines.monarch import job_to_allocate
from meshbook.engines.monarch_driver import MonarchDriver
from meshbook.errors import RankLost, StartError
from meshbook.wire.process_control import kill_supervisor
from tests.budget import WAIT_S, when
from tests.cluster.test_slurm import WhenWritten
from tests.host_processes import keeper_of

pytestmark = pytest.mark.usefixtures("starts_meshes")
needs_monarch = pytest.mark.monarch

JOB = "from monarch.job import ProcessJob\njob = ProcessJob({'hosts': 2})\n"


def start(on: str, **options: Any) -> Mesh:
    """Start light ranks, one per host."""
    return create_mesh(on=on, **{"nodes": 2, "gpus_per_node": 1, "torch": False, **options})


def processes(mark: str) -> list[int]:
    """The processes with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """What all processes of the test's meshes have in their environment; none of them is left."""
    monkeypatch.setenv("MESHBOOK_TEST_MONARCH", f"{os.getpid()}-{request.node.name}")
    mark = f"MESHBOOK_TEST_MONARCH={os.getpid()}-{request.node.name}"
    before = set(Path("/tmp").glob("monarch_process_job_*"))
    yield mark
    when(lambda: not processes(mark))
    when(lambda: set(Path("/tmp").glob("monarch_process_job_*")) <= before)


def driver_of(mesh: Mesh) -> int:
    supervisor = mesh.status().supervisor_pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    (driver,) = [int(pid) for pid in children if b"monarch_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return driver


def begin_to_sleep(mesh: Mesh) -> Any:
    future = mesh.run("import time; time.sleep(1000)", wait=False)
    when(lambda: all(rank.state == "busy" for rank in mesh.status().ranks))
    return future


def test_a_job_is_asked_for_in_monarchs_words() -> None:
    address = Address.parse("monarch://slurm?partition=gpu&python=/opt/python")
    assert job_to_allocate(address, 4) == AllocateJob("slurm", 4, {"partition": "gpu", "python": "/opt/python"})
    assert job_to_allocate(Address.parse("monarch:/a/b.py:job?mesh=x"), 2) == AllocateJob(
        "", 2, {"mesh": "x"}, "/a/b.py", "job"
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("ModuleNotFoundError: No module named 'monarch'", f"there is no Monarch for {sys.executable}"),
        ("ModuleNotFoundError: No module named 'monarch'", "-m pip install 'meshbook[monarch]'"),
        ("RuntimeError: please install kubernetes to use KubernetesJob.", "-m pip install kubernetes"),
        ("RuntimeError: Failed to load in-cluster Kubernetes config.", "monarch://kubernetes?kubeconfig="),
        ("FileNotFoundError: No such file or directory: 'sbatch'", "there is no Slurm on this machine"),
        ("RuntimeError: Failed to submit SLURM job: sbatch: error: invalid partition", "`sinfo` lists the partitions"),
        ("RuntimeError: SLURM job 1 failed with status: FAILED", "see its slurm_*.err"),
        ("AttributeError: 'str' object has no attribute 'get'", "use slurm://, which needs no Monarch"),
    ],
)
def test_monarchs_words_are_explained(words: str, what: str) -> None:
    text = MonarchDriver.explain(words)
    assert text is not None
    assert words in text
    assert what in text


@needs_monarch
def test_a_job_of_the_users_own_gives_its_hosts_to_two_meshes_in_turn(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "my_cluster.py"
    file.write_text("from monarch.job import ProcessJob\njob = ProcessJob({'trainers': 2, 'others': 1})\n")
    on = f"monarch:{file}:job?mesh=trainers"
    with start(on) as mesh, start("monarch://local", nodes=1) as other:
        assert dict(mesh.run("rank").values) == {0: 0, 1: 1}
        assert other.run("rank").values.same() == 0
    with start(on) as mesh:
        assert dict(mesh.run("rank").values) == {0: 0, 1: 1}


@needs_monarch
@pytest.mark.parametrize(
    ("program", "name", "words"),
    [
        ("import nothing_of_that_name", "job", "does not import (ModuleNotFoundError: No module named 'nothing_of"),
        ("import sys; sys.exit('not here')", "job", "does not import (SystemExit: not here); see that this works: "),
        ("jobs = 1", "jobs", "is a int, and no Monarch job (monarch.job.JobTrait); make one there: jobs = ProcessJob"),
        (JOB, "jobb", "has no 'jobb', and no Monarch job (monarch.job.JobTrait); it has job"),
        (JOB, "job?mesh=x", "the job has no mesh 'x' (hosts); name one of them"),
        (JOB.replace("2", "1"), "job", "2 nodes are asked for, and the job's mesh 'hosts' has 1; ask for --nodes 1"),
        (None, "job", "cannot be read (No such file or directory); look at its path"),
    ],
)
def test_a_file_without_a_job_is_an_error_within_10_s(
    tmp_path: Path, mark: str, program: str | None, name: str, words: str
) -> None:
    if program is not None:
        (tmp_path / "my_cluster.py").write_text(program)
    begun = time.monotonic()
    with pytest.raises(StartError) as raised:
        start(f"monarch:{tmp_path}/my_cluster.py:{name}")
    assert words in str(raised.value)
    assert time.monotonic() - begun < 10


@needs_monarch
def test_an_interpreter_that_is_not_there_is_said_with_what_to_do(mark: str) -> None:
    with pytest.raises(StartError) as raised:
        start("monarch://process?python=/no/python")
    assert "has no interpreter /no/python" in str(raised.value)
    assert "monarch://…?python=/path/to/python" in str(raised.value)


@needs_monarch
def test_stop_while_a_job_waits_for_its_hosts_ends_it(tmp_path: Path, mark: str) -> None:
    (tmp_path / "slow.py").write_text(
        "import threading\nfrom monarch.job import ProcessJob\n"
        "class QueuedJob(ProcessJob):\n    def _state(self):\n        threading.Event().wait()\n"
        "job = QueuedJob({'hosts': 2})\n"
    )
    waits = "Monarch: its QueuedJob is pending"
    stop = WhenWritten(waits, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(stop):
        start(f"monarch:{tmp_path}/slow.py:job")


@needs_monarch
def test_why_a_job_of_slurm_is_pending_is_shown_in_slurms_words(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        "sbatch": f"grep -o 'job-name=.*' | cut -d= -f2 > {tmp_path}/name; echo Submitted batch job 4711",
        "squeue": f"""case "$*" in
            *--json*) echo '{{"jobs": [{{"job_state": ["PENDING"]}}]}}';;
            *) echo "other|PENDING|Resources||N/A"; echo "$(cat {tmp_path}/name)|PENDING|Priority||N/A";;
        esac""",
        "scancel": f"echo $* > {tmp_path}/cancelled",
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    stop = WhenWritten("Monarch: its SlurmJob is PENDING (Priority)", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(stop):
        start("monarch://slurm?partition=gpu")
    when((tmp_path / "cancelled").exists)


@needs_monarch
def test_a_job_that_the_user_has_started_stays(tmp_path: Path, mark: str) -> None:
    saved = tmp_path / "job.pkl"
    (tmp_path / "mine.py").write_text(f"{JOB}job.apply()\njob.dump({str(saved)!r})\n")
    with start(f"monarch:{tmp_path}/mine.py:job") as mesh:
        assert dict(mesh.run("rank").values) == {0: 0, 1: 1}
    assert len(processes(mark)) >= 2
    end = f"from monarch.job import job_load; job_load({str(saved)!r}).kill()"
    subprocess.run([sys.executable, "-c", end], check=True)


@needs_monarch
def test_doctor_says_what_job_there_is_and_starts_none(tmp_path: Path, mark: str) -> None:
    (tmp_path / "my_cluster.py").write_text(JOB)
    with contextlib.chdir(tmp_path):
        found = check_machines("monarch:my_cluster.py:job")
        assert [(one.state, one.about) for one in found] == [("ok", "monarch"), ("ok", "job")]
        assert found[1].says == "a ProcessJob, not started yet"
        (missing,) = check_machines("monarch:my_cluster.py:jobs")
    assert missing.state == "missing"
    assert "has no 'jobs', and no Monarch job" in missing.says
    assert missing.remedy == "it has job"


@needs_monarch
def test_a_lost_host_is_named_and_healed(mark: str) -> None:
    with start("monarch://process") as mesh:
        mesh.run("x = 10 + rank")
        host = keeper_of(mesh.name, 1)
        future = begin_to_sleep(mesh)
        os.kill(host, signal.SIGKILL)
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert error.ranks == (1,)
        assert "has lost its host process" in str(error)
        mesh.heal()
        assert dict(mesh.run("x", ranks=(0,)).values) == {0: 10}
        assert dict(mesh.run("rank").values) == {0: 0, 1: 1}


@needs_monarch
def test_a_mesh_whose_driver_of_monarch_is_killed_says_so_and_is_healed_with_another_job(mark: str) -> None:
    with start("monarch://process") as mesh:
        future = begin_to_sleep(mesh)
        os.kill(driver_of(mesh), signal.SIGKILL)
        error = future.exception(WAIT_S)
        assert isinstance(error, RankLost)
        assert "driver of Monarch has ended" in str(error)
        mesh.heal()
        assert dict(mesh.run("rank").values) == {0: 0, 1: 1}


@needs_monarch
def test_hosts_workers_and_driver_end_when_the_supervisor_is_killed(mark: str) -> None:
    mesh = start("monarch://process")
    assert len(processes(mark)) > 4
    kill_supervisor(mesh.status().supervisor_pid)


@needs_monarch
def test_workers_end_when_driver_and_supervisor_are_killed(mark: str) -> None:
    mesh = start("monarch://process")
    os.kill(driver_of(mesh), signal.SIGKILL)
    kill_supervisor(mesh.status().supervisor_pid)
