"""The supervisor's driver in this process, without its loop: what it does when something beneath it fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.clock import ManualClock
from meshbook.supervisor.driver import Driver
from meshbook.wire import codec, messages, processes


class Served:
    """A driver, one client of it, and all that it has sent."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.driver = Driver(folder, "m", "token", address=None, owner=None)
        self.clock = self.driver._loop.clock = ManualClock()
        self.sent: list[tuple[bytes, Any]] = []
        self.driver._send = lambda identity, message: self.sent.append((identity, message))  # type: ignore[method-assign]

    def hear(self, identity: bytes, command: Any) -> None:
        if isinstance(command, messages.Hello):
            self.driver._on_client_hello(identity, codec.encode(command))
        else:
            self.driver._on_client_message(identity, codec.encode_body(command))

    def join(self, pid: int) -> None:
        for channel in ("send", "receive"):
            hello = messages.Hello(token="token", client="c", kind="script", pid=pid, channel=channel)  # type: ignore[arg-type]
            self.hear(f"c/{channel}".encode(), hello)

    @property
    def clients(self) -> int:
        return len(self.driver._state.info().clients)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.driver._loop.run_once(0.0)

    def close(self) -> None:
        for client in list(self.driver._receivers):
            self.driver._unregister_client(client)
        assert self.driver._agent is not None
        self.driver._agent.close()
        self.driver._client_router.close()
        self.driver._store.close()
        self.driver._context.term()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def test_a_command_that_the_supervisor_fails_at_is_refused_to_whoever_sent_it(served: Served) -> None:
    served.join(os.getpid())
    served.driver._state.command_received = lambda *args: {}["ranks"]  # type: ignore[method-assign, assignment]
    served.hear(b"c/send", messages.QueryStatus(call="c-1"))  # type: ignore[arg-type]
    identity, refused = served.sent[-1]
    assert identity == b"c/receive"
    assert (refused.call, refused.error) == ("c-1", "ProtocolError")
    assert "the mesh's supervisor failed at QueryStatus (KeyError: 'ranks')" in refused.text
    assert "supervisor.log" in refused.text


def test_a_callback_that_fails_is_told_once_in_the_cells_that_run(served: Served) -> None:
    served.join(os.getpid())
    cell = messages.OpenCall(call="c-1", label="cell 1", ranks=(0, 1), client="c", seconds=1.0)  # type: ignore[arg-type]
    served.driver._state.open_calls = lambda now: (cell,)  # type: ignore[method-assign]
    del served.sent[:]
    for _ in range(2):
        served.driver._loop.call_later(0.0, lambda: {}["host"])
        served.pass_time(0.1)
    ((identity, said),) = served.sent
    assert (identity, said.call) == (b"c/receive", "c-1")
    assert "the mesh's supervisor failed at what it does by itself (KeyError: 'host')" in said.items[0].item.text


def _child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def _no_pidfd(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def pidfd_open(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
@pytest.mark.usefixtures("starts_processes")
def test_without_pidfds_a_client_lives_as_long_as_its_process(
    served: Served, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _no_pidfd(monkeypatch, number)
    with _child() as child:
        served.join(child.pid)
        for _ in range(5):
            served.pass_time(10.0)
        assert served.clients == 1
        child.kill()
        child.wait()
        served.pass_time(10.0)
        assert served.clients == 0


def test_without_pidfds_another_process_of_the_same_number_is_not_the_client(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_pidfd(monkeypatch, errno.ENOSYS)
    ticks = iter((100, 100, 200))
    monkeypatch.setattr(processes, "_read_state_and_start", lambda pid: ("S", next(ticks)))
    served.join(os.getpid())
    served.pass_time(10.0)
    assert served.clients == 1
    served.pass_time(10.0)
    assert served.clients == 0


def test_a_client_whose_process_is_gone_already_has_left(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_pidfd(monkeypatch, errno.ESRCH)
    served.join(os.getpid())
    served.pass_time(0.1)
    assert served.clients == 0
