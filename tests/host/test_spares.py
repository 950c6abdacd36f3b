"""A host's spares, with and without a fork server, and what a fork server that is killed was to start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshbook.host.starter import ForkStarter
from meshbook.wire import messages
from tests.host.host_driver import HostDriver, running_host
from tests.host.test_starter import kill_fork_server

pytestmark = pytest.mark.usefixtures("starts_processes")


def wait_for_spare(started: HostDriver, but: int | None = None) -> int:
    """Wait until a spare is ready, and another than this one; its pid."""

    def ready() -> int | None:
        (info,) = started.agent.launcher.spares.infos()
        return info.pid if info.state == "ready" and info.pid != but else None

    pid: int = started.wait_until(ready)
    return pid


def replace(started: HostDriver, rank: int) -> int:
    """Kill a rank and start it again; the pid of its new process."""
    former = started.pid(rank)
    os.kill(former, signal.SIGKILL)
    started.wait_for(messages.RankExited)
    begin_to_start(started, rank)
    started.wait_until(lambda: started.agent.ledger.ranks[rank].service_ready)
    assert started.pid(rank) != former
    return started.pid(rank)


def begin_to_start(started: HostDriver, rank: int) -> None:
    ranks, incarnation = started.ranks, started.agent.ledger.ranks[rank].incarnation + 1
    start = messages.StartRanks(started.spec, (rank,), len(ranks), ranks, (incarnation,))  # type: ignore[arg-type]
    started.send(start)


def test_spares_are_fresh_interpreters_where_ranks_are() -> None:
    with running_host(1, torch=False, start_method="fresh") as started:
        started.send(messages.PrepareSpares(started.spec, 1, (0,)))  # type: ignore[arg-type]
        spare = wait_for_spare(started)
        assert replace(started, 0) == spare
        assert started.run("print(1)").outcomes[0].outcome.status == "ok"


def test_a_spare_is_replaced_if_its_fork_server_dies() -> None:
    with running_host(1, torch=False) as started:
        started.send(messages.PrepareSpares(started.spec, 1, (0,)))  # type: ignore[arg-type]
        former = wait_for_spare(started)
        kill_fork_server(started)
        spare = wait_for_spare(started, but=former)
        started.wait_until(lambda: not Path(f"/proc/{former}").exists())
        assert replace(started, 0) == spare


# Where files have been looked at, a spare answers.
SLOW = """
import time
from meshbook.rank import spare
stamp = spare._stamp
spare._stamp = lambda path: (time.sleep(2), stamp(path))[1]
"""


def test_a_spare_that_is_slow_to_answer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_look.py").write_text(SLOW)
    os.utime(tmp_path / "slow_to_look.py", (1e9, 1e9))  # long before it is imported
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with running_host(1, torch=False) as started:
        started.agent.launcher.spares.learn(("slow_to_look",))
        started.send(messages.PrepareSpares(started.spec, 1, (0,)))  # type: ignore[arg-type]
        spare = wait_for_spare(started)
        assert replace(started, 0) == spare


def test_a_package_with_which_spares_die_is_left_to_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with running_host(1, torch=False) as started:
        started.agent.launcher.spares.learn(("crashing", "colorsys"))
        started.send(messages.PrepareSpares(started.spec, 1, (0,)))  # type: ignore[arg-type]
        wait_for_spare(started)
        (info,) = started.agent.launcher.spares.infos()
        assert info.left_out == (("crashing", "the process ended while it was imported"),)
        assert info.former == "was killed by SIGKILL"
        assert info.num_modules > 0


def test_what_a_fork_server_was_to_start_when_it_was_killed_is_started_by_another() -> None:
    with running_host(2, torch=False) as started:
        os.kill(started.pid(1), signal.SIGKILL)
        started.wait_for(messages.RankExited)
        server = started.agent.launcher.starter
        assert isinstance(server, ForkStarter)
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGSTOP)  # it does not read what it is asked
        begin_to_start(started, 1)
        os.kill(server._process.pid, signal.SIGKILL)
        started.wait_until(lambda: started.agent.ledger.ranks[1].service_ready)
        assert not [report for report in started.reports if isinstance(report, messages.HostFailed)]
        assert len(started.run("print(1)").outcomes) == 1
