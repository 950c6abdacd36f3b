"""A host on another machine, as whoever starts it sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_processes")

_WITH_BLOCKED_SIGNALS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
os.execv(sys.executable, [sys.executable, "-P", "-m", "meshbook.host.remote", "m", "0", "--facts-only"])
"""


def test_signals_that_are_blocked_where_it_is_started_reach_it_and_what_it_starts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WITH_BLOCKED_SIGNALS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        assert b"facts" in host.stdout.readline()
        status = dict(line.split(":\t") for line in Path(f"/proc/{host.pid}/status").read_text().splitlines())
        assert int(status["SigBlk"], 16) == 0
        os.kill(host.pid, signal.SIGTERM)
        assert host.wait(WAIT_S) == -signal.SIGTERM
