"""Preemption on a rank: the answers of all ranks agree, and SIGTERM goes to the supervisor, not to the process."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import meshbook
from meshbook.errors import UsageError
from meshbook.rank.preemption import PreemptionPoint, TerminationSignal
from tests.budget import WAIT_S

CALL: str = "c1"


def begun(call: str = CALL) -> PreemptionPoint:
    point = PreemptionPoint()
    point.begin(call)  # type: ignore[arg-type]
    return point


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_are_preempted_at_the_same_question_whenever_it_is_decided(seed: int) -> None:
    """Ranks that run ahead of each other by any number of questions, as loops without collectives do."""
    drawn = random.Random(seed)
    points = [begun() for _ in range(4)]
    ahead = [drawn.randrange(50) for _ in points]
    for point, count in zip(points, ahead, strict=True):
        assert not any(point.ask() for _ in range(count))

    def run(point: PreemptionPoint, count: int) -> int:
        while not point.ask():
            count += 1
        return count + 1

    with ThreadPoolExecutor(len(points)) as threads:
        looping = [threads.submit(run, point, count) for point, count in zip(points, ahead, strict=True)]
        asked = [point.query(CALL)["asked"] for point in drawn.sample(points, len(points))]  # type: ignore[arg-type]
        threading.Event().wait(0.005)  # in which a rank that is not held would pass any number
        for point in points:
            point.decide(CALL, max(asked) + 1, "rank 2 received SIGTERM")  # type: ignore[arg-type]
        assert {future.result(WAIT_S) for future in looping} == {max(asked) + 1}


def test_a_rank_that_was_queried_waits_where_it_asks_next_until_it_is_decided() -> None:
    point = begun()
    assert point.query(CALL) == {"asked": 0}  # type: ignore[arg-type]
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(point.ask()))
    asking.start()
    asking.join(0.05)
    assert answers == []
    point.decide(CALL, None, "")  # type: ignore[arg-type]
    asking.join(WAIT_S)
    assert answers == [False]


def test_the_answer_stays_and_is_that_of_its_call_alone() -> None:
    point = begun()
    point.query(CALL)  # type: ignore[arg-type]
    point.decide(CALL, 2, "rank 2 received SIGTERM")  # type: ignore[arg-type]
    assert [point.ask() for _ in range(4)] == [False, True, True, True]
    point.begin("c2")  # type: ignore[arg-type]
    assert [point.ask() for _ in range(4)] == [False] * 4


def test_a_call_that_has_not_begun_is_preempted_from_its_first_question_on() -> None:
    point = begun("c0")
    assert not point.ask()
    assert point.query(CALL) == {"asked": 0}  # type: ignore[arg-type]
    assert not point.ask()  # of another call, which goes on
    point.decide(CALL, 1, "rank 2 received SIGTERM")  # type: ignore[arg-type]
    point.begin(CALL)  # type: ignore[arg-type]
    assert point.ask()


def test_on_the_controller_it_says_where_to_call_it() -> None:
    with pytest.raises(UsageError, match="call it in a cell"):
        meshbook.preempted()


@pytest.mark.usefixtures("starts_processes")
def test_sigterm_is_readable_and_ends_a_forked_child_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = TerminationSignal()
    termination.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert os.read(termination.fd, 10) == b"x"
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        with pytest.raises(BlockingIOError):
            os.read(termination.fd, 10)
    finally:
        signal.signal(signal.SIGTERM, before)
