"""The sockets that reach ranks, with a peer that plays a rank: what is sent while its connection is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from meshbook.host.rank_sockets import RankSockets
from meshbook.wire import codec, messages, spawn
from meshbook.wire.loop import Loop

TOKEN = "secret"


class Peer:
    """Rank 0 as its host sees it, and the host's loop."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.context = Loop(), zmq.Context[zmq.Socket[bytes]]()
        self.reports: list[object] = []
        self.sockets = RankSockets(
            self.loop, self.context, folder, 0, TOKEN, (0,), lambda report, _: self.reports.append(report)
        )
        self.sockets.expect(0, 0)
        self.address = self.sockets.addresses[0]
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, spawn.rank_identity(0, 0))
        self.socket.setsockopt(zmq.LINGER, 0)

    def connect(self) -> None:
        self.socket.connect(self.address)

    def show_token(self) -> None:
        self.reports.clear()
        ready = messages.RankReady(rank=0, pid=1, device="cpu", token=TOKEN)
        self.socket.send_multipart(codec.encode(ready))
        while not self.reports:
            self.loop.run_once(0.05)

    def send_until_broken(self, caplog: pytest.LogCaptureFixture) -> int:
        """Send numbers until the host notices that the connection has broken; return the last, which it keeps."""
        number = 0
        while "connection of rank 0 has broken" not in caplog.text:
            number += 1
            self.socket.poll(0)  # both ends take part in the end of a connection
            self.loop.run_once(0.0)
            self.sockets.send_work(0, b"%d" % number)
        return number

    def receive(self) -> int:
        while not self.socket.poll(10):
            self.loop.run_once(0.05)
        return int(self.socket.recv_multipart()[-1])

    def close(self) -> None:
        self.sockets.close()
        self.socket.close()
        self.context.term()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


def test_what_is_sent_while_a_connection_is_broken_arrives_in_order_when_it_is_there_again(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.connect()
    peer.show_token()
    peer.socket.disconnect(peer.address)
    first = peer.send_until_broken(caplog)
    for number in range(first + 1, first + 4):
        peer.sockets.send_work(0, b"%d" % number)
    peer.connect()
    assert [peer.receive() for _ in range(4)] == list(range(first, first + 4))
    peer.sockets.send_work(0, b"99")  # and what comes later goes straight
    assert peer.receive() == 99


def test_nothing_is_kept_for_a_process_that_has_exited(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    peer.connect()
    peer.show_token()
    peer.socket.disconnect(peer.address)
    peer.send_until_broken(caplog)
    peer.sockets.forget(0)
    peer.sockets.send_work(0, b"7")
    peer.sockets.expect(0, 0)
    peer.connect()
    peer.show_token()
    peer.sockets.send_work(0, b"8")
    assert peer.receive() == 8
