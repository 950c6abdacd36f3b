"""Whether ranks are in step after a call that did not end well: what they say of their positions in, verdicts out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from meshbook.supervisor.instep import has_left, out_of_step, positions_of
from meshbook.wire.messages import GroupPosition, Outcome, Part, RankPosition


def at(rank: int, *groups: GroupPosition, **changes: Any) -> RankPosition:
    """A rank at rest after call c1."""
    told: dict[str, Any] = {
        "rank": rank, "call": "c1", "status": "error", "cause": "", "at_rest": True, "idle": True, "may_join": False,
        "num_named": 1, "groups": groups, **changes,
    }  # fmt: skip
    return RankPosition(**told)


def world(num_begun: int, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> GroupPosition:
    return GroupPosition(name="0", ranks=ranks, num_begun=num_begun, **changes)


def verdict(*positions: RankPosition, ranks: tuple[int, ...] = (0, 1)) -> dict[str, str]:
    return out_of_step({position.rank: position for position in positions}, ranks)


def test_ranks_that_have_begun_the_same_collectives_are_in_step() -> None:
    assert verdict(at(0, world(7)), at(1, world(7))) == {}


def test_one_collective_more_on_a_rank_is_out_of_step_and_says_which() -> None:
    assert verdict(at(0, world(8)), at(1, world(7))) == {
        "0": "the call before ended badly, with 8 collectives on rank 0 and 7 on rank 1"
    }


def test_a_rank_that_ended_well_is_compared_too() -> None:
    assert verdict(at(0, world(8), status="ok"), at(1, world(7)))


def test_work_that_is_under_way_is_out_of_step_although_all_have_begun_it() -> None:
    assert "under way" in verdict(at(0, world(7, num_open=1)), at(1, world(7)))["0"]


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
    pair = GroupPosition(name="1", ranks=(0, 1), num_begun=2)
    other = msgspec.structs.replace(pair, num_begun=3)
    assert set(verdict(at(0, world(7), pair), at(1, world(7), other))) == {"1"}


def test_a_group_that_a_member_did_not_come_to_make_is_out_of_step() -> None:
    pair = GroupPosition(name="1", ranks=(0, 1), num_begun=0)
    assert verdict(at(0, world(7), pair), at(1, world(7))) == {"1": "rank 1 did not make the group"}


def test_different_numbers_of_groups_are_levelled() -> None:
    assert set(verdict(at(0, world(7), num_named=3), at(1, world(7), num_named=2))) == {"0"}


def test_a_group_of_ranks_that_still_work_counts_as_out_of_step_only_if_the_call_used_it() -> None:
    busy = at(1, world(9), at_rest=False, idle=False)
    assert verdict(at(0, world(7)), busy, ranks=(0,)) == {}
    assert "rank 1 had not come to rest" in verdict(at(0, world(7, moved=True)), busy, ranks=(0,))["0"]


def test_a_rank_that_does_not_answer_counts_as_one_that_still_works() -> None:
    assert verdict(at(0, world(7, moved=True)))


def test_answers_come_as_plain_data_and_a_rank_without_one_is_left_out() -> None:
    answer = msgspec.to_builtins(at(0, world(7, sent={1: 3})))
    parts = (Part((0,), Outcome(status="ok", answer=answer)), Part((1,), Outcome(status="skipped")))
    assert positions_of(parts) == {0: at(0, world(7, sent={1: 3}))}


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, True),
        ({"status": "interrupted"}, True),
        ({"may_join": True}, False),
        ({"call": "c0"}, False),
        ({"idle": False}, True),  # it runs the next cell, in which its collectives wait
        ({"status": "ok"}, True),
        ({"status": "ok", "idle": False}, False),
        ({"idle": False, "at_rest": False}, False),
    ],
)
def test_a_rank_has_left_a_call_when_nothing_of_it_can_come_to_a_collective(
    changes: dict[str, Any], left: bool
) -> None:
    assert has_left(at(0, world(7), **changes), "c1") is left


def test_a_rank_that_ended_well_with_work_under_way_has_not_left() -> None:
    assert not has_left(at(0, world(7, num_open=1), status="ok"), "c1")
    assert has_left(at(0, world(7, num_open=1), status="error"), "c1")
