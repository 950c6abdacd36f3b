"""Data connections: pieces of buffers from a process to another, here two loops of this one."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from meshbook.wire import data_connections
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.data_connections import DataConnections
from meshbook.wire.loop import Loop
from meshbook.wire.messages import BufferChunk, DataAddress, FetchChunk, SharedBuffer
from meshbook.wire.transfers import BufferFetcher, Copies, serve_chunks
from tests.budget import WAIT_S, when

HOST, SUPERVISOR = 3, 0  # as they know each other


class Ends:
    """A host, which listens and has values, and a supervisor, which connects and fetches them."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.there, self.here = SegmentPool(), SegmentPool()
        self.fetcher = BufferFetcher(self.here)
        self.found: list[Copies | str] = []
        self.num_ended = 0
        self.by_message: list[FetchChunk] = []
        self.host = DataConnections(self.loop, lambda *_: None, lambda _: None)
        self.supervisor = DataConnections(self.loop, self._came, self._ended)
        self.name = ""
        self.num_served: int | None = None  # requests until the connection ends; None: it does not

    def _came(self, host: int, chunk: BufferChunk) -> None:
        assert host == HOST
        self.fetcher.handle(chunk)

    def _ended(self, host: int) -> None:
        assert host == HOST
        self.num_ended += 1
        self.fetcher.ask_again(self.name)

    def connect(self, address: DataAddress) -> None:
        self.supervisor.dial(HOST, address)
        self.turn_until(lambda: self.supervisor.is_open(HOST) and self.host.is_open(SUPERVISOR))

    def turn_until(self, is_so: object) -> None:
        """Let the loop turn until something is so."""
        assert callable(is_so)

        def turn() -> bool:
            self.loop.run_once(0.01)
            return bool(is_so())

        when(turn)

    def fetch(self, buffers: list[SharedBuffer]) -> None:
        self.name = self.fetcher.fetch(buffers, 1, self._request, self.found.append, directly=True)

    def _request(self, request: FetchChunk) -> None:
        if request.directly and self.num_served is not None:
            self.num_served -= 1
            if self.num_served < 0:
                self.host.drop(SUPERVISOR)
                return
        if not request.directly or not self.host.serve(SUPERVISOR, request):
            self.by_message.append(request)
            self.loop.call_later(0.0, lambda: [self.fetcher.handle(chunk) for chunk in serve_chunks(request)] and None)

    def contents(self, buffers: list[SharedBuffer]) -> list[bytes]:
        self.turn_until(lambda: self.found)
        (copies,) = self.found
        assert isinstance(copies, dict), copies
        return [bytes(view) for view in SegmentReader().open_all([copies[buffer] for buffer in buffers])]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(data_connections, "_REDIAL_S", 0.05)
    ends = Ends()
    with ends.there, ends.here:
        yield ends
        ends.supervisor.close()
        ends.host.close()


@pytest.fixture
def address(ends: Ends) -> DataAddress:
    address = ends.host.listen("127.0.0.1", SUPERVISOR)
    assert address is not None
    return address


def shared(ends: Ends, *contents: bytes) -> list[SharedBuffer]:
    written = ends.there.write([memoryview(content) for content in contents])
    return [one for one in written if isinstance(one, SharedBuffer)]


CONTENTS = [random.Random(number).randbytes(nbytes) for number, nbytes in enumerate((1, 70_000, 3 << 20, 41 << 20))]


def test_values_arrive_whole(ends: Ends, address: DataAddress) -> None:
    ends.connect(address)
    buffers = shared(ends, *CONTENTS)
    ends.fetch(buffers)
    assert ends.contents(buffers) == CONTENTS
    assert not ends.by_message


def test_both_ends_can_ask(ends: Ends, address: DataAddress) -> None:
    ends.connect(address)
    (buffer,) = shared(ends, CONTENTS[2])
    came: list[BufferChunk] = []
    ends.host._on_chunk = lambda _, chunk: came.append(chunk)
    assert ends.supervisor.serve(HOST, FetchChunk("a", 0, buffer, 0, buffer.nbytes))
    ends.turn_until(lambda: len(came) == 3)
    assert b"".join(chunk.data for chunk in came) == CONTENTS[2]


def test_a_value_that_is_gone_is_an_error(ends: Ends, address: DataAddress) -> None:
    ends.connect(address)
    buffers = shared(ends, CONTENTS[3])
    ends.there.close()
    ends.fetch(buffers)
    ends.turn_until(lambda: ends.found)
    assert "no longer holds the data of this value" in str(ends.found[0])


def test_when_it_ends_the_rest_comes_as_messages_and_then_there_is_another(ends: Ends, address: DataAddress) -> None:
    ends.connect(address)
    buffers = shared(ends, CONTENTS[3])
    ends.num_served = 4
    ends.fetch(buffers)
    assert ends.contents(buffers) == [CONTENTS[3]]
    assert ends.by_message
    assert ends.num_ended == 1
    ends.turn_until(lambda: ends.supervisor.is_open(HOST))


def test_a_host_that_listens_anew_has_one_connection_again(ends: Ends, address: DataAddress) -> None:
    ends.connect(address)
    successor = DataConnections(ends.loop, lambda *_: None, lambda _: None)
    listening = successor.listen("127.0.0.1", SUPERVISOR)
    assert listening is not None
    ends.supervisor.dial(HOST, listening)
    ends.turn_until(lambda: successor.is_open(SUPERVISOR))
    ends.host.close()
    ends.turn_until(lambda: ends.num_ended)
    turns: list[int] = []
    ends.loop.call_later(10 * data_connections._REDIAL_S, lambda: turns.append(1))
    ends.turn_until(lambda: turns)
    assert ends.num_ended == 1  # no attempt for the connection that has ended has replaced the new one
    assert successor.is_open(SUPERVISOR)
    successor.close()


def test_where_there_was_a_way_it_is_tried_until_there_is_one_again(ends: Ends, address: DataAddress) -> None:
    ends.connect(address)
    ends.host.close()
    ends.turn_until(lambda: ends.num_ended > 2)  # attempts that have failed
    ends.host = DataConnections(ends.loop, lambda *_: None, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_connections.secrets, "token_bytes", lambda nbytes: address.key)
        patch.setattr(data_connections.sockets, "create_server", partial(_listen_at, address))
        assert ends.host.listen(address.host, SUPERVISOR) == address
    ends.turn_until(lambda: ends.supervisor.is_open(HOST))
    ends.supervisor.drop(HOST)
    num_ended = ends.num_ended
    ends.turn_until(lambda: ends.num_ended > num_ended)
    ends.turn_until(lambda: not ends.host.is_open(SUPERVISOR))
    assert not ends.supervisor.is_open(HOST)


def _listen_at(address: DataAddress, *_: object, **__: object) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address.host, address.port))
    listener.listen()
    return listener


def test_a_connection_to_nobody_is_none(ends: Ends, address: DataAddress) -> None:
    ends.host.close()
    ends.supervisor.dial(HOST, address)
    (buffer,) = shared(ends, b"x" * 70_000)
    assert not ends.supervisor.is_open(HOST)
    assert not ends.supervisor.serve(HOST, FetchChunk("a", 0, buffer, 0, 10))


def test_an_address_that_is_not_this_machines_is_not_listened_on(ends: Ends) -> None:
    assert ends.host.listen("192.0.2.1", SUPERVISOR) is None


def test_who_does_not_have_the_key_gets_nothing_and_stops_nobody(ends: Ends, address: DataAddress) -> None:
    stranger = DataConnections(ends.loop, lambda *_: None, lambda _: None)
    stranger.dial(HOST, msgspec.structs.replace(address, key=os.urandom(32)))
    with socket.create_connection((address.host, address.port), WAIT_S) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(1000):
                pass
    ends.connect(address)
    assert not stranger.is_open(HOST)
    buffers = shared(ends, CONTENTS[1])
    ends.fetch(buffers)
    assert ends.contents(buffers) == [CONTENTS[1]]


class _Between:
    """Someone on the way between two machines, who sees and changes what is sent."""

    def __init__(self, address: DataAddress) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = msgspec.structs.replace(address, port=self._listener.getsockname()[1])
        self._there = (address.host, address.port)
        self.seen = bytearray()
        self.flip_after: int | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        self._listener.close()
        far = socket.create_connection(self._there)
        threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True).start()
        self._pass_on(far, near, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_looked_at: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if is_looked_at:
                    self.seen += data
                    if self.flip_after is not None and len(self.seen) > self.flip_after:
                        data[-1] ^= 1
                        self.flip_after = None
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            one.close()


def test_what_is_sent_cannot_be_read_on_the_way(ends: Ends, address: DataAddress) -> None:
    between = _Between(address)
    ends.connect(between.address)
    buffers = shared(ends, b"a secret of 16 B" * 10_000)
    ends.fetch(buffers)
    ends.contents(buffers)
    assert len(between.seen) > 160_000
    assert b"secret" not in between.seen


def test_what_is_changed_on_the_way_is_not_taken(ends: Ends, address: DataAddress) -> None:
    between = _Between(address)
    ends.connect(between.address)
    between.flip_after = 5 << 20
    buffers = shared(ends, CONTENTS[3])
    ends.fetch(buffers)
    assert ends.contents(buffers) == [CONTENTS[3]]
    assert between.flip_after is None
    assert ends.num_ended
    assert ends.by_message
