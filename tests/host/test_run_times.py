"""A process that gets no processor, seen from outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshbook.host.procfs import read_run_times
from meshbook.host.run_times import RunTimes, ThreadTimes, starved_s
from tests.budget import when
from tests.standstill import starved


def look(at: float, *, runnable: bool, ran: float = 0.0, waited: float = 0.0, slices: int = 1) -> RunTimes:
    return RunTimes(at, {7: ThreadTimes(runnable, int(ran * 100), int(ran * 1e9), int(waited * 1e9), slices)})


def test_a_thread_that_could_run_and_did_not_has_waited_all_the_time() -> None:
    looks = [look(0.0, runnable=True), look(0.5, runnable=True), look(1.5, runnable=True)]
    assert starved_s(looks) == 1.5


def test_a_wait_that_is_over_counts_as_the_system_counts_it() -> None:
    assert starved_s([look(0.0, runnable=False), look(1.0, runnable=False, waited=0.7, slices=2)]) == pytest.approx(0.7)


def test_a_thread_that_sleeps_or_runs_has_not_waited() -> None:
    assert starved_s([look(0.0, runnable=False), look(1.0, runnable=False)]) == 0.0
    assert starved_s([look(0.0, runnable=False), look(1.0, runnable=True)]) == 0.0  # woken just now, perhaps
    assert starved_s([look(0.0, runnable=True), look(1.0, runnable=True, ran=1.0)]) == 0.0
    assert starved_s([look(1.0, runnable=True)]) == 0.0


def test_the_thread_that_keeps_the_gil_and_computes_is_not_starved_though_it_shares_a_processor() -> None:
    looks = [look(0.0, runnable=True), look(1.0, runnable=True, ran=0.1, waited=0.9, slices=9)]
    assert starved_s(looks) == pytest.approx(0.9)
    assert starved_s(looks, gil_holder=7) == 0.0


@pytest.mark.usefixtures("starts_processes")
def test_a_process_beside_others_that_compute_waits_for_a_processor() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with starved(busy.pid):
            looks = [read_run_times(busy.pid)]

            def waits() -> bool:
                looks.append(read_run_times(busy.pid))
                return starved_s(looks) > max(0.1, 0.3 * (looks[-1].at - looks[0].at))

            when(waits)
    finally:
        busy.kill()
        busy.wait()
