"""The look round at the end of a run sees what it is there to see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.budget import WAIT_S
from tests.leaks import MARKER, SHARED_MEMORY, Run

pytestmark = pytest.mark.usefixtures("starts_processes")

# Forks twice and leaves its session, as a daemon does, says its pid, and lives until its standard input ends.
DAEMON = """
import os, sys
held = open(os.environ.get("HOLD", os.devnull))
if os.fork():
    os.wait()
elif os.setsid() or os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


# Whether a plain fork of the process that asks is seen: it shows the environment its parent was started with.
FORKS = """
import os
from tests.leaks import Run
run = Run()
os.environ.update(run.environment)
readable, writable = os.pipe()
child = os.fork()
if child == 0:
    os.close(writable)
    os.read(readable, 1)
    os._exit(0)
print(child in run.processes())
os.close(writable)
os.waitpid(child, 0)
run.clean()
"""


@contextmanager
def daemon(run: Run, **environment: str) -> Iterator[tuple[int, IO[str]]]:
    """A daemon of `run`: its pid, and a file that ends when it does."""
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON],
        env={**os.environ, **run.environment, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.wait(WAIT_S)  # the daemon is on its own now
        yield pid, parent.stdout
        parent.stdin.close()
        assert parent.stdout.read() == ""


@pytest.fixture
def fresh() -> Iterator[Run]:
    run = Run()
    yield run
    run.clean()


@pytest.fixture
def other() -> Iterator[Run]:
    """A second run, at the same time on the same machine."""
    run = Run()
    yield run
    run.clean()


def test_a_clean_run_has_nothing_to_report(fresh: Run) -> None:
    assert fresh.wait_until_clean(grace_s=0) == []


def test_a_daemon_is_found_however_far_it_has_gone_and_is_ended(fresh: Run) -> None:
    with daemon(fresh) as (pid, until_it_ends):
        assert list(fresh.processes()) == [pid]
        assert fresh.leftovers() == [f"process {pid} still runs: {fresh.processes()[pid]}"]
        fresh.clean()
        assert until_it_ends.read() == ""
    assert fresh.wait_until_clean() == []


def test_the_processes_of_another_run_are_not_ours(fresh: Run, other: Run) -> None:
    with daemon(other) as (pid, _):
        assert list(other.processes()) == [pid]
        assert fresh.processes() == {}


def test_a_child_that_was_forked_before_it_could_inherit_the_marker_is_ours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={name: value for name, value in os.environ.items() if name != MARKER},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout == "True\n", done.stderr


def test_a_file_in_the_runtime_folder_is_named(fresh: Run) -> None:
    (fresh.runtime_dir / "mesh").mkdir()
    (fresh.runtime_dir / "mesh" / "sock").touch()
    assert fresh.leftovers() == [
        f"{fresh.runtime_dir}/mesh is still in the runtime folder",
        f"{fresh.runtime_dir}/mesh/sock is still in the runtime folder",
    ]


def test_a_new_shared_memory_file_is_named_unless_a_stranger_holds_it(fresh: Run, other: Run) -> None:
    path = SHARED_MEMORY / f"meshbook-test-{fresh.id}"
    try:
        path.touch()
        assert f"{path} is new" in fresh.leftovers()
        with daemon(other, HOLD=str(path)):
            assert f"{path} is new" not in fresh.leftovers()
    finally:
        path.unlink()


def test_torchs_shared_memory_of_a_process_that_was_killed_is_removed(fresh: Run) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(WAIT_S)
    of_the_dead, of_the_living = (SHARED_MEMORY / f"torch_{pid}_{fresh.id}_0" for pid in (dead.pid, os.getpid()))
    try:
        of_the_dead.touch()
        of_the_living.touch()
        assert fresh.leftovers() == [f"{of_the_living} is new"]
        assert not of_the_dead.exists()
    finally:
        of_the_living.unlink()
        of_the_dead.unlink(missing_ok=True)


def test_what_was_there_before_is_not_waited_for(fresh: Run) -> None:
    (fresh.runtime_dir / "before").touch()
    before = fresh.leftovers()
    assert fresh.wait_until_clean(0, before) == []
    (fresh.runtime_dir / "after").touch()
    assert fresh.wait_until_clean(0, before) == [f"{fresh.runtime_dir}/after is still in the runtime folder"]


def test_the_runtime_folder_is_private_and_leaves_room_for_socket_names(fresh: Run) -> None:
    assert fresh.runtime_dir.stat().st_mode & 0o777 == 0o700
    assert len(str(fresh.runtime_dir)) < 40  # of the 107 bytes of a unix socket's path


def test_a_test_run_that_leaves_something_behind_fails_and_says_what() -> None:
    example = Path(__file__).with_name("leaky_example.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(example)],
        cwd=example.parent.parent,
        env={**os.environ, "MESHBOOK_LEAK_GRACE_S": "0"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 error" in done.stdout
    assert "leaky_example.py has left something behind" in done.stdout
    pid = re.search(r"process (\d+) still runs: .*time\.sleep\(100\)", done.stdout)
    assert pid, done.stdout
    assert not Path(f"/proc/{pid[1]}/cmdline").exists() or not Path(f"/proc/{pid[1]}/cmdline").read_bytes()
    assert re.search(r"/tmp/mb\w+/run/0/left is still in the runtime folder of tests/leaky_example\.py", done.stdout)
