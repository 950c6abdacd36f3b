"""How far a rank has come in its collectives, and whether one can still be completed once a member has left."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from meshbook.rank.process_groups import positions
from meshbook.rank.process_groups.ring import Collective, CollectiveRing, GroupLabel
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, GroupPosition, RankPosition
from tests.positions import position


class Rank:
    """A rank with one group, without torch."""

    def __init__(self, rank: int, size: int = 3) -> None:
        self.rank = rank
        self.ring, self.label = CollectiveRing(), GroupLabel("world", range(size))

    def begin(self, op: str = "all_reduce", peer: int | None = None, *, error: str | None = None) -> Collective:
        one = self.ring.begin(op, self.label, peer=peer)
        if error is not None:
            self.ring.finish(one, error)
        return one

    def done(self, count: int) -> None:
        for _ in range(count):
            self.ring.finish(self.begin())

    def group(self, since: int = 0) -> GroupPosition:
        (found,) = positions.group_positions([self.label], self.ring, since)
        return found

    def left(self, **changes: Any) -> RankPosition:
        return position(self.rank, **{"groups": (self.group(),), **changes})


def test_a_position_tells_what_was_begun_what_failed_and_what_is_under_way() -> None:
    rank = Rank(0)
    rank.done(2)
    rank.begin(error="failed")
    rank.begin()
    rank.begin("send", 1)
    group = rank.group()
    assert (group.num_started, group.failed, group.sent, group.num_in_flight) == (4, (3,), {1: 1}, 2)


def test_a_group_has_moved_if_the_call_began_something_or_more_than_the_ring_remembers() -> None:
    rank = Rank(0)
    rank.done(3)
    assert rank.group(since=2).has_new_collectives
    assert not rank.group(since=3).has_new_collectives
    rank.ring = CollectiveRing(size=2)
    rank.done(5)
    assert rank.group(since=1).has_new_collectives


def test_what_was_begun_on_former_connections_does_not_count() -> None:
    rank = Rank(0)
    rank.begin()
    rank.label.reset_counters(2)
    assert rank.group() == GroupPosition(name="world", ranks=(0, 1, 2), num_started=0, has_new_collectives=False)


def test_a_collective_waits_in_vain_for_a_rank_that_left_before_it_and_not_for_one_that_joined_it() -> None:
    waiting, gone = Rank(0), Rank(1)
    gone.done(2)
    first, second, third = waiting.begin(), waiting.begin(), waiting.begin()
    assert [positions.can_never_complete(one, gone.left(), 0) for one in (first, second, third)] == [False, False, True]


def test_a_collective_that_the_other_rank_began_and_failed_in_is_waited_for_in_vain() -> None:
    waiting, gone = Rank(0), Rank(1)
    gone.begin(error="ValueError: sizes differ")
    assert positions.can_never_complete(waiting.begin(), gone.left(), 0)


def test_a_collective_that_a_signal_cut_short_as_it_was_noted_is_waited_for_in_vain() -> None:
    waiting, gone = Rank(0), Rank(1)
    gone.begin()
    gone.label.is_doubtful = True
    assert positions.can_never_complete(waiting.begin(), gone.left(), 0)
    gone.label.reset_counters(2)
    assert not gone.group().is_uncertain


def test_a_collective_of_a_group_without_the_rank_that_left_goes_on() -> None:
    waiting, gone = Rank(0, size=2), Rank(2, size=3)
    assert not positions.can_never_complete(waiting.begin(), gone.left(), 0)


@pytest.mark.parametrize(("op", "answer"), [("recv", "send"), ("send", "recv")])
def test_a_transfer_waits_in_vain_if_its_other_half_was_not_begun(op: str, answer: str) -> None:
    waiting, gone = Rank(0), Rank(1)
    gone.begin(answer, 0)
    gone.begin(answer, 2)
    assert not positions.can_never_complete(waiting.begin(op, 1), gone.left(), 0)
    assert not positions.can_never_complete(waiting.begin(op, 2), gone.left(), 0), "it is between others"
    assert positions.can_never_complete(waiting.begin(op, 1), gone.left(), 0)


def test_a_receive_from_any_rank_may_take_a_send_and_is_never_given_up_itself() -> None:
    waiting, gone = Rank(0), Rank(1)
    gone.begin("recv")
    assert not positions.can_never_complete(waiting.begin("send", 1), gone.left(), 0)
    assert not positions.can_never_complete(waiting.begin("recv"), gone.left(), 0)


def test_a_group_that_the_rank_left_without_making_is_waited_for_in_vain() -> None:
    gone = Rank(1).left()
    assert positions.can_never_form(GroupLabel("new", (0, 1)), gone)
    assert not positions.can_never_form(GroupLabel("new", (0, 2)), gone)
    assert not positions.can_never_form(GroupLabel("world", (0, 1, 2)), gone)


def test_an_actor_may_join_a_collective_that_the_main_thread_has_left() -> None:
    ends = threading.Event()
    actor = threading.Thread(target=ends.wait, args=(10,), name=f"{ACTOR_THREAD_PREFIX}trainer")
    assert not positions.has_other_collective_threads(CollectiveRing())
    actor.start()
    assert positions.has_other_collective_threads(CollectiveRing())
    ends.set()
    actor.join()
    assert not positions.has_other_collective_threads(CollectiveRing())
