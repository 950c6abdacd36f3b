"""The processes of ranks, as the system knows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.clock import SystemClock
from meshbook.host.rank_processes import RankProcesses
from meshbook.host.starter import RankProcess

pytestmark = pytest.mark.usefixtures("starts_processes")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_a_process_that_its_fork_server_has_not_waited_for_is_left_to_it(child: subprocess.Popen[bytes]) -> None:
    """A supervisor that takes over would else say that nobody knows how it has ended."""
    loop: Any = SimpleNamespace(clock=SystemClock(), observe=lambda look: look())
    no_log: Any = None
    ranks = RankProcesses(loop)
    ranks.add(0, RankProcess(child.pid, -1, -1, no_log))
    assert (ranks.ended_pids(with_zombies=True), ranks.ending()) == ([], ())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (ranks.ended_pids(with_zombies=False), ranks.ending()) == ([], (0,))
    assert ranks.ended_pids(with_zombies=True) == [child.pid]
    child.wait()
    assert ranks.ended_pids(with_zombies=False) == [child.pid]
