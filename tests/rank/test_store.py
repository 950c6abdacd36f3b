"""The store in which ranks find each other: who can reach it, and how it is started."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.rank.worlds import DEADLINE_S, ROOT


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a store that runs as ranks' hosts start one."""
    read, write = os.pipe()
    store = subprocess.Popen([sys.executable, "-m", "meshbook.rank.store", str(write)], pass_fds=[write], cwd=ROOT)
    os.close(write)
    with os.fdopen(read) as told:
        readable, _, _ = select.select([told], [], [], DEADLINE_S)
        assert readable
        yield int(told.readline())
        assert told.read() == ""  # the port and nothing else, and the pipe is closed
    store.kill()
    store.wait(30)


def test_it_keeps_what_ranks_put_into_it(port: int) -> None:
    program = (
        "import sys; from meshbook.rank.groups import connect_store; "
        "store = connect_store('127.0.0.1', int(sys.argv[1]), 30.0); "
        "store.set(sys.argv[2], 'here'); print(store.add('ranks', 1), store.get('0').decode())"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", program, str(port), name],
            cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
        ).stdout
        for name in ("0", "1")
    ]  # fmt: skip
    assert answers == ["1 here\n", "2 here\n"]


def test_it_is_reached_over_loopback_and_from_nowhere_else(port: int) -> None:
    """It asks nobody for a key."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S):
        pass
    for address in addresses_of_this_machine():
        with pytest.raises(ConnectionRefusedError), socket.create_connection((address, port), timeout=DEADLINE_S):
            pass


def addresses_of_this_machine() -> list[str]:
    return [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
