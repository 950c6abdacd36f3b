"""A host's own troubles: its fork server ends, may not fork, or is asked for more than a packet holds."""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from meshbook.host import starter as starters
from meshbook.host.agent import HostAgent
from meshbook.host.launcher import _read_tail
from meshbook.host.rank_processes import num_unread_bytes
from meshbook.host.rank_record import RankRecord
from meshbook.host.starter import ForkStarter, FreshStarter, RankProcess, make_pipe
from meshbook.wire import messages, spawn
from meshbook.wire.loop import Loop
from tests.host.host_driver import running_host


def test_ranks_that_end_with_their_fork_server_say_so() -> None:
    with running_host(2) as started:
        server = started.agent.launcher.starter
        assert isinstance(server, ForkStarter)
        assert server._process is not None
        call = started.start_cell_and_wait("import time\ntime.sleep(1000)")
        server._process.kill()
        finished = started.wait_for(messages.CallFinished, call)
        (reported,) = [report for report in started.reports if isinstance(report, messages.RanksExited)]
        exited = reported.exits  # of all at once: a client that hears of one must not take the others to be alive
        how = "ended with the fork server that it was forked from, which was killed by SIGKILL"
        assert [(report.rank, report.signal, report.description) for report in exited] == [
            (0, None, how),
            (1, None, how),
        ]
        assert {part.outcome.status for part in finished.outcomes} == {"lost"}


def test_what_ranks_have_started_ends_with_their_fork_server_or_their_host(tmp_path: Path) -> None:
    source = f"""
    import subprocess, time
    child = subprocess.Popen(["sleep", "1000"])
    with open({str(tmp_path)!r} + "/pid", "w") as file:
        file.write(str(child.pid))
    """
    for ends in ("fork server", "host"):
        with running_host(1, torch=False) as started:
            started.run(textwrap.dedent(source))
            child = psutil.Process(int((tmp_path / "pid").read_text()))
            server = started.agent.launcher.starter
            assert isinstance(server, ForkStarter)
            assert server._process is not None
            if ends == "fork server":
                server._process.kill()
            else:
                server._socket.shutdown(socket.SHUT_RDWR)  # as its own end is when it is killed
            started.wait_until(lambda child=child: not child.is_running() or child.status() == "zombie")  # type: ignore[misc]


def test_a_fork_server_that_receives_sigterm_goes_on_and_all_its_ranks_are_reported() -> None:
    with running_host(2) as started:
        server = started.agent.launcher.starter
        assert isinstance(server, ForkStarter)
        assert server._process is not None
        server._process.terminate()
        assert started.wait_for(messages.TerminationRequested).ranks == (0, 1)
        assert started.run("1 + 1").outcomes[0].outcome.status == "ok"


_THREAD_AT_IMPORT = """
import sys, threading
if "meshbook.rank.forkserver" in sys.orig_argv:
    threading.Thread(target=threading.Event().wait, name="plugin", daemon=True).start()
"""


def test_a_fork_server_whose_imports_have_started_a_thread_forks_nothing_and_the_first_cell_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_THREAD_AT_IMPORT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    with running_host(2) as started:
        assert isinstance(started.agent.launcher.starter, FreshStarter)
        call = started.start_cell("rank")
        finished = started.wait_for(messages.CallFinished, call)
        said = [report.items for report in started.reports if isinstance(report, messages.CallOutput)]
        notices = [item.item for items in (*said, finished.items) for item in items if hasattr(item, "item")]
        (text,) = {item.text for item in notices if isinstance(item, messages.Notice)}
        assert text.startswith("ranks are not forked but started in fresh interpreters, which is slower: its imports")
        assert [part.outcome.status for part in finished.outcomes] == ["ok"] * len(finished.outcomes)


def test_a_rank_is_told_more_than_a_packet_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = messages.MeshSpec
    large = {"LARGE": "x" * 120_000, "ALSO_LARGE": "y" * 120_000}
    monkeypatch.setattr(messages, "MeshSpec", lambda **known: made(**known, env=large))
    with running_host(1) as started:
        finished = started.run("import os\nlen(os.environ['LARGE'] + os.environ['ALSO_LARGE'])")
        value = finished.outcomes[0].outcome.value
        assert value is not None
        assert value.preview.text == "240000"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ForkStarter, socket.socket, list[str]]]:
    """A starter, the other end of its socket, and what it has told of failures."""
    failures: list[str] = []
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(starters, "_connect_branch", lambda source, listen: mine)
    starter = ForkStarter(
        Loop(),
        lambda pid, status: None,
        on_server_exit=failures.append,
        on_failure=failures.append,
        on_fork_unsafe=lambda reason, asked: None,
        on_terminating=lambda: None,
        with_torch=False,
        listen_path="",
        branch_from="a fake",
    )
    yield starter, theirs, failures
    for asked in starter._pending:
        asked.on_failed("the test is over")
    theirs.close()
    starter.close()


def _told(num_bytes: int = 0) -> spawn.RankConfig:
    return spawn.RankConfig(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=1,
        token="",
        work_address="",
        service_address="",
        spec=messages.MeshSpec(axes={"rank": 1}, env={"A": "x" * num_bytes}),
        threads=1,
    )


def test_asking_a_fork_server_that_takes_nothing_does_not_wait(
    beside: tuple[ForkStarter, socket.socket, list[str]],
) -> None:
    starter, theirs, failures = beside
    for _ in range(20):
        starter.start_rank(_told(30_000), lambda child: None)
    assert 0 < len(starter._outbox) < 20
    theirs.setblocking(False)
    heard = 0
    while heard < 20:
        try:
            data, descriptors, _, _ = socket.recv_fds(theirs, spawn.RECEIVE_BYTES, 6)
        except BlockingIOError:
            starter._loop.run_once(1.0)
            continue
        assert isinstance(spawn.fork_commands.decode(data), spawn.ForkRank)
        for descriptor in descriptors:
            os.close(descriptor)
        heard += 1
    assert (len(starter._outbox), failures) == (0, [])


def test_a_rank_that_the_system_has_no_room_for_is_said_and_the_next_is_started(
    beside: tuple[ForkStarter, socket.socket, list[str]],
) -> None:
    starter, theirs, failures = beside
    children: list[RankProcess] = []
    for _ in range(2):
        starter.start_rank(_told(), children.append)
    for report in (spawn.ForkFailed("no more processes"), spawn.Forked(4711)):
        theirs.send(spawn.encoder.encode(report))
    starter._loop.run_once(30.0)
    assert failures == ["rank 0 could not be started: no more processes"]
    assert [child.pid for child in children] == [4711]
    children[0].close()


def test_a_dead_ranks_pipe_that_another_process_fills_is_read_once() -> None:
    with running_host(1) as started:
        source = "import subprocess, os\nsubprocess.Popen(['yes'], start_new_session=True)\nos.kill(os.getpid(), 9)"
        finished = started.run(source)
        assert finished.outcomes[0].outcome.status == "lost"


def test_what_lies_in_a_pipe_is_counted() -> None:
    read, write = make_pipe()
    assert num_unread_bytes(read) == 0
    os.write(write, b"12345")
    assert num_unread_bytes(read) == 5
    os.close(write)
    os.close(read)


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    path.write_text("x" * 100_000 + "\nthe last line\n")
    assert len(_read_tail(path)) <= 8 << 10
    assert _read_tail(path).endswith("\nthe last line\n")
    assert _read_tail(tmp_path / "none") == ""


def test_a_rank_that_goes_on_reporting_does_not_hold_up_the_news_of_anothers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zmq.Context() as context:
        agent = HostAgent(Loop(), context, tmp_path, "token", 0, lambda report: None)
        agent.ledger.ranks.update({rank: RankRecord(rank) for rank in range(2)})
        heard: list[object] = []
        monkeypatch.setattr(agent._sockets, "_on_message", lambda socket, frames: heard.append(frames) or 1 / 0)
        for socket in ("_work", "_service"):
            monkeypatch.setattr(agent._sockets, socket, _Endless())
        agent._sockets.drain(len(agent.ledger.ranks))
        assert len(heard) == 2 * 2 * 256
        monkeypatch.undo()
        agent.close()


class _Endless:
    """A socket in which there is always one message more."""

    def poll(self, timeout: int) -> int:
        return 1

    def recv_multipart(self) -> list[bytes]:
        return [b"r0"]
