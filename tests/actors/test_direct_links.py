"""Connections between machines, here between two ends in one process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from queue import Queue
from typing import Any

import msgspec
import pytest

from meshbook.actors.runtime.direct_links import DirectLinks
from meshbook.actors.runtime.relayed_peer import Carrier
from meshbook.wire.messages import NodeAddress, RelayedBytes
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_processes")


class End:
    def __init__(self, node: str) -> None:
        self.received: Queue[tuple[Carrier, RelayedBytes]] = Queue()
        self.links = DirectLinks("127.0.0.1", node, f"key of {node}", lambda *piece: self.received.put(piece))
        self.address = NodeAddress(node, f"key of {node}", 1, "", self.links.endpoint, self.links.server_key)

    def dial(self, address: NodeAddress) -> Any:
        found = self.links.dial(address)
        assert found is not None
        return found


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    both = End("a"), End("b")
    yield both
    for end in both:
        end.links.close()


def test_pieces_go_both_ways_on_a_connection_that_one_end_has_opened(ends: tuple[End, End]) -> None:
    a, b = ends
    link = a.dial(b.address)
    for number in range(100):
        link.send(RelayedBytes("a", "b", "s", b"%d" % number))
    found = [b.received.get(timeout=WAIT_S) for _ in range(100)]
    assert [piece.data for _, piece in found] == [b"%d" % number for number in range(100)]
    found[0][0].send(RelayedBytes("b", "a", "s", b"answer"))
    back, piece = a.received.get(timeout=WAIT_S)
    assert (back, piece.data) == (link, b"answer")


def test_who_does_not_know_the_key_is_not_heard(ends: tuple[End, End], caplog: pytest.LogCaptureFixture) -> None:
    a, b = ends
    a.dial(msgspec.structs.replace(b.address, key="another")).send(RelayedBytes("a", "b", "s", b"x"))
    when(lambda: "does not know this process's key" in caplog.text)
    assert b.received.empty()


def test_nobody_speaks_for_another_process(ends: tuple[End, End], caplog: pytest.LogCaptureFixture) -> None:
    a, b = ends
    a.dial(b.address).send(RelayedBytes("c", "b", "s", b"x"))
    when(lambda: "process a speaks for c" in caplog.text)
    assert b.received.empty()


def test_a_machine_that_cannot_be_dialled_is_left_to_the_supervisor(
    ends: tuple[End, End], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as closed:
        port = closed.getsockname()[1]
    address = msgspec.structs.replace(ends[1].address, endpoint=f"tcp://127.0.0.2:{port}")
    assert ends[0].links.dial(address) is None
    assert ends[0].links.dial(address) is None
    assert caplog.text.count("cannot be reached") == 1
    assert ends[0].links.dial(NodeAddress("client", "", 1, "elsewhere")) is None  # it does not listen


def test_what_is_sent_before_the_end_arrives() -> None:
    a, b = End("a"), End("b")
    try:
        link = a.dial(b.address)
        link.send(RelayedBytes("a", "b", "s", b"first"))
        b.received.get(timeout=WAIT_S)
        link.send(RelayedBytes("a", "b", "s", bytes(1 << 20)))
        a.links.close()
        assert len(b.received.get(timeout=WAIT_S)[1].data) == 1 << 20
    finally:
        b.links.close()
