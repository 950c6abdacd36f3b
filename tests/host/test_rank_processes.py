"""The processes of ranks, as the system knows them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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


def test_a_process_that_cannot_be_looked_at_may_be_ending_and_is_looked_at_again(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[Any] = []
    loop: Any = SimpleNamespace(
        clock=SystemClock(), observe=lambda look: look(), call_later=lambda _, look, logged: later.append(look)
    )
    no_log: Any = None
    ranks, ended = RankProcesses(loop), list[int]()
    ranks.add(0, RankProcess(child.pid, -1, -1, no_log))
    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr(Path, "read_bytes", _no_descriptor)
        assert ranks.ending() == (0,)
        ranks.find_ended(ended.append, with_zombies=True)
    child.kill()
    child.wait()
    assert not ended
    (look_again,) = later
    look_again()
    assert ended == [child.pid]


def _no_descriptor(*args: Any, **options: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
