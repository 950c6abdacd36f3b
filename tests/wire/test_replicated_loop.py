"""A loop and its standby: whenever the first process ends, the standby goes on with the same state."""

from __future__ import annotations

import signal
import textwrap

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_processes")

# The first process and its standbys write lines to one pipe: what a test asserts is what an outsider sees of them.
PROGRAM = """
import os, signal, sys, logging
logging.basicConfig(stream=sys.stderr, format="%(message)s")
from meshbook.wire.replicated_loop import ReplicatedLoop

loop = ReplicatedLoop(on_error=lambda error: print("failed:", error, flush=True))
first = os.getpid()
count = 0

def say(*words):
    loop.act(lambda: print(*words, "first" if os.getpid() == first else "second", flush=True))

def took_over(ended_at):
    print("took over", count, flush=True)

def end():
    os.kill(os.getpid(), signal.SIGKILL)

loop.on_takeover = took_over
"""


def run(source: str) -> list[str]:
    """Run a program whose first process is killed; return what it and its standby have printed, once both ended."""
    program = PROGRAM + textwrap.dedent(source) + "\nloop.replicate()\nloop.run()\n"
    done = run_python(program)  # returns when nobody holds its pipes any more
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_timers_are_counted_alike_and_nothing_is_done_twice() -> None:
    lines = run("""
    def tick():
        global count
        count += 1
        say("tick", count)
        if count == 3:
            loop.act(end)
        if count < 5:
            loop.call_later(0.01, tick)
        else:
            os._exit(0)
    loop.call_later(0.01, tick)
    """)
    # what the first process had begun to do as it ended is not done again: links repeat what was sent
    assert lines == ["tick 1 first", "tick 2 first", "tick 3 first", "took over 3", "tick 4 second", "tick 5 second"]


def test_timers_that_were_cancelled_or_have_fired_are_kept_by_neither() -> None:
    lines = run("""
    def tick():
        global count
        count += 1
        for _ in range(100):
            loop.call_later(60.0, end).cancel()
        if count % 50 == 0:
            say(len(loop._timers) < 3000, len(loop._logged_timers) < 3000)
            loop.act(end)
        if count == 100:
            os._exit(0)
        loop.call_later(0.0, tick)
    loop.call_later(0.01, tick)
    """)
    assert lines == ["True True first", "took over 50", "True True second"]


def test_what_was_seen_by_the_first_is_what_the_second_has_seen() -> None:
    lines = run("""
    def look():
        global count
        count = loop.observe(os.getpid)
        say("saw", count == first)
        loop.call_later(0.01, lambda: loop.act(end))
        loop.call_later(0.02, done)
    def done():
        say("still", count == first)
        loop.stop_replicating()
        os._exit(0)
    loop.call_later(0.01, look)
    """)
    assert lines == ["saw True first", f"took over {lines[1].split()[-1]}", "still True second"]


def test_nothing_leaves_the_process_before_a_standby_knows_what_cannot_be_handled_twice() -> None:
    lines = run("""
    readable, writable = os.pipe()
    def heard():
        global count
        count = len(os.read(readable, 10))  # only this process can read it
        say("heard", count)
        loop.call_later(0.0, lambda: loop.act(end))
        loop.call_later(0.01, done)
    def done():
        say("knows", count)
        loop.stop_replicating()
        os._exit(0)
    loop.watch_fd(readable, heard)
    os.write(writable, b"abc")
    """)
    assert lines == ["heard 3 first", "took over 3", "knows 3 second"]


def test_a_process_that_ends_before_its_standby_knows_has_shown_nothing_and_the_event_is_handled_once() -> None:
    lines = run("""
    def start():
        global count
        count += 1
        say("before")
        loop.diverge()
        say("held")
        if os.getpid() == first:
            end()
        loop.call_later(0.0, lambda: (loop.stop_replicating(), os._exit(0)))
    loop.call_later(0.01, start)
    """)
    assert lines == ["before first", "took over 1", "held second"]


def test_a_standby_that_ends_is_replaced_and_one_that_has_come_to_another_state_ends_itself() -> None:
    lines = run("""
    def standby():
        return loop.observe(lambda: loop._standby[0] if loop._standby else 0)
    def differ():
        global former
        former = standby()
        if os.getpid() != first:
            loop.call_later(9.0, end)  # a defect: what only the standby does
        loop.call_later(0.01, then)
    def then():
        global count
        count = 1
        if standby() == former:  # it has yet to come to this
            loop.call_later(0.01, then)
            return
        loop.call_later(0.0, done)
        loop.act(end)
    def done():
        say("knows", count)
        loop.stop_replicating()
        os._exit(0)
    loop.call_later(0.01, differ)
    """)
    assert lines[:2] == ["took over 1", "knows 1 second"]
    assert any("has not come to the state of the process that it follows" in line for line in lines[2:])
    assert any("another one is started" in line for line in lines[2:])


def test_a_loop_without_descriptors_goes_on_without_a_standby_and_has_one_again_with_them() -> None:
    lines = run("""
    import resource
    from meshbook.wire import replicated_loop
    replicated_loop._FORK_RETRY_S = 0.01

    def limit(number):
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def lower():
        free = os.dup(0)
        os.close(free)
        limit(free)
        loop.diverge()  # the standby is to be replaced
        loop.call_later(0.01, goes_on)

    def goes_on():
        say("goes on", loop._standby)
        limit(1000)
        loop.call_later(0.05, has_one)

    def has_one():
        if loop._standby is None:
            loop.call_later(0.05, has_one)
            return
        loop.call_later(0.01, lambda: loop.act(end))
        loop.call_later(0.05, lambda: os._exit(0))

    loop.call_later(0.01, lower)
    """)
    assert lines == [
        "goes on None first",
        "took over 0",
        "this process has no standby: [Errno 24] Too many open files",
    ]
