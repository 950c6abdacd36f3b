"""Processes as the system sees them: what they wait for, their children, and what py-spy says or cannot."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshbook.host import procfs
from meshbook.wire.messages import ProcessStatus
from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_processes")

Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes that stand still; each is killed at the end."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(source: str, **options: object) -> int:
        made.append(subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, **options))  # type: ignore[call-overload]
        return made[-1].pid

    yield begin
    for process in made:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdin is not None
        process.stdin.close()


def when(pid: int, true: Callable[[ProcessStatus], object]) -> ProcessStatus:
    """What the system says of a process once that is so."""
    deadline = time.monotonic() + 60
    while True:
        reported = procfs.read_process(pid)
        assert reported is not None
        if true(reported):
            return reported
        assert time.monotonic() < deadline, reported


def test_a_read_of_a_pipe_is_told(start: Start) -> None:
    reported = when(
        start("import os; os.read(0, 1)"), lambda reported: (reported.syscall, reported.state) == ("read", "S")
    )
    assert reported.syscall_target == "pipe"
    assert reported.rss_bytes > 1 << 20


def test_a_socket_is_told_by_its_other_end_also_where_python_polls_it(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\ns = socket.create_connection(('127.0.0.1', {port}), timeout={{}})\ns.recv(1)"
        polls = when(
            start(source.format("300")), lambda reported: reported.syscall == "poll" and reported.syscall_target
        )
        assert polls.syscall_target == f"socket 127.0.0.1:{port}"
        waits = when(start(source.format("None")), lambda reported: reported.syscall == "recvfrom")
        assert waits.syscall_target == f"socket 127.0.0.1:{port}"
        source = "import socket; socket.create_server(('127.0.0.1', 0)).accept()"
        listens = when(start(source), lambda reported: reported.syscall == "accept4")
        assert listens.syscall_target is not None
        assert listens.syscall_target.startswith("socket listening on 127.0.0.1:")


def test_a_locked_file_and_one_that_does_not_open_are_told_by_path(start: Start, tmp_path: Path) -> None:
    fifo, locked = tmp_path / "fifo", tmp_path / "locked"
    os.mkfifo(fifo)
    opens = when(start(f"open({str(fifo)!r})"), lambda reported: reported.syscall_target == str(fifo))
    assert opens.syscall == "openat"
    import fcntl

    with locked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        source = f"import fcntl; fcntl.flock(open({str(locked)!r}), fcntl.LOCK_EX)"
        assert when(start(source), lambda reported: reported.syscall == "flock").syscall_target == str(locked)


def test_children_are_told_with_their_states_and_who_is_waited_for(start: Start) -> None:
    source = "import subprocess; subprocess.Popen(['sleep', '100']).wait()"

    def waits(reported: ProcessStatus) -> bool:  # what it has started is python at first, and runs
        children = [(state, f"process {pid}: {command}") for pid, state, command in reported.children]
        return reported.syscall == "wait4" and children == [("S", reported.syscall_target)]

    reported = when(start(source), lambda reported: waits(reported) and "sleep" in str(reported.syscall_target))
    pid, _, command = reported.children[0]
    assert command == "sleep 100"
    os.kill(pid, signal.SIGSTOP)
    when(pid, lambda reported: reported.state == "T")
    os.kill(pid, signal.SIGKILL)


def test_a_forked_worker_is_told_by_the_name_that_it_gave_itself(start: Start) -> None:
    source = (
        "import ctypes, os, time\nif not os.fork():\n"
        "    ctypes.CDLL(None).prctl(15, b'pt_data' + b'_worker', 0, 0, 0)\n"
        "    os.read(0, 1)\n    os._exit(0)\nos.wait()"
    )
    reported = when(start(source), lambda reported: "pt_data_worker" in str(reported.children))
    assert reported.children[0][2].startswith("pt_data_worker: ")


def test_of_many_children_some_are_told(start: Start) -> None:
    source = "import os, time\nfor _ in range(50):\n    if not os.fork(): os.read(0, 1); os._exit(0)\nos.wait()"
    reported = when(start(source), lambda reported: len(reported.children) == 32)
    assert len(reported.children) == 32


def test_a_process_that_is_gone_is_none() -> None:
    process = subprocess.Popen(["true"])
    process.wait(WAIT_S)
    assert procfs.read_process(process.pid) is None
    assert procfs.process_state(process.pid) == ""
    assert procfs.read_threads(process.pid) == {}
    stacks, problem = procfs.dump_python_stacks(process.pid, 2.0)
    assert (stacks, problem) == ((), "it ended while its stacks were read")


def test_a_process_without_python_has_no_stack_and_py_spys_reason_is_given() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        stacks, problem = procfs.dump_python_stacks(process.pid, 60.0)
    finally:
        process.kill()
        process.wait(WAIT_S)
    assert stacks == ()
    assert problem is not None
    assert "py-spy says: Error: Failed to find python version" in problem


def test_without_py_spy_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "find_py_spy", lambda: None)
    stacks, problem = procfs.dump_python_stacks(os.getpid(), 2.0)
    assert stacks == ()
    assert problem is not None
    assert "pip install py-spy" in problem


def test_a_py_spy_that_hangs_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(procfs, "find_py_spy", lambda: str(program))
    stacks, problem = procfs.dump_python_stacks(os.getpid(), 0.6)
    assert (stacks, problem) == ((), "its Python stack could not be read from outside: py-spy took more than 0.6 s")
    with contextlib.suppress(FileNotFoundError):  # it may have been killed before it had begun
        if pid := (tmp_path / "pid").read_text():
            assert procfs.process_state(int(pid)) == ""


def test_a_refusal_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Error: Permission Denied: Try running again with elevated permissions\n\nCaused by:\n not permitted"
    files = {"/proc/sys/kernel/yama/ptrace_scope": b"1\n"}
    monkeypatch.setattr(procfs, "_read", lambda path: files.get(path, b""))
    assert "sudo sysctl kernel.yama.ptrace_scope=0" in procfs.explain_py_spy_error(said, alive=True)
    files.clear()
    reported = procfs.explain_py_spy_error(said, alive=True)
    assert "CAP_SYS_PTRACE" in reported
    assert "docker run --cap-add=SYS_PTRACE" in reported


def test_py_spy_is_found_beside_this_interpreter() -> None:
    found = procfs.find_py_spy()
    assert found is not None
    assert os.access(found, os.X_OK)


def test_kills_for_memory_are_counted_over_all_places_that_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": b"0::/pod/a\n",
        "/proc/vmstat": b"pgfault 3\noom_kill 2\n",
        "/sys/fs/cgroup/pod/a/memory.events": b"max 0\noom 1\noom_kill 1\noom_group_kill 0\n",
    }
    monkeypatch.setattr(procfs, "_read", lambda path: files.get(path, b""))
    assert procfs.num_oom_kills() == 3
    files.clear()
    assert procfs.num_oom_kills() == 0


def test_addresses_are_written_as_people_do() -> None:
    assert procfs._parse_address(b"0100007F:1F90") == "127.0.0.1:8080"
    assert procfs._parse_address(b"00000000000000000000000001000000:0050") == "[::1]:80"
    assert procfs._parse_address(b"0000000000000000FFFF00000100007F:0050") == "127.0.0.1:80"
