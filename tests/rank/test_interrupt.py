from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import FrameType, SimpleNamespace

import pytest

from meshbook.rank import interrupt
from meshbook.rank.interrupt import InterruptGate
from meshbook.wire.interrupt_points import can_interrupt
from meshbook.wire.stop_timing import STOP_SIGNAL
from tests.budget import WAIT_S
from tests.scripts import run_python
from tests.standstill import starved


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[InterruptGate]:
    monkeypatch.setattr(interrupt, "SIGINT_DEBOUNCE_S", 60.0)  # what is to be one stop is, however slow the machine
    gate = InterruptGate()
    gate.install()
    yield gate
    gate.uninstall()


@contextlib.contextmanager
def user_code(gate: InterruptGate) -> Iterator[None]:
    """The code of a call."""
    gate.begin()
    gate.arm()
    yield
    gate.disarm()
    gate.end()


def sigint() -> None:
    """To this process and thread: handled before the call returns."""
    signal.raise_signal(signal.SIGINT)


REPEATED_LATE = """
    import signal, time
    from meshbook.rank.interrupt import InterruptGate

    gate = InterruptGate()
    gate.install()
    gate.call_id = "c"
    input()
    gate.begin()
    gate.arm()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        signal.raise_signal(signal.SIGINT)
        print("cleaned up")
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_repeated_sigint_does_not_raise_again_because_the_rank_got_no_processor_between_them() -> None:
    command = [sys.executable, "-c", textwrap.dedent(REPEATED_LATE)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with starved(process.pid):
        out, err = process.communicate(b"\n", timeout=WAIT_S)
    assert out == b"cleaned up\n", err


def test_sigint_arrives_though_whoever_started_the_process_had_blocked_it() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    gate = InterruptGate()
    try:
        gate.install()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        gate.uninstall()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_sigint_outside_of_calls_is_counted_and_forgotten(gate: InterruptGate) -> None:
    sigint()
    with user_code(gate):
        pass
    assert (gate.num_raised, gate.num_missed) == (0, 1)


def test_sigint_before_the_user_code_of_a_call_stops_it_at_its_start(gate: InterruptGate) -> None:
    gate.begin()
    sigint()
    with pytest.raises(KeyboardInterrupt):
        gate.arm()
    gate.disarm()
    gate.end()
    assert (gate.num_raised, gate.num_missed) == (1, 0)


def test_sigint_after_the_user_code_of_a_call_does_not_reach_the_next_call(gate: InterruptGate) -> None:
    gate.begin()
    gate.arm()
    gate.disarm()
    sigint()
    gate.end()
    with user_code(gate):
        pass
    assert (gate.num_raised, gate.num_missed) == (0, 1)


def test_a_stop_in_the_last_lines_of_a_call_does_not_hide_the_next_calls(gate: InterruptGate) -> None:
    gate.call_id = "first"
    gate.begin()
    gate.arm()
    with pytest.raises(KeyboardInterrupt):
        sigint()  # so that its `end` is not come to
    gate.call_id = "second"
    gate.begin()
    gate.arm()
    with pytest.raises(KeyboardInterrupt):
        sigint()
    gate.reset()
    assert (gate.num_raised, gate.num_missed) == (2, 0)


def test_a_stop_that_is_told_twice_raises_once(gate: InterruptGate) -> None:
    with user_code(gate):
        with pytest.raises(KeyboardInterrupt):
            sigint()
        sigint()  # in the user's `finally:`
    assert (gate.num_raised, gate.num_missed) == (1, 1)


def test_a_later_stop_raises_again_in_code_that_survived_the_first(
    gate: InterruptGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than nothing: what a thread has waited for a processor is not counted, and read a little earlier or later.
    monkeypatch.setattr(interrupt, "SIGINT_DEBOUNCE_S", -60.0)
    with user_code(gate):
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                sigint()
    assert gate.num_raised == 3


def test_a_handler_that_user_code_left_behind_lasts_until_the_next_call(gate: InterruptGate) -> None:
    gate.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gate.end()
    gate.begin()
    gate.arm()
    with pytest.raises(KeyboardInterrupt):
        sigint()
    gate.end()


def stop() -> None:
    """What a host sends, to this process and thread."""
    signal.raise_signal(STOP_SIGNAL)


def test_a_stop_calls_the_handler_that_user_code_has_installed_once_however_often_it_is_repeated(
    gate: InterruptGate,
) -> None:
    calls: list[int] = []
    gate.call_id = "c"
    with user_code(gate):
        signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
        gate.interrupt_call("c")
        for _ in range(3):
            stop()
        gate.interrupt_call("c")
    assert calls == [signal.SIGINT]
    assert gate.num_raised == 0


def test_a_stop_is_pythons_own_where_user_code_wants_that(gate: InterruptGate) -> None:
    with user_code(gate):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            stop()
        stop()  # in the user's `except KeyboardInterrupt:`


def test_a_stop_is_ignored_where_user_code_ignores_sigint(gate: InterruptGate) -> None:
    with user_code(gate):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop()
    gate.begin()
    gate.arm()
    with pytest.raises(KeyboardInterrupt):  # in the next call it is Meshbook's again
        stop()
    gate.end()


def test_a_stop_reaches_what_asyncio_has_been_given_for_sigint(gate: InterruptGate) -> None:
    async def program() -> str:
        done = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, done.set)
        stop()
        await asyncio.wait_for(done.wait(), WAIT_S)
        return "left the loop"

    with user_code(gate):
        assert asyncio.run(program()) == "left the loop"


def test_an_inherited_ignore_does_not_disarm_the_gate(gate: InterruptGate) -> None:
    gate.uninstall()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        gate.install()
        gate.begin()
        gate.arm()
        with pytest.raises(KeyboardInterrupt):
            sigint()
    finally:
        gate.end()
        signal.signal(signal.SIGINT, before)
        gate.install()


# ---- told by name


def test_a_call_that_is_told_to_stop_before_it_has_begun_ends_at_its_start(gate: InterruptGate) -> None:
    gate.interrupt_call("c7")
    gate.call_id = "c7"
    gate.begin()
    with pytest.raises(KeyboardInterrupt):
        gate.arm()
    gate.disarm()
    gate.end()


def test_a_call_that_is_told_to_stop_while_it_runs_is_woken(gate: InterruptGate) -> None:
    gate.call_id = "c7"
    with user_code(gate):
        teller = threading.Thread(target=gate.interrupt_call, args=("c7",))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (it may come at either line)
            teller.start()
            threading.Event().wait(WAIT_S)
    teller.join(WAIT_S)


def test_a_stop_by_name_never_hits_the_call_after_it(gate: InterruptGate) -> None:
    for name in ("c7", "c8"):
        gate.call_id = name
        with user_code(gate):
            pass
        gate.call_id = None
        gate.interrupt_call("c7")  # comes late, twice
    assert gate.num_raised == 0


def test_a_stop_told_by_signal_and_by_name_raises_once(gate: InterruptGate) -> None:
    gate.call_id = "c7"
    gate.begin()
    gate.arm()
    with pytest.raises(KeyboardInterrupt):
        sigint()
    gate.interrupt_call("c7")  # in the user's `finally:`
    gate.disarm()
    gate.arm()  # the hooks after the cell
    gate.disarm()
    gate.end()
    assert gate.num_raised == 1


# ---- functions that must complete


def test_a_stop_does_not_strike_between_a_lock_and_the_block_that_gives_it_back(gate: InterruptGate) -> None:
    given_back = []
    lock = SimpleNamespace(
        acquire=None,
        release=None,
        __enter__=partial(signal.raise_signal, signal.SIGINT),  # a C function, as a real lock's: it has no frame
        __exit__=lambda *_: given_back.append(True),
    )
    condition = threading.Condition(lock)  # type: ignore[arg-type]
    with user_code(gate), contextlib.suppress(KeyboardInterrupt), condition:
        while True:
            pass
    assert given_back
    assert gate.num_raised == 1


def test_a_stop_that_still_waits_when_user_code_has_ended_ends_the_call_all_the_same(
    gate: InterruptGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_retry_soon", lambda: None)
    lock = SimpleNamespace(
        acquire=None, release=None, __enter__=partial(signal.raise_signal, signal.SIGINT), __exit__=lambda *_: None
    )
    with user_code(gate):
        with threading.Condition(lock):  # type: ignore[arg-type]
            pass
        with pytest.raises(KeyboardInterrupt):
            gate.raise_postponed()
        gate.raise_postponed()


def test_a_stop_in_the_code_of_an_event_loop_waits_until_the_loop_does(gate: InterruptGate) -> None:
    # Between the two lines that take a callback from the queue and call it, it would be lost, and with it its task.
    loop = asyncio.new_event_loop()
    loop.call_soon(signal.raise_signal, signal.SIGINT)  # a C function: the innermost frame is the event loop's
    task = loop.create_task(asyncio.sleep(WAIT_S))
    with user_code(gate), pytest.raises(KeyboardInterrupt) as caught:
        loop.run_until_complete(task)
    modules = [entry.frame.f_globals["__name__"] for entry in caught.traceback]
    assert next(name for name in reversed(modules) if name != interrupt.__name__) == "selectors"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


def test_a_stop_while_such_a_function_waits_for_a_lock_ends_the_wait_when_it_is_repeated(gate: InterruptGate) -> None:
    handler = logging.Handler()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with handler.lock:  # type: ignore[union-attr]
            held.set()
            over.wait(WAIT_S)

    def stop() -> None:
        while not over.wait(0.02):
            if _main_frame().f_code is logging.Handler.acquire.__code__:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threads = [threading.Thread(target=hold), threading.Thread(target=stop)]
    for thread in threads:
        thread.start()
    held.wait(WAIT_S)
    gate.begin()
    gate.arm()
    with pytest.raises(KeyboardInterrupt):
        handler.acquire()
    gate.disarm()
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    gate.end()
    assert gate.num_raised == 1


def test_a_stop_ends_a_wait_for_a_queue_at_once(gate: InterruptGate) -> None:
    items: queue.Queue[None] = queue.Queue()

    def stop_once() -> None:
        def waits(frame: FrameType) -> bool:
            return (
                frame.f_code is threading.Condition.wait.__code__
                and frame.f_back is not None
                and frame.f_back.f_code is queue.Queue.get.__code__
            )

        while not (waits(_main_frame()) and can_interrupt(_main_frame())):
            pass
        while not gate.num_raised:  # as a host does: one that comes just before the wait in C does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.01)

    thread = threading.Thread(target=stop_once)
    thread.start()
    with user_code(gate), pytest.raises(KeyboardInterrupt):
        items.get(timeout=WAIT_S)
    thread.join(WAIT_S)
    assert gate.num_raised == 1
    assert items.not_empty.acquire(blocking=False)  # its lock was given back


FORKS = """
    import multiprocessing, os, signal, time
    from functools import partial
    from meshbook.rank.interrupt import InterruptGate

    gate = InterruptGate()
    gate.install()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    os.register_at_fork(after_in_parent=partial(signal.raise_signal, signal.SIGINT))
    gate.begin()
    gate.arm()
    try:
        child.start()
        while True:
            pass
    except KeyboardInterrupt:
        gate.disarm()
        child.join(20)
        print("interrupted,", "exit status", child.exitcode)
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_stop_that_comes_as_a_child_is_forked_is_not_dropped_and_the_child_is_known() -> None:
    done = run_python(FORKS)
    assert done.stdout == "interrupted, exit status 0\n", done.stderr
