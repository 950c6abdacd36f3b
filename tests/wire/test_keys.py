"""Runtime folders and connection files: who may use them, and what dead meshes leave."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from meshbook.errors import MeshInUse, MeshNameError, NotAttached, StartError, UsageError
from meshbook.wire import folders, keys, processes
from tests.budget import WAIT_S


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("rt")
    folder.chmod(0o700)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(folder))
    return folder


def connection(name: str, pid: int) -> keys.ConnectionInfo:
    return keys.ConnectionInfo(
        name=name,
        address="ipc:///nowhere",
        token=keys.new_token(),
        process=processes.identify(pid),
        started_at=time.time(),
        protocol="meshbook/1",
        has_ranks=True,
    )


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(WAIT_S)
    return process.pid


def left_by_a_dead_mesh(name: str) -> Path:
    """The folder of a mesh whose process has ended."""
    folder = keys.claim_folder(name)
    gone = processes.identify(dead_pid())
    (folder / ".meshbook").write_bytes(msgspec.json.encode(gone))
    keys.write_connection_file(folder, msgspec.structs.replace(connection(name, os.getpid()), process=gone))
    return folder


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_runtime_folder_is_for_this_user_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(runtime / "new"))
    assert stat.S_IMODE(keys.runtime_folder().stat().st_mode) == 0o700


def test_a_runtime_folder_open_to_others_is_refused_with_the_command_that_mends_it(runtime: Path) -> None:
    (runtime / "meshbook").mkdir(mode=0o755)
    with pytest.raises(StartError, match=f"chmod 700 {runtime}/meshbook"):
        keys.runtime_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_runtime_folder_of_somebody_else_is_refused(runtime: Path) -> None:
    os.chown(keys.runtime_folder(), 65534, -1)
    with pytest.raises(StartError, match="belongs to user 65534"):
        keys.runtime_folder()


def test_a_runtime_folder_that_is_a_link_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "meshbook").symlink_to(runtime / "elsewhere")
    with pytest.raises(StartError, match="is not a folder"):
        keys.runtime_folder()


@pytest.mark.usefixtures("starts_processes")
def test_a_folder_full_of_the_users_own_files_is_left_as_it_was(runtime: Path) -> None:
    (runtime / "my-thesis" / "data").mkdir(parents=True)
    (runtime / "my-thesis" / "data" / "results.csv").write_text("1,2,3")
    (runtime / "notes.txt").write_text("notes")
    before = files_of(runtime)
    left_by_a_dead_mesh("dead")
    assert keys.list_connections() == []
    with pytest.raises(NotAttached):
        keys.find_connection("my-thesis")
    keys.remove_folder(keys.claim_folder("my-thesis"))
    assert files_of(runtime) == before


def test_what_is_not_ours_inside_our_own_folder_is_left_as_it_was(runtime: Path) -> None:
    inside = keys.runtime_folder()
    (inside / "photos").mkdir()
    (inside / "photos" / "cat.txt").write_text("cat")
    (inside / "empty").mkdir()
    (inside / "mesh.json").write_text("{}")
    before = files_of(runtime)
    assert keys.list_connections() == []
    for name in ("photos", "empty"):
        with pytest.raises(StartError, match="left alone"):
            keys.claim_folder(name)
        keys.remove_folder(inside / name)
    assert files_of(runtime) == before
    assert (inside / "empty").is_dir()


@pytest.mark.usefixtures("starts_processes")
def test_a_link_to_a_dead_meshs_folder_is_not_followed(runtime: Path) -> None:
    kept = left_by_a_dead_mesh("dead").rename(runtime / "kept")
    (keys.runtime_folder() / "dead").symlink_to(kept)
    before = files_of(kept)
    assert keys.list_connections() == []
    with pytest.raises(StartError, match="left alone"):
        keys.claim_folder("dead")
    keys.remove_folder(keys.runtime_folder() / "dead")
    assert files_of(kept) == before


@pytest.mark.usefixtures("starts_processes")
def test_a_link_inside_a_dead_meshs_folder_is_removed_and_what_it_leads_to_is_not(runtime: Path) -> None:
    (runtime / "data").mkdir()
    (runtime / "data" / "results.csv").write_text("1,2,3")
    folder = left_by_a_dead_mesh("dead")
    (folder / "link").symlink_to(runtime / "data")
    assert keys.list_connections() == []
    assert not folder.exists()
    assert (runtime / "data" / "results.csv").read_text() == "1,2,3"


def test_a_claimed_folder_is_never_without_its_mark(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def look(folder: Path) -> None:  # another process, at the moment between making and marking
        looked.append(sorted(path.name for path in keys.runtime_folder().iterdir() if path.name == "mesh"))
        assert folders.remove_stale_folders() == []
        mark(folder)

    mark = folders.write_marker
    monkeypatch.setattr(folders, "write_marker", look)
    folder = keys.claim_folder("mesh")
    assert looked == [[]]
    assert folders.read_owner(folder) == processes.identify(os.getpid())


def test_the_runtime_folder_outlives_the_login_session(monkeypatch: pytest.MonkeyPatch) -> None:
    home = tempfile.mkdtemp(prefix="h", dir="/tmp")
    try:
        monkeypatch.delenv("MESHBOOK_RUNTIME_DIR", raising=False)
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{home}/run")  # systemd-logind removes it at the last logout
        monkeypatch.setenv("HOME", home)
        monkeypatch.setattr(folders, "_is_local", lambda folder: True)
        assert keys.runtime_folder() == Path(home) / ".local" / "state" / "meshbook"
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize(("home", "local"), [("/tmp/" + "h" * 40, True), ("/tmp/h", False), ("/proc/h", True)])
def test_a_home_with_a_long_path_or_shared_or_read_only_is_not_used(
    home: str, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(folders, "_is_local", lambda folder: local)
    assert folders._default_folder() == Path(f"/tmp/meshbook-{os.getuid()}")


def test_a_folder_too_deep_for_sockets_is_refused_with_the_sum(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("d" * 90)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(deep))
    with pytest.raises(StartError, match=r"is \d+ bytes long.*at most 88: \d+ \+ 19 .* over the system's 107"):
        keys.claim_folder("mesh")
    assert list((deep / "meshbook").iterdir()) == []


def test_the_longest_path_that_is_taken_has_room_for_the_longest_socket(runtime: Path) -> None:
    room = folders._MAX_SOCKET_FOLDER_BYTES - len(os.fsencode(keys.runtime_folder())) - 1
    folder = keys.claim_folder("m" * min(room, 48)) / "h1234-service.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder))


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "x" * 49, "a/b"])
def test_a_name_that_cannot_be_a_folder_is_refused(runtime: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a mesh"):
        keys.claim_folder(name)


def test_the_connection_file_is_readable_by_this_user_alone(runtime: Path) -> None:
    folder = keys.claim_folder("mesh")
    keys.write_connection_file(folder, connection("mesh", os.getpid()))
    assert stat.S_IMODE((folder / "mesh.json").stat().st_mode) == 0o600


def test_the_name_of_a_living_mesh_cannot_be_taken(runtime: Path) -> None:
    keys.write_connection_file(keys.claim_folder("mesh"), connection("mesh", os.getpid()))
    with pytest.raises(MeshInUse, match="%mesh attach mesh"):
        keys.claim_folder("mesh")


def test_the_name_of_a_mesh_that_is_being_born_cannot_be_taken(runtime: Path) -> None:
    keys.claim_folder("mesh")
    with pytest.raises(MeshInUse):
        keys.claim_folder("mesh")


@pytest.mark.usefixtures("starts_processes")
def test_the_name_of_a_dead_mesh_is_free_and_what_it_left_is_removed(runtime: Path) -> None:
    folder = left_by_a_dead_mesh("mesh")
    (folder / "control.sock").touch()
    assert [path.name for path in keys.claim_folder("mesh").iterdir()] == [".meshbook"]
    assert [path.name for path in keys.runtime_folder().iterdir()] == ["mesh"]


@pytest.mark.usefixtures("starts_processes")
def test_attaching_to_a_dead_mesh_says_so_and_removes_its_file(runtime: Path) -> None:
    folder = left_by_a_dead_mesh("mesh")
    with pytest.raises(NotAttached, match=r"pid \d+.*has ended"):
        keys.find_connection("mesh")
    assert not folder.exists()


def test_a_reused_pid_is_not_taken_for_the_mesh(runtime: Path) -> None:
    ours = processes.identify(os.getpid())
    assert processes.is_running(ours)
    assert not processes.is_running(msgspec.structs.replace(ours, started_ticks=ours.started_ticks - 1))
    assert not processes.is_running(msgspec.structs.replace(ours, boot_id="another boot"))


# Ends its main thread as the kernel does when it kills a process: the other threads end later.
_MAIN_THREAD_LAST_BUT_ONE = """
import ctypes, os, signal, sys, threading
def end():
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_process_has_ended_when_its_last_thread_has(runtime: Path) -> None:
    command = [sys.executable, "-c", _MAIN_THREAD_LAST_BUT_ONE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        begun = processes.identify(process.pid)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert process.poll() is None
        assert processes.is_running(begun)
        process.stdin.write("end\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie for good
        assert not processes.is_running(begun)


def test_a_clock_that_was_set_leaves_living_meshes_alive(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = keys.claim_folder("mesh")
    keys.write_connection_file(folder, connection("mesh", os.getpid()))
    create_time, boot_time = psutil.Process.create_time, psutil.boot_time  # both move with the clock
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600.0)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + 3600.0)
    assert [found.name for found in keys.list_connections()] == ["mesh"]
    assert folder.exists()


@pytest.mark.usefixtures("starts_processes")
def test_a_mesh_of_another_machine_is_neither_listed_nor_removed(runtime: Path) -> None:
    folder = left_by_a_dead_mesh("mesh")
    there = processes.ProcessIdentity(1, 1, "another boot", "another host")
    (folder / ".meshbook").write_bytes(msgspec.json.encode(there))
    keys.write_connection_file(folder, msgspec.structs.replace(connection("mesh", os.getpid()), process=there))
    assert keys.list_connections() == []
    with pytest.raises(NotAttached, match=r"pid 1 on another host.*attach to it there"):
        keys.find_connection("mesh")
    assert folder.exists()


@pytest.mark.usefixtures("starts_processes")
def test_what_a_mesh_left_when_this_machine_was_rebooted_is_removed(runtime: Path) -> None:
    folder = left_by_a_dead_mesh("mesh")
    before = msgspec.structs.replace(processes.identify(os.getpid()), boot_id="the boot before")
    (folder / ".meshbook").write_bytes(msgspec.json.encode(before))
    assert keys.list_connections() == []
    assert not folder.exists()


@pytest.mark.usefixtures("starts_processes")
def test_a_folder_that_its_supervisor_holds_is_kept_though_its_process_cannot_be_seen(runtime: Path) -> None:
    folder = keys.claim_folder("mesh")
    program = (
        "import sys, pathlib; from meshbook.wire import keys; keys.lock_folder(pathlib.Path(sys.argv[1])); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        unseen = processes.identify(dead_pid())  # as the holder's pid looks from another container
        (folder / ".meshbook").write_bytes(msgspec.json.encode(unseen))
        assert folders.remove_stale_folders() == []
        holder.communicate()
    assert folders.remove_stale_folders() == ["mesh"]


def lock_and_unlock(folder: Path) -> None:
    with folders.locked(folder):
        assert folders.is_locked(folder)


@pytest.mark.parametrize("use", [lock_and_unlock, folders.is_locked])
def test_a_folder_is_free_again_though_a_process_that_was_forked_meanwhile_has_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    opened, copies = os.open, []

    def open_and_copy(path: Path, flags: int) -> int:
        descriptor = opened(path, flags)
        copies.append(os.dup(descriptor))
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_and_copy)
        use(tmp_path)
    assert copies
    assert not folders.is_locked(tmp_path)
    for descriptor in copies:
        os.close(descriptor)


@pytest.mark.usefixtures("starts_processes")
def test_a_lock_that_was_inherited_is_released_for_every_process_that_has_its_descriptor(tmp_path: Path) -> None:
    """As by a standby, whose own standby has inherited it too."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[descriptor]) as other:
        folders.release_inherited_locks(tmp_path)
        assert not folders.is_locked(tmp_path)
        other.communicate(timeout=WAIT_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_without_a_name_the_only_mesh_is_meant(runtime: Path) -> None:
    keys.write_connection_file(keys.claim_folder("one"), connection("one", os.getpid()))
    assert keys.find_connection(None).name == "one"


def test_a_supervisor_that_only_warms_up_is_not_taken_for_the_mesh_that_is_meant(runtime: Path) -> None:
    keys.write_connection_file(keys.claim_folder("one"), connection("one", os.getpid()))
    spare = msgspec.structs.replace(connection("spare", os.getpid()), has_ranks=False)
    keys.write_connection_file(keys.claim_folder("spare"), spare)
    assert keys.find_connection(None).name == "one"
    assert keys.find_connection("spare").name == "spare"


def test_without_a_name_and_with_two_meshes_one_is_asked_for_by_name(runtime: Path) -> None:
    for name in ("one", "two"):
        keys.write_connection_file(keys.claim_folder(name), connection(name, os.getpid()))
    with pytest.raises(MeshNameError, match="one, two"):
        keys.find_connection(None)


def test_with_no_mesh_at_all_the_way_to_start_one_is_told(runtime: Path) -> None:
    with pytest.raises(NotAttached, match="%mesh start -n 4"):
        keys.find_connection(None)


def test_a_full_disk_is_told_with_the_way_out(runtime: Path) -> None:
    folder = keys.claim_folder("mesh")
    (folder / "mesh.json.new").mkdir()  # the draft cannot be written, as on a full disk
    with pytest.raises(StartError, match="cannot be written"):
        keys.write_connection_file(folder, connection("mesh", os.getpid()))
    assert not (folder / "mesh.json").exists()
