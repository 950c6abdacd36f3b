"""Whether ranks are in step after a call that did not end well: what they say of their positions in, verdicts out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from meshbook.supervisor.desync import collect_positions, find_desynced_groups, has_left
from meshbook.wire.messages import GroupPosition, Outcome, OutcomeGroup, RankPosition
from tests.positions import position


def at(rank: int, *groups: GroupPosition, **changes: Any) -> RankPosition:
    """A rank at rest after call c1."""
    return position(rank, groups=groups, **changes)


def world(num_begun: int, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> GroupPosition:
    return GroupPosition(name="0", ranks=ranks, num_started=num_begun, **changes)


def verdict(*positions: RankPosition, ranks: tuple[int, ...] = (0, 1)) -> dict[str, str]:
    return find_desynced_groups({position.rank: position for position in positions}, ranks)


def test_ranks_that_have_begun_the_same_collectives_are_in_step() -> None:
    assert verdict(at(0, world(7)), at(1, world(7))) == {}


def test_one_collective_more_on_a_rank_is_out_of_step_and_says_which() -> None:
    assert verdict(at(0, world(8)), at(1, world(7))) == {
        "0": "the call before ended badly, with 8 collectives on rank 0 and 7 on rank 1"
    }


def test_a_rank_that_ended_well_is_compared_too() -> None:
    assert verdict(at(0, world(8), status="ok"), at(1, world(7)))


def test_work_that_is_under_way_is_out_of_step_although_all_have_begun_it() -> None:
    assert "under way" in verdict(at(0, world(7, num_in_flight=1)), at(1, world(7)))["0"]


def test_a_collective_that_failed_on_one_rank_alone_is_out_of_step() -> None:
    assert verdict(at(0, world(7, failed=(7,))), at(1, world(7)))
    assert verdict(at(0, world(7, failed=(7,))), at(1, world(7, failed=(7,)))) == {}


@pytest.mark.parametrize(
    ("first", "second", "fine"),
    [
        ({"sent": {1: 3}}, {"received": {0: 3}}, True),
        ({"sent": {1: 3}}, {"received": {0: 2}}, False),
        ({"sent": {1: 3}}, {}, False),
        ({}, {"received": {0: 1}}, False),
        ({"sent": {1: 1}, "received": {1: 1}}, {"sent": {0: 1}, "received": {0: 1}}, True),
        ({"sent": {1: 2}}, {"received_from_any": 2}, True),
        ({"sent": {1: 2}}, {"received_from_any": 1}, False),
    ],
)
def test_each_send_has_its_receive_whoever_made_more_of_either(
    first: dict[str, Any], second: dict[str, Any], fine: bool
) -> None:
    assert (verdict(at(0, world(7, **first)), at(1, world(7, **second))) == {}) is fine


def test_only_the_group_that_differs_is_formed_anew() -> None:
    pair = GroupPosition(name="1", ranks=(0, 1), num_started=2)
    other = msgspec.structs.replace(pair, num_started=3)
    assert set(verdict(at(0, world(7), pair), at(1, world(7), other))) == {"1"}


def test_a_group_that_a_member_did_not_come_to_make_is_out_of_step() -> None:
    pair = GroupPosition(name="1", ranks=(0, 1), num_started=0)
    assert verdict(at(0, world(7), pair), at(1, world(7))) == {"1": "rank 1 did not make the group"}


def test_different_numbers_of_groups_are_levelled() -> None:
    assert set(verdict(at(0, world(7), num_groups_created=3), at(1, world(7), num_groups_created=2))) == {"0"}


def test_a_group_of_ranks_that_still_work_counts_as_out_of_step_only_if_the_call_used_it() -> None:
    busy = at(1, world(9), is_held_or_idle=False, is_idle=False)
    assert verdict(at(0, world(7)), busy, ranks=(0,)) == {}
    assert "rank 1 had not come to rest" in verdict(at(0, world(7, has_new_collectives=True)), busy, ranks=(0,))["0"]


def test_a_rank_that_does_not_answer_counts_as_one_that_still_works() -> None:
    assert verdict(at(0, world(7, has_new_collectives=True)))


def test_answers_come_as_plain_data_and_a_rank_without_one_is_left_out() -> None:
    answer = msgspec.to_builtins(at(0, world(7, sent={1: 3})))
    parts = (OutcomeGroup((0,), Outcome(status="ok", reply=answer)), OutcomeGroup((1,), Outcome(status="skipped")))
    assert collect_positions(parts) == {0: at(0, world(7, sent={1: 3}))}


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, True),
        ({"status": "interrupted"}, True),
        ({"has_other_collective_threads": True}, False),
        ({"status": ""}, False),
        ({"is_idle": False}, True),  # it runs the next cell, in which its collectives wait
        ({"status": "ok"}, True),
        ({"status": "ok", "is_idle": False}, False),
        ({"is_idle": False, "is_held_or_idle": False}, False),
        ({"status": "", "has_begun": False}, True),  # it was taken out of the queue
        ({"status": "", "has_begun": False, "is_idle": False, "is_held_or_idle": False}, False),
        ({"status": "", "has_begun": False, "has_other_collective_threads": True}, False),
    ],
)
def test_a_rank_has_left_a_call_when_nothing_of_it_can_come_to_a_collective(
    changes: dict[str, Any], left: bool
) -> None:
    assert has_left(at(0, world(7), **changes)) is left


def test_a_rank_that_ended_well_with_work_under_way_has_not_left() -> None:
    assert not has_left(at(0, world(7, num_in_flight=1), status="ok"))
    assert has_left(at(0, world(7, num_in_flight=1), status="error"))
