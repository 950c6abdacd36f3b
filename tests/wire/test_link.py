"""Numbered messages over a connection that loses, repeats and reorders: each arrives once, in order."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from meshbook.wire.codec import PROTOCOL
from meshbook.wire.link import Frames, Link, is_numbered

A, B = 0, 1


class Line:
    """Two links, and what is on its way to each of them."""

    def __init__(self) -> None:
        self.ends = (Link(), Link())
        self.on_the_way: tuple[list[Frames], list[Frames]] = ([], [])
        self.arrived: tuple[list[bytes], list[bytes]] = ([], [])
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])

    def send(self, end: int) -> None:
        body = b"%d" % len(self.sent[end])
        self.sent[end].append(body)
        self.on_the_way[1 - end].append((self.ends[end].number(body), body))

    def deliver(self, end: int, index: int = 0) -> None:
        if self.on_the_way[end]:
            self.hear(end, self.on_the_way[end].pop(index % len(self.on_the_way[end])))

    def repeat(self, end: int) -> None:
        if self.on_the_way[end]:
            self.hear(end, self.on_the_way[end][0])

    def hear(self, end: int, frames: Frames) -> None:
        is_next, replies = self.ends[end].receive(*frames)
        if is_next:
            self.arrived[end].append(frames[1])
        self.on_the_way[1 - end].extend(replies)

    def cut(self) -> None:
        """Break the connection, and make it anew: one end begins."""
        for lost in self.on_the_way:
            lost.clear()
        self.on_the_way[B].append(self.ends[A].sync())

    def deliver_all(self) -> None:
        while any(self.on_the_way):
            for end in (A, B):
                self.deliver(end)


actions = st.one_of(
    st.tuples(st.just(Line.send), st.integers(A, B)),
    st.tuples(st.just(Line.deliver), st.integers(A, B), st.integers(0, 3)),
    st.tuples(st.just(Line.repeat), st.integers(A, B)),
    st.tuples(st.just(Line.cut)),
)


@given(st.lists(actions, max_size=60))
def test_whatever_is_lost_repeated_or_reordered_each_message_arrives_once_and_in_order(
    story: list[tuple[Callable[..., None], int]],
) -> None:
    line = Line()
    for action, *arguments in story:
        action(line, *arguments)
    line.cut()
    line.deliver_all()
    assert line.arrived == (line.sent[B], line.sent[A])


@given(st.lists(actions, max_size=60))
def test_what_arrived_is_always_the_beginning_of_what_was_sent(
    story: list[tuple[Callable[..., None], int]],
) -> None:
    line = Line()
    for action, *arguments in story:
        action(line, *arguments)
        for end in (A, B):
            assert line.arrived[end] == line.sent[1 - end][: len(line.arrived[end])]


def test_a_gap_is_noticed_by_the_next_message_without_a_sync() -> None:
    line = Line()
    for _ in range(2):
        line.send(A)
    line.on_the_way[B].pop(0)
    line.deliver_all()
    assert line.arrived[B] == [b"0", b"1"]


def test_nothing_is_kept_that_was_acknowledged_by_an_answer() -> None:
    line = Line()
    line.send(A)
    line.deliver(B)
    assert line.ends[A]._unacknowledged
    line.send(B)
    line.deliver(A)
    assert not line.ends[A]._unacknowledged


def test_one_who_only_receives_acknowledges_now_and_then_by_itself() -> None:
    line = Line()
    for _ in range(100):
        line.send(A)
        line.deliver_all()
    assert len(line.ends[A]._unacknowledged) < 16
    line.ends[A].number(bytes(2 << 20))
    header, body = line.ends[B].acknowledge()
    line.hear(A, (header, body))
    assert not line.ends[B].owes_acknowledgement


def test_whoever_is_asked_after_a_reconnect_introduces_itself_again() -> None:
    line = Line()
    line.ends[B].hello = b"hello"
    line.send(B)
    line.cut()
    line.deliver(B)
    assert line.on_the_way[A][0] == (PROTOCOL, b"hello")
    assert not is_numbered(PROTOCOL)
    line.on_the_way[A].pop(0)
    line.deliver_all()
    assert line.arrived[A] == [b"0"]
