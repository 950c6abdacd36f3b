"""Processes that bring hosts, as a supervisor and its standby have them."""

from __future__ import annotations

import os
import subprocess

import pytest

from meshbook.engines.launcher_process import LauncherProcess
from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_its_parent_learns_how_it_ended() -> None:
    process = LauncherProcess(["sh", "-c", "exit 3"])
    assert process.wait(WAIT_S) == 3
    assert process.has_ended
    process.close()


def test_a_standby_sees_and_makes_its_end_and_does_not_know_the_status() -> None:
    before = len(os.listdir("/proc/self/fd"))
    process = LauncherProcess(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.take_over()
    assert not process.has_ended
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert process.wait(WAIT_S) is None
    assert process.has_ended
    process.close()
    os.waitpid(process.pid, 0)  # it is this process's child all the same
    assert len(os.listdir("/proc/self/fd")) == before
