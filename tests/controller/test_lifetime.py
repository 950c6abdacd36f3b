"""Meshes come, are found again, and go: and nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from meshbook.controller import listing
from meshbook.controller.connection import SupervisorConnection
from meshbook.controller.launch import FORK_SERVER_VARIABLE, launch_supervisor
from meshbook.controller.session import Session
from meshbook.controller.starting import attach, create_mesh
from meshbook.errors import NotAttached, StartError
from meshbook.wire import keys
from meshbook.wire.messages import MeshInfo
from tests.budget import WAIT_S, when
from tests.ptrace import ptrace_stopped
from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_meshes")


def processes_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_stop_leaves_no_process_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORK_SERVER_VARIABLE)
    mesh = create_mesh(2)
    processes = processes_of(mesh.session.info.supervisor_pid)
    assert len(processes) >= 4  # supervisor, fork server, two ranks
    folder = keys.runtime_folder() / mesh.name
    assert folder.exists()
    mesh.stop()
    when(lambda: not any(process.is_running() for process in processes))
    assert not folder.exists()


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_what_ranks_print_as_they_end_is_shown(num_hosts: int, capsys: pytest.CaptureFixture[str]) -> None:
    with create_mesh(2, torch=False, num_hosts=num_hosts) as mesh:
        mesh.run("import atexit; atexit.register(lambda: print('x' * 300_000, 'goodbye from', rank))")
        assert "goodbye" not in capsys.readouterr().out
    said = capsys.readouterr().out
    assert "goodbye from 0" in said
    assert "goodbye from 1" in said


def test_a_with_block_stops_its_mesh_also_after_an_error_and_stopping_it_again_does_no_harm() -> None:
    mesh = create_mesh(1)
    with pytest.raises(KeyError), mesh:
        raise KeyError
    when(lambda: not psutil.pid_exists(mesh.session.info.supervisor_pid))
    mesh.stop()
    with pytest.raises(NotAttached, match="is no more"):
        mesh.run("1")


def run_script(source: str) -> str:
    done = run_python(source)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_that_ends_takes_its_mesh_along() -> None:
    pid = int(run_script("import meshbook\nm = meshbook.create_mesh(1)\nprint(m.session.info.supervisor_pid)"))
    when(lambda: not psutil.pid_exists(pid))


def test_a_detached_mesh_outlives_its_script_and_is_found_again_with_its_names() -> None:
    run_script("import meshbook\nm = meshbook.create_mesh(2, name='kept')\nm.run('x = rank + 5')\nm.detach()")
    mesh = attach("kept")
    try:
        assert dict(mesh.pull("x")) == {0: 5, 1: 6}
        assert "x" in mesh.status().names
    finally:
        mesh.stop()


def test_a_mesh_survives_the_death_of_its_client_and_ends_when_nobody_comes() -> None:
    source = (
        "import meshbook, os\nm = meshbook.create_mesh(1, name='orphan', orphan_ttl_s={})\n"
        "m.run('x = 1')\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", source.format(3600)], timeout=WAIT_S, check=False)
    mesh = attach("orphan")
    pid = mesh.session.info.supervisor_pid
    assert mesh.run("x").values.same() == 1
    mesh.detach(orphan_ttl_s=0.2)
    when(lambda: not psutil.pid_exists(pid))
    assert all(connection.name != "orphan" for connection in keys.list_connections())


def test_two_clients_see_one_mesh() -> None:
    with create_mesh(1, name="shared") as mesh:
        other = attach("shared")
        other.run("y = 3")
        assert mesh.pull("y")[0] == 3
        assert len(mesh.status().clients) == 2
        other.detach()
        assert mesh.run("y").values.same() == 3


def test_leaving_a_mesh_that_does_not_answer_is_told_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = create_mesh(1, process_group=False)
    other, pid = attach(mesh.name), mesh.session.info.supervisor_pid
    monkeypatch.setattr("meshbook.controller.session._STOP_TIMEOUT_S", 0.3)
    with ptrace_stopped(pid), pytest.raises(NotAttached, match=rf"did not answer .* `meshbook stop {mesh.name}`"):
        other.detach()
    monkeypatch.undo()
    assert other.session.connection.closed
    with pytest.raises(NotAttached, match="this process has left it"):
        other.run("1")
    mesh.stop()


def test_an_observer_may_look_and_does_not_keep_the_mesh() -> None:
    mesh = create_mesh(1, name="watched", orphan_ttl_s=0.2)
    pid = mesh.session.info.supervisor_pid
    viewer = attach("watched", observer=True)
    assert viewer.status().ranks[0].state == "idle"
    mesh.detach(orphan_ttl_s=0.2)
    when(lambda: not psutil.pid_exists(pid))
    when(lambda: viewer.session.ended is not None)
    viewer.session.close()


def test_two_meshes_of_one_process_are_strangers() -> None:
    with create_mesh(1, name="left") as left, create_mesh(2, name="right") as right:
        left.push(x="left")
        right.push(x="right")
        assert (left.pull("x")[0], right.pull("x")[1]) == ("left", "right")
        assert {"left", "right"} <= {connection.name for connection in keys.list_connections()}


def test_a_mesh_that_cannot_be_asked_is_listed_with_the_reason_and_the_others_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_at(connection: keys.ConnectionInfo) -> MeshInfo:
        if connection.name == "odd":
            raise OSError("too many open files")
        return really(connection)

    really = listing.fetch_mesh_info
    monkeypatch.setattr(listing, "fetch_mesh_info", look_at)
    with create_mesh(1, name="odd"), create_mesh(1, name="even"):
        listed = listing.list_meshes()
    found = {mesh.name: mesh for mesh in listed}
    assert repr(listed).split()[:4] == ["name", "size", "state", "up"]  # a notebook displays a table
    assert "<table" in listed._repr_html_()
    assert found["odd"].trouble == "too many open files"
    assert found["even"].info is not None


def test_a_mesh_that_ends_while_it_is_asked_is_neither_waited_for_nor_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_it(connection: keys.ConnectionInfo) -> None:
        mesh.stop()
        threading.Event().wait()

    monkeypatch.setattr(listing, "fetch_mesh_info", end_it)
    with create_mesh(1, name="ending") as mesh:
        began = time.monotonic()
        assert listing.list_meshes(timeout_s=2 * WAIT_S)[:] == ()
        assert time.monotonic() - began < WAIT_S


def test_a_supervisor_without_ranks_warms_up_and_starts_them_quickly_later() -> None:
    found = launch_supervisor("spare")
    session = Session(SupervisorConnection(found, kind="test"), stop_at_exit=True)
    try:
        with pytest.raises(NotAttached, match="no ranks yet"):
            attach("spare")
    finally:
        session.stop()
    assert not (keys.runtime_folder() / "spare").exists()


def test_a_supervisor_whose_launcher_is_killed_before_it_attaches_ends() -> None:
    launch = (
        "from meshbook.controller.launch import launch_supervisor as launch; print(launch('unwanted').pid, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", f"{launch}; input()"], stdin=-1, stdout=-1, text=True) as launcher:
        assert launcher.stdout is not None
        supervisor = psutil.Process(int(launcher.stdout.readline()))
        assert supervisor.is_running()
        launcher.kill()
    when(lambda: not supervisor.is_running())
    assert not (keys.runtime_folder() / "unwanted").exists()


def test_a_supervisor_that_does_not_answer_the_process_that_launched_it_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_session(found: keys.ConnectionInfo, **options: object) -> Session:
        pids.append(found.pid)
        raise NotAttached("the mesh did not answer within 10 s")

    pids: list[int] = []
    monkeypatch.setattr("meshbook.controller.starting.open_session", open_session)
    with pytest.raises(NotAttached, match="did not answer"):
        create_mesh(1, name="deaf")
    when(lambda: not psutil.pid_exists(pids[0]))
    assert not (keys.runtime_folder() / "deaf").exists()


def test_a_start_that_takes_too_long_leaves_no_supervisor_that_has_no_time_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meshbook.toml").write_text("start_timeout_s = 0.01")
    monkeypatch.chdir(tmp_path)
    asked: list[SupervisorConnection] = []
    monkeypatch.setattr(
        "meshbook.controller.session._stop_and_close", lambda connection, *_, **__: asked.append(connection)
    )
    with pytest.raises(StartError, match=r"2 ranks did not come up within 0 s and were stopped"):
        create_mesh(2)
    when(lambda: not asked[0].connection_info.is_alive)


def test_an_impossible_runtime_folder_is_told_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(blocked / "inside"))
    with pytest.raises(StartError, match="MESHBOOK_RUNTIME_DIR"):
        create_mesh(1)
