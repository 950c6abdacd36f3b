"""What the system says of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshbook.wire.processes import is_ending

pytestmark = pytest.mark.usefixtures("starts_processes")


def test_a_process_is_ending_from_when_it_is_killed_until_its_parent_has_waited_for_it_and_afterwards() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_ending(process.pid)
    assert not is_ending(os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(process.pid)
    process.communicate()
    assert is_ending(process.pid)
