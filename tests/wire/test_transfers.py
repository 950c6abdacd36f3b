"""Values between machines, without machines: requests and chunks are handed from one end to the other."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest

from meshbook.wire import codec
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.messages import BufferChunk, FetchChunk, InlineBuffer, Payload, SharedBuffer
from meshbook.wire.shared_buffers import find_shared, replace_shared
from meshbook.wire.transfers import CHUNK_BYTES, BufferFetcher, Copies, serve_chunks, without_data


class Ends:
    """A machine with values, and one that fetches them; `carry` is the wire between them."""

    def __init__(self) -> None:
        self.there, self.here = SegmentPool(), SegmentPool()
        self.fetcher = BufferFetcher(self.here)
        self.requests: deque[FetchChunk] = deque()
        self.found: list[Copies | str] = []

    def fetch(self, buffers: list[SharedBuffer], *, directly: bool = False) -> str:
        return self.fetcher.fetch(buffers, 1, self.requests.append, self.found.append, directly=directly)

    def carry(self, num_requests: int = 1000) -> None:
        for _ in range(num_requests):
            if not self.requests:
                return
            for chunk in serve_chunks(self.requests.popleft()):
                self.fetcher.handle(chunk)

    def contents(self, buffers: list[SharedBuffer]) -> list[bytes]:
        """What has arrived of a transfer that is done."""
        (copies,) = self.found
        assert isinstance(copies, dict)
        return [bytes(view) for view in SegmentReader().open_all([copies[buffer] for buffer in buffers])]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    with ends.there, ends.here:
        yield ends


def shared(ends: Ends, *contents: bytes) -> list[SharedBuffer]:
    written = ends.there.write([memoryview(content) for content in contents])
    return [one for one in written if isinstance(one, SharedBuffer)]


CONTENTS = [bytes(range(256)) * 400, b"", b"x" * (3 * CHUNK_BYTES + 17), b"y" * (9 << 20)]


@pytest.mark.parametrize("directly", [False, True])
def test_what_arrives_is_what_was_sent(ends: Ends, directly: bool) -> None:
    buffers = shared(ends, *CONTENTS)
    ends.fetch(buffers, directly=directly)
    ends.carry()
    assert ends.contents(buffers) == CONTENTS


def test_what_a_data_connection_has_not_brought_is_asked_for_as_messages(ends: Ends) -> None:
    content = random.Random(0).randbytes(50 << 20)
    buffers = shared(ends, content)
    name = ends.fetch(buffers, directly=True)
    assert all(request.directly for request in ends.requests)
    half_brought, lost = list(serve_chunks(ends.requests.popleft())), ends.requests.popleft()
    for chunk in half_brought[:3]:
        ends.fetcher.handle(chunk)
    ends.carry(1)
    ends.requests.clear()
    ends.fetcher.ask_again(name)
    assert not any(request.directly for request in ends.requests)
    late = [*half_brought, *serve_chunks(lost)]
    for chunk in late:  # of requests that were made again; they are not counted twice
        ends.fetcher.handle(chunk)
    ends.carry()
    assert ends.contents(buffers) == [content]
    ends.fetcher.ask_again(name)  # of a transfer that is done


def test_a_piece_that_comes_twice_is_dropped(ends: Ends) -> None:
    content = random.Random(0).randbytes(12 << 20)
    buffers = shared(ends, content)
    ends.fetch(buffers, directly=True)
    while ends.requests:
        for chunk in serve_chunks(ends.requests.popleft()):
            ends.fetcher.handle(chunk)
            ends.fetcher.handle(chunk)
    assert ends.contents(buffers) == [content]


def test_few_chunks_are_asked_for_at_once(ends: Ends) -> None:
    ends.fetch(shared(ends, b"z" * (40 << 20)))
    num_requested = len(ends.requests)
    assert num_requested == 8
    ends.carry(3)
    assert len(ends.requests) == num_requested
    assert max(request.nbytes for request in ends.requests) == CHUNK_BYTES


def test_a_value_that_is_gone_leaves_no_memory_behind(ends: Ends) -> None:
    ends.fetch(shared(ends, b"z" * (20 << 20)))
    ends.carry(2)
    ends.there.close()
    ends.carry()
    (reason,) = ends.found
    assert isinstance(reason, str)
    assert "no longer holds the data of this value" in reason
    assert ends.here.used_bytes == 0


def test_a_value_whose_memory_was_reused_does_not_arrive(ends: Ends) -> None:
    (buffer,) = shared(ends, b"z" * (2 << 20))
    ends.there.release(buffer.segment)
    shared(ends, b"o" * (2 << 20))
    ends.fetch([buffer])
    ends.carry()
    assert ends.found[0] == f"process {buffer.pid} has reused the memory of this value; send it again"


def test_chunks_of_a_cancelled_transfer_are_dropped(ends: Ends) -> None:
    name = ends.fetch(shared(ends, b"z" * (20 << 20)))
    ends.fetcher.cancel(name, "its machine is lost")
    ends.carry()
    assert ends.found == ["its machine is lost"]
    assert ends.here.used_bytes == 0


def test_buffers_are_found_and_replaced_wherever_they_are() -> None:
    first, second, copy = (SharedBuffer(1, number, 4096, 9, f"s{number}.1") for number in (1, 2, 3))
    payload = Payload(b"p", (first, InlineBuffer(b"i"), second, first))
    message = ({"a": [payload]}, None, 3)
    assert find_shared(message) == [first, second]
    replaced = replace_shared(message, {first: copy})
    assert find_shared(replaced) == [copy, second]
    assert find_shared(message) == [first, second]


def test_a_standby_is_given_the_size_of_a_large_chunk_and_comes_to_the_same(ends: Ends) -> None:
    ends.fetch(shared(ends, CONTENTS[2]))
    while ends.requests:
        (served,) = serve_chunks(ends.requests.popleft())
        body = codec.encode_body(served)
        chunk = codec.host_commands.decode_body(without_data(body, codec.host_commands))
        assert isinstance(chunk, BufferChunk)
        assert len(chunk.data) + chunk.left_out in (CHUNK_BYTES, 17)
        ends.fetcher.handle(chunk)
    assert isinstance(ends.found[0], dict)


def test_all_that_is_on_its_way_can_be_ended_with_a_reason(ends: Ends) -> None:
    for _ in range(2):
        ends.fetch(shared(ends, CONTENTS[3]))
    ends.fetcher.cancel_all("it was killed")
    assert ends.found == ["it was killed"] * 2
    assert ends.here.used_bytes == 0
