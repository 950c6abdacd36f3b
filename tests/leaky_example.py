"""A test run that leaves everything behind, for tests/test_leaks.py to see it fail. Not collected with the others."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("starts_processes")
def test_passes_and_leaves_a_daemon_and_a_socket() -> None:
    os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)"], os.environ)  # it execs first
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(Path(os.environ["MESHBOOK_RUNTIME_DIR"]) / "left"))
