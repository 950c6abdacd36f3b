"""The loop: sockets, descriptors and timers take their turns, and a failing callback ends nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from meshbook.clock import ManualClock
from meshbook.wire.loop import Loop
from tests.budget import WAIT_S


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def test_a_timer_is_called_when_its_time_has_come_and_not_before() -> None:
    clock = ManualClock()
    loop, called = Loop(clock), []
    loop.call_later(5.0, lambda: called.append("late"))
    loop.call_later(1.0, lambda: called.append("early"))
    loop.run_once(0.0)
    assert called == []
    clock.advance(1.0)
    loop.run_once(0.0)
    assert called == ["early"]
    clock.advance(10.0)
    loop.run_once(0.0)
    assert called == ["early", "late"]


def test_a_loop_that_stood_still_handles_what_has_arrived_before_the_timers_that_are_late() -> None:
    read_fd, write_fd = os.pipe()

    class Arriving(ManualClock):
        """Something arrives as the time is read behind the look at what has: so late is what zmq's thread has read."""

        num_reads = 0

        def monotonic(self) -> float:
            self.num_reads += 1
            if self.num_reads == 2:
                os.write(write_fd, b"x")
            return super().monotonic()

    clock = Arriving()
    loop, called = Loop(clock), list[str]()

    def arrived() -> None:
        os.read(read_fd, 1)
        called.append("arrived")

    loop.watch_fd(read_fd, arrived)
    loop.call_later(1.0, lambda: called.append("timer"))
    clock.advance(4.0)
    clock.num_reads = 0  # the first is for how long it polls
    loop.run_once(0.0)
    os.close(write_fd)
    os.close(read_fd)
    assert called == ["arrived", "timer"]


def test_a_cancelled_timer_is_not_called() -> None:
    clock = ManualClock()
    loop, called = Loop(clock), []
    loop.call_later(1.0, lambda: called.append(1)).cancel()
    clock.advance(2.0)
    loop.run_once(0.0)
    assert called == []


def test_a_callback_that_raises_does_not_end_the_loop() -> None:
    clock = ManualClock()
    loop, called = Loop(clock), []
    loop.call_later(1.0, lambda: 1 / 0)
    loop.call_later(1.0, lambda: called.append(1))
    clock.advance(1.0)
    loop.run_once(0.0)
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
            loop.run_once(5.0)
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
        loop.run_once(5.0)
        loop.unwatch(pull)
    assert called
    assert called[0] < 1000


def test_a_descriptor_is_watched_until_it_is_not() -> None:
    loop, heard = Loop(), []
    read, write = os.pipe()
    loop.watch_fd(read, lambda: heard.append(os.read(read, 10)))
    os.write(write, b"a")
    loop.run_once(5.0)
    loop.unwatch(read)
    os.write(write, b"b")
    loop.run_once(0.0)
    assert heard == [b"a"]
    os.close(read)
    os.close(write)


def test_on_another_thread_no_exception_at_all_ends_the_loop() -> None:
    errors: list[BaseException] = []
    loop = Loop(on_error=errors.append)
    called = threading.Event()

    def leave() -> None:
        raise SystemExit(1)

    loop.call_later(0.0, leave)
    loop.call_later(0.0, called.set)
    loop.call_later(0.0, loop.stop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(WAIT_S)
    assert called.is_set()
    assert [type(error) for error in errors] == [SystemExit]


def test_an_error_that_cannot_be_told_of_ends_nothing() -> None:
    def on_error(error: BaseException) -> None:
        raise OSError("no room")

    loop, called = Loop(on_error=on_error), []
    loop.call_later(0.0, lambda: 1 / 0)
    loop.call_later(0.0, lambda: called.append(1))
    loop.run_once(0.1)
    assert called == [1]


def test_a_descriptor_that_was_closed_under_the_loop_is_let_go() -> None:
    errors: list[BaseException] = []
    loop = Loop(on_error=errors.append)
    read, write = os.pipe()
    loop.watch_fd(read, lambda: os.read(read, 10) and None)
    os.close(read)
    os.close(write)
    for _ in range(5):
        loop.run_once(0.0)
    assert len(errors) == 1


def test_a_descriptor_whose_handler_only_ever_fails_is_let_go() -> None:
    errors: list[BaseException] = []
    loop = Loop(on_error=errors.append)
    read, write = os.pipe()
    os.write(write, b"x")
    loop.watch_fd(read, lambda: 1 / 0)
    for _ in range(50):
        loop.run_once(0.0)
    assert len(errors) == 10
    os.close(read)
    os.close(write)


def test_a_signal_is_called_back_at_once_however_long_the_loop_would_wait() -> None:
    before, loop, called = signal.getsignal(signal.SIGUSR1), Loop(), []
    try:
        loop.watch_signal(signal.SIGUSR1, lambda: called.append("signal"))
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        began = time.monotonic()
        loop.run_once(max_wait_s=30.0)
        assert called == ["signal"]
        assert time.monotonic() - began < 20.0
    finally:
        signal.signal(signal.SIGUSR1, before)
