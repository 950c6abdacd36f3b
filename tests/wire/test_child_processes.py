"""Children that are started on a thread while this process forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from meshbook.wire.child_processes import ChildProcess, run_command
from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_a_fork_waits_until_a_child_has_its_ends_of_its_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fork holds them too, and the start waits for ever to see that the child runs its program."""
    begun, may_go_on, has_forked = threading.Event(), threading.Event(), threading.Event()
    execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def late(*args: Any) -> None:
        begun.set()
        assert may_go_on.wait(WAIT_S)
        execute(*args)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", late)

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(0)
        has_forked.set()
        os.waitpid(pid, 0)

    found: list[str] = []
    starting = threading.Thread(target=lambda: found.append(run_command(["echo", "yes"], timeout_s=WAIT_S).stdout))
    starting.start()
    assert begun.wait(WAIT_S)
    forking = threading.Thread(target=fork)
    forking.start()
    assert not has_forked.wait(0.2)
    may_go_on.set()
    for thread in (starting, forking):
        thread.join(WAIT_S)
    assert has_forked.is_set()
    assert found == ["yes\n"]


def test_a_child_that_runs_code_before_its_program_starts() -> None:
    with ChildProcess([sys.executable, "-c", ""], preexec_fn=os.getpid) as process:
        assert process.wait(WAIT_S) == 0


def test_a_command_that_does_not_end_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["sleep", "1000"], timeout_s=0.1)
