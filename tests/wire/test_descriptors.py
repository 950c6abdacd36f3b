"""A process without file descriptors says so, takes nothing for gone that it cannot look at, and has some again."""

from __future__ import annotations

import os
import textwrap

import pytest

from meshbook.clock import ManualClock
from meshbook.wire.descriptor_reserve import DescriptorReserve
from meshbook.wire.descriptors import describe_shortage, is_shortage
from meshbook.wire.loop import Loop
from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_processes")

PROGRAM = """
import os, resource, sys
from meshbook.wire import descriptors, processes

def limit(number):
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def lowest_free():
    number = os.dup(0)
    os.close(number)
    return number
"""


def run(source: str) -> str:
    """What a program prints, whose limit is its own."""
    done = run_python(PROGRAM + textwrap.dedent(source))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_one_that_has_ended() -> None:
    said = run("""
    me = processes.identify(os.getpid())
    processes.boot_id.cache_clear()
    limit(lowest_free())
    for look in (lambda: processes.is_running(me), lambda: processes.identify(os.getpid())):
        try:
            print(look())
        except OSError as error:
            print(descriptors.is_shortage(error), descriptors.describe(error))
    limit(1000)
    print(processes.is_running(me))
    """)
    first, second, after = said.splitlines()
    assert first == second
    assert first.startswith("True no file descriptors are left (the limit of pid ")
    assert after == "True"


def test_a_loop_goes_on_where_it_may_wait_for_fewer_files_than_it_watches() -> None:
    said = run("""
    import zmq
    from meshbook.wire.loop import Loop
    context, loop = zmq.Context(), Loop()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://here")
    theirs.connect("inproc://here")
    pipes = [os.pipe() for _ in range(8)]
    for read_fd, _ in pipes:
        loop.watch_fd(read_fd, lambda read_fd=read_fd: print(os.read(read_fd, 1)))
    loop.watch_socket(ours, lambda frames: (print(frames), loop.stop()))
    limit(3)
    os.write(pipes[7][1], b"x")
    loop.run_once(1.0)
    theirs.send(b"end")
    loop.run()
    """)
    assert said.splitlines() == ["b'x'", "[b'end']"]


def test_descriptors_are_held_back_until_hardly_any_are_left() -> None:
    said = run("""
    from meshbook.wire.descriptor_reserve import DescriptorReserve
    from meshbook.wire.loop import Loop
    reserve = DescriptorReserve(Loop())
    limit(lowest_free())
    print("let go of:", reserve.look(), "again:", reserve.look())
    opened = [os.dup(0) for _ in range(4)]
    limit(1000)
    print("let go of:", reserve.look())
    """)
    assert said.splitlines() == ["let go of: True again: True", "let go of: False"]


def test_a_value_that_cannot_be_read_for_want_of_descriptors_is_not_said_to_be_gone() -> None:
    said = run("""
    from meshbook.errors import TransferError
    from meshbook.wire.buffers import SegmentPool, SegmentReader
    pool = SegmentPool()
    (buffer,) = pool.write([memoryview(bytes(1 << 20))], readers=1)
    limit(lowest_free())
    try:
        SegmentReader().open(buffer)
    except TransferError as error:
        print(error)
    """)
    assert "cannot be mapped here: no file descriptors are left" in said
    assert "gone" not in said


def test_a_reserve_looks_every_second() -> None:
    clock = ManualClock()
    loop = Loop(clock)
    reserve = DescriptorReserve(loop)
    before = len(os.listdir("/proc/self/fd"))
    for descriptor in reserve._held:
        os.close(descriptor)
    reserve._held = []
    clock.advance(1.0)
    loop.run_once(0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    for descriptor in reserve._held:
        os.close(descriptor)


def test_other_errors_are_no_shortage() -> None:
    assert not is_shortage(FileNotFoundError(2, "No such file"))
    assert not is_shortage(KeyError("errno"))
    assert f"prlimit --pid {os.getpid()}" in describe_shortage()
