"""Runtime folders and connection files: who may use them, and what dead meshes leave."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from meshbook.errors import MeshInUse, MeshNameError, NotAttached, StartError, UsageError
from meshbook.wire import keys


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("rt")
    folder.chmod(0o700)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(folder))
    return folder


def connection(name: str, pid: int) -> keys.Connection:
    return keys.Connection(
        name=name,
        address="ipc:///nowhere",
        token=keys.new_token(),
        pid=pid,
        process_started_at=keys.process_started_at(pid) or 0.0,
        started_at=time.time(),
        protocol="meshbook/1",
        has_ranks=True,
    )


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    return process.pid


def test_the_runtime_folder_is_for_this_user_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(runtime / "new"))
    assert stat.S_IMODE(keys.runtime_folder().stat().st_mode) == 0o700


def test_a_runtime_folder_open_to_others_is_refused_with_the_command_that_mends_it(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(StartError, match="chmod 700"):
        keys.runtime_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_runtime_folder_of_somebody_else_is_refused(runtime: Path) -> None:
    os.chown(runtime, 65534, -1)
    with pytest.raises(StartError, match="belongs to user 65534"):
        keys.runtime_folder()


def test_a_runtime_folder_that_is_a_link_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = runtime / "link"
    link.symlink_to(runtime)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(link))
    with pytest.raises(StartError, match="is not a folder"):
        keys.runtime_folder()


def test_a_folder_too_deep_for_sockets_is_refused_with_the_sum(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("d" * 90)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(deep))
    with pytest.raises(StartError, match="at most"):
        keys.claim_folder("mesh")


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "x" * 49, "a/b"])
def test_a_name_that_cannot_be_a_folder_is_refused(runtime: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a mesh"):
        keys.claim_folder(name)


def test_the_connection_file_is_readable_by_this_user_alone(runtime: Path) -> None:
    folder = keys.claim_folder("mesh")
    keys.write_connection(folder, connection("mesh", os.getpid()))
    assert stat.S_IMODE((folder / "mesh.json").stat().st_mode) == 0o600


def test_the_name_of_a_living_mesh_cannot_be_taken(runtime: Path) -> None:
    keys.write_connection(keys.claim_folder("mesh"), connection("mesh", os.getpid()))
    with pytest.raises(MeshInUse, match="%mesh attach mesh"):
        keys.claim_folder("mesh")


def test_the_name_of_a_mesh_that_is_being_born_cannot_be_taken(runtime: Path) -> None:
    keys.mark_starting(keys.claim_folder("mesh"), os.getpid())
    with pytest.raises(MeshInUse):
        keys.claim_folder("mesh")


def test_the_name_of_a_dead_mesh_is_free_and_what_it_left_is_removed(runtime: Path) -> None:
    folder = keys.claim_folder("mesh")
    keys.write_connection(folder, connection("mesh", dead_pid()))
    (folder / "control.sock").touch()
    assert list(keys.claim_folder("mesh").iterdir()) == []


def test_attaching_to_a_dead_mesh_says_so_and_removes_its_file(runtime: Path) -> None:
    pid = dead_pid()
    keys.write_connection(keys.claim_folder("mesh"), connection("mesh", pid))
    with pytest.raises(NotAttached, match=f"pid {pid}.*has ended"):
        keys.find_connection("mesh")
    assert not (runtime / "mesh").exists()


def test_a_reused_pid_is_not_taken_for_the_mesh(runtime: Path) -> None:
    old = connection("mesh", os.getpid())
    assert not keys.is_running(old.pid, old.process_started_at - 100.0)


def test_without_a_name_the_only_mesh_is_meant(runtime: Path) -> None:
    keys.write_connection(keys.claim_folder("one"), connection("one", os.getpid()))
    assert keys.find_connection(None).name == "one"


def test_a_supervisor_that_only_warms_up_is_not_taken_for_the_mesh_that_is_meant(runtime: Path) -> None:
    keys.write_connection(keys.claim_folder("one"), connection("one", os.getpid()))
    spare = msgspec.structs.replace(connection("spare", os.getpid()), has_ranks=False)
    keys.write_connection(keys.claim_folder("spare"), spare)
    assert keys.find_connection(None).name == "one"
    assert keys.find_connection("spare").name == "spare"


def test_without_a_name_and_with_two_meshes_one_is_asked_for_by_name(runtime: Path) -> None:
    for name in ("one", "two"):
        keys.write_connection(keys.claim_folder(name), connection(name, os.getpid()))
    with pytest.raises(MeshNameError, match="one, two"):
        keys.find_connection(None)


def test_with_no_mesh_at_all_the_way_to_start_one_is_told(runtime: Path) -> None:
    with pytest.raises(NotAttached, match="%mesh start -n 4"):
        keys.find_connection(None)


def test_a_full_disk_is_told_with_the_way_out(runtime: Path) -> None:
    folder = keys.claim_folder("mesh")
    (folder / ".mesh.json.new").mkdir()  # the draft cannot be written, as on a full disk
    with pytest.raises(StartError, match="cannot be written"):
        keys.write_connection(folder, connection("mesh", os.getpid()))
    assert not (folder / "mesh.json").exists()
