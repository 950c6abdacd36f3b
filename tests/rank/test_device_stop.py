"""Stop while a device works off collectives: one that is stuck is aborted, and those that advance are left to end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from meshbook.rank.process_groups.device_stop import wait_until_stuck
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.ring import CollectiveRing, GroupLabel
from tests.budget import WAIT_S
from tests.rank.test_rank_groups import STOPPED, Rank

WORLD = GroupLabel("world", (0, 1))


def launch(ring: CollectiveRing, *num_polls: int) -> None:
    """Begin collectives of a device, each of which has ended when it is asked for so many times; 0: never."""
    for number in num_polls:
        remaining = iter([False] * (number - 1) + [True] * 100) if number else iter([False] * 10_000)
        ring.set_completion_check(ring.begin("all_reduce", WORLD), remaining.__next__, on_device=True)


def test_collectives_that_end_one_after_the_other_are_not_stuck() -> None:
    ring = CollectiveRing()
    launch(ring, *range(1, 9))
    assert not wait_until_stuck(ring, lambda: not ring.running())


def test_a_collective_that_does_not_end_is_stuck_also_behind_others() -> None:
    ring = CollectiveRing()
    launch(ring, 1, 2, 0)
    assert wait_until_stuck(ring, lambda: False)
    assert len(ring.running()) == 1


def test_when_the_call_has_ended_what_is_stuck_is_no_matter_of_its_stop() -> None:
    ring = CollectiveRing()
    launch(ring, 0)
    assert not wait_until_stuck(ring, lambda: True)


def test_a_call_without_collectives_is_never_stuck_in_one() -> None:
    assert not wait_until_stuck(CollectiveRing(), lambda: False)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank with groups on a device that runs a call; `aborts` collects what they were aborted with."""
    monkeypatch.setattr(GroupTable, "has_nccl", True)
    rank: Any = Rank()
    rank.aborts, rank.aborted = [], threading.Event()

    def abort(error: BaseException, **_: Any) -> None:
        rank.aborts.append(type(error))
        rank.aborted.set()

    monkeypatch.setattr(rank.groups.process_groups, "abort", abort)
    rank.begin()
    return rank


def stop(rank: Any) -> None:
    rank.groups.abort("interrupted", interrupt=True, call=STOPPED)


def test_stop_aborts_a_collective_of_the_device_that_is_stuck(rank: Any) -> None:
    launch(rank.groups.ring, 0)
    stop(rank)
    assert rank.aborts == []  # not before it is known to be stuck
    assert rank.aborted.wait(WAIT_S)
    assert rank.aborts == [KeyboardInterrupt]


def test_a_second_stop_aborts_at_once(rank: Any) -> None:
    launch(rank.groups.ring, *range(1, 100))
    stop(rank)
    stop(rank)
    assert rank.aborts == [KeyboardInterrupt]
