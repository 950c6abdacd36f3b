"""Fork servers that are branched off others, on each Python: asyncio has hooks of its own in forked processes.

Without torch, as for actors' light processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook.host.starter import rank_environment
from meshbook.wire import spawn
from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_processes")

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def folder() -> Iterator[str]:
    """A short path: that of a unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="mb", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def server(folder: str) -> Iterator[tuple[socket.socket, str]]:
    """A connection to a fork server, and the path at which it listens."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    alive, held = os.pipe()  # it ends when this process does
    command = [sys.executable, "-P", "-m", "meshbook.rank.forkserver", str(theirs.fileno()), str(alive)]
    environment = {**rank_environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, f"{folder}/first", "--no-torch"], pass_fds=(theirs.fileno(), alive), env=environment
    )
    theirs.close()
    os.close(alive)
    ours.settimeout(WAIT_S)
    yield ours, f"{folder}/first"
    ours.close()
    os.close(held)
    process.wait(WAIT_S)


def branch(path: str, listen_path: str) -> socket.socket:
    """A connection to a server that was branched off the one at `path`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(WAIT_S)
    connection.connect(path)
    request = spawn.BranchForkServer(environment=rank_environment(), listen_path=listen_path)
    connection.send(spawn.encoder.encode(request))
    return connection


def is_ready(connection: socket.socket) -> bool:
    data = connection.recv(spawn.RECEIVE_BYTES)
    return bool(data) and isinstance(spawn.fork_reports.decode(data), spawn.ForkServerReady)


def test_a_server_is_branched_off_one_that_was_branched_off_another(
    server: tuple[socket.socket, str], folder: str
) -> None:
    host, path = server
    assert is_ready(host)
    branches = []
    for number in range(4):
        branches.append(branch(path, f"{folder}/{number}"))
        assert is_ready(branches[-1])
        path = f"{folder}/{number}"
    for connection in branches:
        connection.close()
