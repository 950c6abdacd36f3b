"""A host's own troubles: its fork server ends, may not fork, or is asked for more than a packet holds."""

from __future__ import annotations

import os
import signal
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from meshbook.host import starter as starters
from meshbook.host.agent import HostAgent
from meshbook.host.fresh_starter import FreshStarter
from meshbook.host.launcher import _read_tail
from meshbook.host.rank_processes import num_unread_bytes
from meshbook.host.rank_record import RankRecord
from meshbook.host.starter import ForkStarter, RankProcess, make_pipe, receive_report
from meshbook.wire import messages, spawn
from meshbook.wire.loop import Loop
from tests.host.host_driver import HostDriver, running_host

pytestmark = pytest.mark.usefixtures("starts_processes")


def kill_fork_server(started: HostDriver) -> None:
    server = started.agent.launcher.starter
    assert isinstance(server, ForkStarter)
    assert server._process is not None
    server._process.kill()
    started.wait_until(lambda: started.agent.launcher.starter is None)


def test_ranks_outlive_their_fork_server_and_their_ends_are_reported_as_far_as_known() -> None:
    with running_host(3, torch=False) as started:
        call = started.start_cell_and_wait("import time\ntime.sleep(1000)")
        kill_fork_server(started)
        os.kill(started.pid(1), signal.SIGKILL)
        exited = started.wait_for(messages.RankExited)
        assert (exited.rank, exited.description) == (1, "ended; its exit status was lost with the fork server")
        started.send(messages.KillRanks(call="k", ranks=(2,), signal=signal.SIGKILL))  # type: ignore[arg-type]
        started.wait_until(lambda: len(exits_of(started)) == 2)
        assert (exits_of(started)[1].rank, exits_of(started)[1].description) == (2, "was killed by SIGKILL")
        statuses = {part.ranks: part.outcome.status for part in started.interrupt(call).outcomes}
        assert statuses == {(0,): "interrupted", (1,): "lost", (2,): "lost"}
        said = "the fork server was killed by SIGKILL; its ranks go on, and the next rank that starts gets a new one"
        assert notices_in(started, started.run("1")) == [said]


def notices_in(started: HostDriver, finished: messages.CallFinished) -> list[str]:
    """What a call has shown of the mesh's own, while it ran and with its end."""
    output = [report for report in started.reports if isinstance(report, messages.CallOutput)]
    items = [item for report in output if report.call == finished.call for item in report.items]
    displays = [item.item for item in (*items, *finished.items) if isinstance(item, messages.RankDisplay)]
    return [item.text for item in displays if isinstance(item, messages.Notice)]


def exits_of(started: HostDriver) -> list[messages.RankExited]:
    return [report for report in started.reports if isinstance(report, messages.RankExited)]


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_and_what_they_have_started_end_with_their_host_whatever_they_do(tmp_path: Path) -> None:
    source = f"""
    import ctypes, subprocess
    child = subprocess.Popen(["sleep", "1000"])
    with open({str(tmp_path)!r} + "/pid", "w") as file:
        file.write(str(child.pid))
    """
    with running_host(1, torch=False) as started:
        started.run(textwrap.dedent(source))
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        begun = tmp_path / "begun"
        started.start_cell(f"open({str(begun)!r}, 'x').close()\nctypes.PyDLL(None).sleep(1000)")  # keeps the GIL
        started.wait_until(begun.exists)
        kill_fork_server(started)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, started.agent.launcher._host_pipe_write)  # closed, as when the host is killed
        os.close(null)
        started.wait_for(messages.RankExited)
        started.wait_until(lambda: has_ended(child))


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


def test_the_last_words_of_a_server_are_heard_though_it_has_not_read_what_it_was_sent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            receive_report(ours)
        ours.send(b"a request")
        theirs.send(b"may not fork")
        theirs.close()
        assert [receive_report(ours), receive_report(ours)] == [b"may not fork", b""]


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
        host_pipe=0,
        branch_from="a fake",
    )
    yield starter, theirs, failures
    for asked in starter._pending.values():
        asked.on_failed("the test is over")
    theirs.close()
    starter.close()


def _told(num_bytes: int = 0, *, rank: int = 0) -> spawn.RankConfig:
    return spawn.RankConfig(
        rank=rank,
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
    for rank in range(20):
        starter.start_rank(_told(30_000, rank=rank), lambda child: None)
    assert 0 < len(starter._outbox) < 20
    theirs.setblocking(False)
    heard = 0
    while heard < 20:
        try:
            data, descriptors, _, _ = socket.recv_fds(theirs, spawn.RECEIVE_BYTES, 7)
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
    for rank in range(2):
        starter.start_rank(_told(rank=rank), children.append)
    for report in (spawn.ForkFailed(1, "no more processes"), spawn.Forked(2, 4711)):
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
        endless = _Endless()
        for router in ("_work", "_service"):
            monkeypatch.setattr(agent._sockets, router, endless)
        agent._sockets.drain(len(agent.ledger.ranks))
        assert endless.num_received == 2 * 2 * 256
        monkeypatch.undo()
        agent.close()


class _Endless:
    """A router in which there is always one message more, and none that can be handled."""

    num_received = 0

    def receive_pending(self) -> bool:
        self.num_received += 1
        raise ValueError("a message that cannot be handled")
