"""A keeper, with a host agent that is a few lines: what it passes on, what it waits for, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshbook.wire.processes import children_of, is_ending
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_processes")

PROGRAM = """
import os, signal, sys, time
from meshbook.host.keeper import Keeper, end_like

def say(*words):
    print(*words, flush=True)

def follow(then):
    "Have a standby that does `then` when this process has ended."
    read, write = os.pipe()
    if os.fork():
        return
    os.close(write)
    os.read(read, 1)
    while os.getppid() not in (keeper.pid, 1):
        time.sleep(0.001)
    keeper.begin()
    then()

def sleep():
    say(os.getpid())
    while True:
        time.sleep(60)

keeper = Keeper()
"""


@contextmanager
def kept(agent: str) -> Iterator[subprocess.Popen[str]]:
    """Start a keeper whose agent is this function `agent`."""
    program = PROGRAM + textwrap.dedent(agent) + "\nend_like(keeper.run(agent))\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("end", "status"),
    [("return", 0), ("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("1 / 0", 1)],
)
def test_it_ends_as_its_agent_does(end: str, status: int) -> None:
    with kept(f"def agent():\n    {end}") as keeper:
        assert keeper.wait(WAIT_S) == status


def test_it_waits_for_a_standby_and_ends_as_that_does() -> None:
    agent = """
    def agent():
        follow(lambda: os._exit(5))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with kept(agent) as keeper:
        assert keeper.wait(WAIT_S) == 5


def test_sigterm_reaches_the_agent_and_after_it_the_standby() -> None:
    agent = """
    def agent():
        first = os.getpid()
        end = lambda *_: os.kill(first, signal.SIGKILL) if os.getpid() == first else os._exit(6)
        signal.signal(signal.SIGTERM, end)
        follow(sleep)
        sleep()
    """
    with kept(agent) as keeper:
        read(keeper)
        keeper.terminate()
        assert keeper.wait(WAIT_S) == 6


def test_agent_and_standby_end_with_it_and_what_they_leave_is_reaped() -> None:
    agent = """
    def agent():
        if not os.fork():
            if not os.fork():
                os._exit(0)  # an orphan, once its parent has ended
            os._exit(0)
        os.wait()
        follow(sleep)
        sleep()
    """
    with kept(agent) as keeper:
        agent_pid = int(read(keeper))
        when(lambda: children_of(keeper.pid) == [agent_pid])
        (standby,) = children_of(agent_pid)
        os.kill(agent_pid, signal.SIGKILL)
        assert int(read(keeper)) == standby
        when(lambda: children_of(keeper.pid) == [standby])
        keeper.kill()
        when(lambda: is_ending(standby))
