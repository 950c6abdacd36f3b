"""What a Stop does to the processes that a call has started."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from meshbook.wire import started_processes
from meshbook.wire.processes import children_of
from meshbook.wire.started_processes import StartedProcesses
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_processes")

SLEEP = ["sleep", "3000"]
IGNORES = [sys.executable, "-c", "import signal; signal.signal(2, signal.SIG_IGN); print('at it', flush=True); input()"]
_TICK_S = 0.02  # the start of a process is counted in hundredths of a second


class Started(StartedProcesses):
    """With what is started in a call, which ends with the test."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, call_id: str) -> None:
        time.sleep(_TICK_S)
        self.begin_call(call_id)

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        self.processes.append(process)
        return process


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setattr(started_processes, "SIGINT_DEBOUNCE_S", WAIT_S)  # what is repeated is the same Stop
    started = Started()
    yield started
    for process in started.processes:
        process.kill()
        process.communicate()


def test_what_the_call_has_started_gets_sigint_with_all_below_it(started: Started) -> None:
    started.begin("c")
    shell = started.start(["sh", "-c", "sleep 3000; echo after"])
    # until then it is the shell once more, whose handler takes SIGINT
    when(lambda: [psutil.Process(pid).name() for pid in children_of(shell.pid)] == ["sleep"], "the shell's child")
    started.interrupt("c", hard=False)
    assert shell.communicate(timeout=WAIT_S)[0] == b""  # nobody has the pipe any more, the sleep neither


def test_what_an_earlier_call_has_started_goes_on_and_so_does_what_another_calls_stop_comes_to(
    started: Started,
) -> None:
    earlier = started.start(SLEEP)
    started.begin("c")
    own = started.start(SLEEP)
    started.interrupt("b", hard=False)
    assert own.poll() is None
    started.interrupt("c", hard=False)
    assert own.wait(WAIT_S) == -signal.SIGINT
    assert earlier.poll() is None


def test_what_ignores_sigint_is_killed_by_a_second_stop(started: Started) -> None:
    started.begin("c")
    process = started.start(IGNORES)
    assert process.stdout is not None
    process.stdout.readline()
    started.interrupt("c", hard=True)  # its first, though the Stop is a second one
    assert process.poll() is None
    started.interrupt("c", hard=True)
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_what_ignores_sigint_is_killed_by_an_interrupt_that_comes_when_a_stop_would_be_a_second_one(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.begin("c")
    process = started.start(IGNORES)
    assert process.stdout is not None
    process.stdout.readline()
    started.interrupt("c", hard=False)
    started.interrupt("c", hard=False)
    assert process.poll() is None
    monkeypatch.setattr(started_processes, "STUCK_AFTER_S", -1.0)
    started.interrupt("c", hard=False)
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_what_blocks_sigint_gets_sigterm(started: Started) -> None:
    started.begin("c")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = started.start(SLEEP)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    started.interrupt("c", hard=False)
    assert process.wait(WAIT_S) == -signal.SIGTERM


def test_what_has_a_process_group_of_its_own_goes_on(started: Started) -> None:
    started.begin("c")
    daemon = started.start(SLEEP, start_new_session=True)
    own = started.start(SLEEP)
    started.interrupt("c", hard=False)
    assert own.wait(WAIT_S) == -signal.SIGINT
    assert daemon.poll() is None


def test_the_workers_of_pools_and_daemons_go_on(started: Started) -> None:
    started.begin("c")
    context = multiprocessing.get_context("fork")
    daemon = context.Process(target=time.sleep, args=(3000,), daemon=True)
    plain = context.Process(target=time.sleep, args=(3000,))
    daemon.start()
    plain.start()
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(int, "1").result(WAIT_S) == 1
        started.interrupt("c", hard=False)
        plain.join(WAIT_S)
        assert plain.exitcode is not None
        assert pool.submit(int, "2").result(WAIT_S) == 2
    assert daemon.is_alive()
    daemon.kill()
    daemon.join()
