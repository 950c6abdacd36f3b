"""A connection by way of a mesh: frames in pieces, no more on the way than is read, an end. No processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshbook.actors.runtime.peer import PeerLost, encode_frame
from meshbook.actors.runtime.relayed_peer import _PIECE_BYTES, _WINDOW_BYTES, RelayedPeer
from meshbook.errors import NotAttached, ProtocolError
from meshbook.wire.messages import NodeAddress, RelayedBytes

HERE, THERE = NodeAddress("here", "key", 1), NodeAddress("there", "key", 2)


class Wire:
    """What two ends send each other, until it is delivered."""

    may_lag = False

    def __init__(self) -> None:
        reactor: Any = SimpleNamespace(thread_id=threading.get_ident())
        self.pieces: deque[RelayedBytes] = deque()
        self.is_closed = False
        self.here = RelayedPeer(self, "here", "there", "s", THERE, reactor)
        self.there = RelayedPeer(self, "there", "here", "s", HERE, reactor)

    def close(self) -> None:
        pass

    def send(self, piece: RelayedBytes) -> None:
        if self.is_closed:
            raise NotAttached("this process has left the mesh")
        self.pieces.append(piece)

    def deliver(self) -> Iterator[bytes]:
        """Deliver all that comes, and what follows from it; yield the bodies that `there` gets."""
        while self.pieces:
            piece = self.pieces.popleft()
            end = self.there if piece.target == "there" else self.here
            yield from (bytes(body) for body in end.receive(piece))


def test_small_frames_arrive_as_they_were_sent() -> None:
    wire = Wire()
    for number in range(3):
        wire.here.send(encode_frame(b"%d" % number))
    assert list(wire.deliver()) == [b"0", b"1", b"2"]


def test_a_large_frame_goes_in_pieces_and_stops_for_want_of_credit() -> None:
    wire, body = Wire(), bytes(range(256)) * (3 * _WINDOW_BYTES // 256)
    wire.here.send(encode_frame(body))
    assert max(len(piece.data) for piece in wire.pieces) == _PIECE_BYTES
    assert sum(len(piece.data) for piece in wire.pieces) == _WINDOW_BYTES
    assert list(wire.deliver()) == [body]  # each reading gives credit for more


def test_frames_that_wait_for_credit_go_together() -> None:
    wire = Wire()
    wire.here.send(encode_frame(bytes(2 * _WINDOW_BYTES)))
    for number in range(100):
        wire.here.send(encode_frame(b"%d" % number))
    num_before = len(wire.pieces)
    received = list(wire.deliver())
    assert received[1:] == [b"%d" % number for number in range(100)]
    assert num_before == _WINDOW_BYTES // _PIECE_BYTES


def test_a_sender_waits_for_a_reader_that_does_not_keep_up_and_is_woken_when_it_is_lost() -> None:
    wire = Wire()
    wire.here._reactor.thread_id = 0  # type: ignore[misc]
    outcome: list[str] = []

    def send() -> None:
        wire.here.send(encode_frame(bytes(100 << 20)))
        try:
            wire.here.send(encode_frame(b"more"))
        except PeerLost as error:
            outcome.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    while wire.here._backlog_bytes == 0:
        threading.Event().wait(0.001)
    wire.here.close("its process (pid 2) has ended")
    thread.join()
    assert outcome == ["its process (pid 2) has ended"]


def test_who_has_not_introduced_itself_may_send_little() -> None:
    wire = Wire()
    wire.there.address = None
    wire.here.send(encode_frame(bytes(10_000)))
    with pytest.raises(ProtocolError, match="a frame of 10000 bytes came; 4096 are allowed"):
        list(wire.deliver())


def test_a_mesh_that_was_left_loses_its_peers() -> None:
    wire = Wire()
    wire.is_closed = True
    with pytest.raises(PeerLost, match="this process has left the mesh"):
        wire.here.send(encode_frame(b"x"))
