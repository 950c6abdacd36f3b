"""A client's line to a supervisor that is this test."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from meshbook.controller import connection as connections
from meshbook.controller.connection import SupervisorConnection
from meshbook.errors import NotAttached
from meshbook.wire import codec, keys, messages, processes
from tests.budget import WAIT_S


class Supervisor:
    """One end of a line; the other is `line`."""

    def __init__(self, folder: Path, process: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{folder}/control.sock")
        found = keys.ConnectionInfo(
            name="m",
            address=f"ipc://{folder}/control.sock",
            token="token",
            process=processes.identify(process),
            started_at=0.0,
            protocol=codec.PROTOCOL.decode(),
        )
        welcomer = threading.Thread(target=self._welcome)
        welcomer.start()
        self.line = SupervisorConnection(found, kind="script")
        self.line.listen()
        welcomer.join(WAIT_S)

    def _welcome(self) -> None:
        for _ in range(2):
            identity, *frames = self.socket.recv_multipart()
            if codec.client_commands.decode(frames).channel == "receive":  # type: ignore[union-attr]
                self.listener = identity
        info = messages.MeshInfo("m", None, (), 1, 0.0, 1, "ready", (), ())
        self.say(messages.Welcome(info=info, open_calls=()))

    def say(self, report: Any) -> None:
        self.socket.send_multipart([self.listener, *codec.encode(report)])

    def close(self) -> None:
        self.line.close()
        self.context.destroy(linger=0)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    tmp_path.chmod(0o700)
    supervisor = Supervisor(tmp_path, os.getpid())
    yield supervisor
    supervisor.close()


def _finished(call: str) -> messages.CallFinished:
    item = messages.RankDisplay(ranks=(0,), item=messages.Notice("said last"))
    return messages.CallFinished(call=call, outcomes=(), seconds=0.0, items=(item,))  # type: ignore[arg-type]


def test_a_call_ends_although_what_shows_its_output_fails(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    def show(items: object) -> None:
        raise SystemExit("of a widget")

    def fail(items: object) -> None:
        raise ValueError("I/O operation on closed file")

    for show_it in (fail, fail, show):
        call = supervisor.line.next_call_id()
        command = messages.QueryStatus(call=call)
        future = supervisor.line.request(command, on_output=show_it)
        supervisor.say(_finished(call))
        assert future.result(WAIT_S).call == call
    reported = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [line.partition(", which goes on")[0] for line in reported] == [
        "an error in Meshbook's own thread for the mesh 'm' (ValueError: I/O operation on closed file)",
        "an error in Meshbook's own thread for the mesh 'm' (SystemExit: of a widget)",
    ]


def test_a_report_that_cannot_be_read_does_not_end_the_listening(supervisor: Supervisor) -> None:
    supervisor.socket.send_multipart([supervisor.listener, codec.PROTOCOL, b"\xc1"])
    call = supervisor.line.next_call_id()
    future = supervisor.line.request(messages.QueryStatus(call=call))
    supervisor.say(messages.CommandReply(call=call))
    assert future.result(WAIT_S).call == call


def test_one_listener_that_fails_does_not_keep_the_news_from_the_next(supervisor: Supervisor) -> None:
    heard = threading.Event()
    supervisor.line.listeners.segments_released += [lambda report: {}["x"], lambda report: heard.set()]
    supervisor.say(messages.SegmentsReleased(rank=0, segments=()))
    assert heard.wait(WAIT_S)


@pytest.mark.usefixtures("starts_processes")
def test_why_a_mesh_has_ended_is_known_however_late_its_last_report_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed, find_successor = threading.Event(), keys.find_successor

    def note_and_find(found: keys.ConnectionInfo) -> tuple[keys.ConnectionInfo | None, bool]:
        noticed.set()
        return find_successor(found)

    monkeypatch.setattr(keys, "find_successor", note_and_find)
    monkeypatch.setattr(connections, "_LAST_REPORTS_TIMEOUT_S", 1e6)
    tmp_path.chmod(0o700)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        supervisor = Supervisor(tmp_path, child.pid)
        future = supervisor.line.request(messages.QueryStatus(call=supervisor.line.next_call_id()))
        child.kill()
        assert noticed.wait(WAIT_S)
        with pytest.raises(TimeoutError):  # it waits for the end of the connection
            future.result(0.2)
        supervisor.say(messages.MeshStopped(reason="stopped by a notebook"))
        with pytest.raises(NotAttached, match="stopped by a notebook"):
            future.result(WAIT_S)
        assert not supervisor.line.ended_unexpectedly
        supervisor.close()


@pytest.mark.parametrize("is_closed_before", [False, True])
@pytest.mark.usefixtures("starts_processes")
def test_a_supervisor_that_was_killed_has_no_last_report_and_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed_before: bool
) -> None:
    monkeypatch.setattr(connections, "_LAST_REPORTS_TIMEOUT_S", 1e6)
    tmp_path.chmod(0o700)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        supervisor = Supervisor(tmp_path, child.pid)
        future = supervisor.line.request(messages.QueryStatus(call=supervisor.line.next_call_id()))
        if is_closed_before:
            supervisor.context.destroy(linger=0)
        child.kill()
        child.wait()
        if not is_closed_before:
            supervisor.context.destroy(linger=0)
        with pytest.raises(NotAttached, match=r"its supervisor .* has ended"):
            future.result(WAIT_S)
        assert supervisor.line.ended_unexpectedly
        supervisor.close()


@pytest.mark.usefixtures("starts_processes")
def test_without_pidfds_the_end_of_the_supervisor_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "open_pidfd", lambda pid: None)
    monkeypatch.setattr(connections, "_LIVENESS_POLL_S", 0.01)
    monkeypatch.setattr(connections, "_LAST_REPORTS_TIMEOUT_S", 0.0)  # its connection is this test's, and stays
    tmp_path.chmod(0o700)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        supervisor = Supervisor(tmp_path, child.pid)
        future = supervisor.line.request(messages.QueryStatus(call=supervisor.line.next_call_id()))
        child.kill()
        child.wait()
        with pytest.raises(NotAttached, match="has ended"):
            future.result(WAIT_S)
        supervisor.close()
