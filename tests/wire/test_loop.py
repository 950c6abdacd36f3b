"""The loop: sockets, descriptors and timers take their turns, and a failing callback ends nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import zmq

from meshbook.clock import ManualClock
from meshbook.wire.loop import Loop


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def test_a_timer_is_called_when_its_time_has_come_and_not_before() -> None:
    clock = ManualClock()
    loop, called = Loop(clock), []
    loop.call_later(5.0, lambda: called.append("late"))
    loop.call_later(1.0, lambda: called.append("early"))
    loop.turn(0.0)
    assert called == []
    clock.advance(1.0)
    loop.turn(0.0)
    assert called == ["early"]
    clock.advance(10.0)
    loop.turn(0.0)
    assert called == ["early", "late"]


def test_a_cancelled_timer_is_not_called() -> None:
    clock = ManualClock()
    loop, called = Loop(clock), []
    loop.call_later(1.0, lambda: called.append(1)).cancel()
    clock.advance(2.0)
    loop.turn(0.0)
    assert called == []


def test_a_callback_that_raises_does_not_end_the_loop() -> None:
    clock = ManualClock()
    loop, called = Loop(clock), []
    loop.call_later(1.0, lambda: 1 / 0)
    loop.call_later(1.0, lambda: called.append(1))
    clock.advance(1.0)
    loop.turn(0.0)
    assert called == [1]


def test_messages_are_handed_over_in_the_order_they_came(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    loop, heard = Loop(), []
    with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind("inproc://here")
        push.connect("inproc://here")
        loop.watch_socket(pull, lambda frames: heard.append(frames[0]))
        for number in range(200):
            push.send(b"%d" % number)
        deadline = time.monotonic() + 30
        while len(heard) < 200 and time.monotonic() < deadline:
            loop.turn(5.0)
        loop.unwatch(pull)
    assert heard == [b"%d" % number for number in range(200)]


def test_a_flood_on_one_socket_does_not_starve_a_timer(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    clock = ManualClock()
    loop, heard, called = Loop(clock), [], []
    with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind("inproc://flood")
        push.connect("inproc://flood")
        loop.watch_socket(pull, lambda frames: heard.append(frames[0]))
        for _ in range(1000):
            push.send(b"x")
        loop.call_later(0.0, lambda: called.append(len(heard)))
        loop.turn(5.0)
        loop.unwatch(pull)
    assert called
    assert called[0] < 1000


def test_a_descriptor_is_watched_until_it_is_not() -> None:
    loop, heard = Loop(), []
    read, write = os.pipe()
    loop.watch_fd(read, lambda: heard.append(os.read(read, 10)))
    os.write(write, b"a")
    loop.turn(5.0)
    loop.unwatch(read)
    os.write(write, b"b")
    loop.turn(0.0)
    assert heard == [b"a"]
    os.close(read)
    os.close(write)
