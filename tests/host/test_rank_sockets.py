"""The sockets that reach ranks, with a peer that plays a rank: what is sent while its connection is broken."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from meshbook.host.rank_sockets import RankSockets
from meshbook.wire import codec, messages, spawn
from meshbook.wire.linked_sockets import LinkedDealer
from meshbook.wire.loop import Loop

TOKEN = "secret"


class Peer:
    """Rank 0 as its host sees it, and the host's loop."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.context = Loop(), zmq.Context[zmq.Socket[bytes]]()
        self.reports: list[Any] = []
        self.received: list[int] = []
        self.sockets = RankSockets(
            self.loop, self.context, folder, 0, TOKEN, (0,), lambda report, _: self.reports.append(report)
        )
        self.sockets.expect(0, 0)
        self.address = self.sockets.addresses[0]
        self.dealer = LinkedDealer(self.context, self.address, spawn.rank_identity(0, 0))

    def show_token(self) -> None:
        ready = messages.RankReady(rank=0, pid=1, device="cpu", token=TOKEN)
        self.dealer.introduce(codec.encode_body(ready))

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Let both ends handle what comes, until this is true."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if is_done():
                return
            self.loop.run_once(0.005)
            while self.dealer.socket.poll(0):
                body = self.dealer.accept(self.dealer.socket.recv_multipart())
                if body is not None:
                    self.received.append(int(body))
        raise AssertionError((self.reports, self.received))

    def report(self, number: int) -> None:
        self.dealer.send(codec.encode_body(messages.RankExiting(rank=number)))

    def cut(self) -> None:
        """Shut down the connection, with all that is in it. zmq's threads notice, and connect again."""
        for connection in self.connections():
            with connection:
                connection.shutdown(sockets.SHUT_RDWR)

    def connections(self) -> list[sockets.socket]:
        """Return duplicates of this process's connections to the host's socket."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # zmq's threads close theirs meanwhile
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                connection = sockets.socket(fileno=os.dup(int(name)))
                if _peer_of(connection) == self.address.removeprefix("ipc://"):
                    found.append(connection)
                else:
                    connection.close()
        return found

    def is_connected(self) -> bool:
        found = self.connections()
        for connection in found:
            connection.close()
        return bool(found)

    def close(self) -> None:
        self.sockets.close()
        self.dealer.close()
        self.context.term()


def _peer_of(connection: sockets.socket) -> object:
    try:
        return connection.getpeername()
    except OSError:
        return None


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


def test_what_is_lost_with_a_connection_arrives_once_and_in_order_when_it_is_there_again(peer: Peer) -> None:
    peer.show_token()
    peer.turn_until(lambda: bool(peer.reports))
    for number in range(200):
        peer.sockets.send_work(0, b"%d" % number)
        if number in (50, 150):
            peer.cut()
    peer.turn_until(lambda: len(peer.received) >= 200)
    assert peer.received == list(range(200))


def test_what_a_rank_sent_into_a_broken_connection_is_asked_for(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.show_token()
    peer.turn_until(lambda: bool(peer.reports))
    peer.reports.clear()
    lost: list[object] = []
    monkeypatch.setattr("meshbook.wire.linked_sockets.send_frames", lambda socket, frames: lost.append(frames))
    peer.report(0)  # lost in transit
    monkeypatch.undo()
    peer.cut()
    peer.turn_until(lambda: bool(peer.reports))
    assert (len(lost), [type(report) for report in peer.reports]) == (1, [messages.RankExiting])


def test_a_hello_that_was_lost_with_a_connection_is_repeated(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshbook.wire.linked_sockets.send_frames", lambda socket, frames: None)
    peer.show_token()  # lost in transit
    monkeypatch.undo()
    peer.turn_until(peer.is_connected)
    peer.cut()
    peer.turn_until(lambda: bool(peer.reports))
    peer.sockets.send_work(0, b"7")
    peer.turn_until(lambda: peer.received == [7])


def test_nothing_is_kept_for_a_process_that_has_exited(peer: Peer) -> None:
    peer.show_token()
    peer.turn_until(lambda: bool(peer.reports))
    peer.cut()
    peer.sockets.send_work(0, b"6")
    peer.sockets.forget(0)
    peer.sockets.send_work(0, b"7")
    peer.sockets.expect(0, 1)
    peer.dealer.close()
    peer.dealer = LinkedDealer(peer.context, peer.address, spawn.rank_identity(0, 1))
    peer.reports.clear()
    peer.show_token()
    peer.turn_until(lambda: bool(peer.reports))
    peer.received.clear()
    peer.sockets.send_work(0, b"8")
    peer.turn_until(lambda: peer.received == [8])
