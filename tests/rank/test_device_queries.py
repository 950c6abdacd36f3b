"""Queries of a driver that does not answer: whoever asks goes on, and hears of it when it answers again."""

from __future__ import annotations

import threading

from meshbook.rank.process_groups.device_queries import DeviceQueries
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel
from tests.budget import WAIT_S


def test_a_driver_that_does_not_answer_holds_nobody_up_and_its_collectives_count_as_running() -> None:
    answers, prepared = threading.Event(), threading.Event()

    def wait_for_driver() -> None:
        assert answers.wait(WAIT_S)

    ring = CollectiveRing()
    queries = DeviceQueries(prepared.set, wait_for_driver)
    ring.run_device_queries = queries.run
    collective = ring.begin("all_reduce", GroupLabel("world", (0, 1)))
    ring.set_completion_check(collective, lambda: True, on_device=True)
    assert ring.running() == (collective,)  # the driver is asked, and does not answer
    assert ring.running() == (collective,)  # nor is it asked again meanwhile
    answers.set()
    assert queries._answered.wait(WAIT_S)
    assert (ring.running(), prepared.is_set()) == ((), True)


def test_queries_are_run_on_one_thread_which_is_not_the_callers() -> None:
    threads: list[int] = []
    queries = DeviceQueries(lambda: None, lambda: None)
    for _ in range(3):
        queries.run(lambda: threads.append(threading.get_ident()))
        assert queries._answered.wait(WAIT_S)
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
