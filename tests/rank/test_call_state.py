"""A rank's calls and its collectives: events of the main and the service thread, in every order that can happen."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.errors import CollectiveAborted
from meshbook.ids import CallId
from meshbook.rank import call_state
from meshbook.rank.call_state import CallEffect, CallState
from meshbook.wire.messages import Outcome, RankError, RankPosition
from tests.positions import position

A, B = CallId("c-1"), CallId("c-2")
HOLD, RESUME, WATCH = (CallEffect.HOLD,), (CallEffect.RESUME,), (CallEffect.WATCH,)


def left(rank: int, cause: str = "") -> RankPosition:
    return position(rank, cause=cause)


def aborted(cause: str = "rank 1 left") -> CollectiveAborted:
    return CollectiveAborted("all_reduce #1 cannot be completed", ranks=(1,), cause=cause, where="line 1")


class Rank:
    """A rank whose groups are formed."""

    def __init__(self, *, groups: bool = True) -> None:
        self.state = CallState(0)
        if groups:
            self.state.groups_forming()

    def begin(self, call: CallId, last_seq: int = 0) -> tuple[CallEffect, ...]:
        return self.state.began(call, "cell", now=1.0, last_seq=last_seq)

    def end(self, call: CallId, status: Any = "ok", error: RankError | None = None) -> tuple[CallEffect, ...]:
        effects = self.state.concluded(call, succeeded=status == "ok")
        self.report(call, status, error)
        return effects

    def report(self, call: CallId, status: Any = "ok", error: RankError | None = None) -> None:
        self.state.ended(call, "cell", Outcome(status=status, error=error))


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def running(rank: Rank) -> Rank:
    """In call A."""
    rank.begin(A)
    return rank


def test_a_call_has_begun_from_its_beginning_on_and_not_while_it_is_queued(running: Rank) -> None:
    running.state.ranks_left(B, [left(1)])  # B is queued, or was cancelled
    assert (running.state.has_begun(A), running.state.has_begun(B)) == (True, False)
    running.end(A)
    assert running.state.has_begun(A)


def test_a_call_that_ends_well_holds_nothing(rank: Rank) -> None:
    assert rank.begin(A) == ()
    assert rank.state.running_call_id == A
    assert rank.end(A) == ()
    assert rank.state.running is None
    finished = rank.state.finished
    assert finished is not None
    assert finished.call == A


@pytest.mark.parametrize("status", ["error", "interrupted"])
def test_a_call_that_does_not_end_well_holds_collectives_until_positions_are_checked(rank: Rank, status: str) -> None:
    rank.begin(A)
    assert rank.end(A, status) == HOLD
    assert rank.state.positions_checked(B) == ()
    assert rank.state.positions_checked(A) == RESUME
    assert rank.state.positions_checked(A) == ()


def test_a_stop_of_the_running_call_holds_when_it_ends_even_if_it_ends_well(running: Rank) -> None:
    assert running.state.stop_reported(A) == ()  # its own collectives must go on: they are ended in other ways
    assert running.end(A) == HOLD


def test_a_stop_that_comes_between_the_end_of_the_code_and_the_report_holds_at_once(running: Rank) -> None:
    assert running.state.concluded(A, succeeded=True) == ()
    assert running.state.stop_reported(A) == HOLD
    running.report(A)
    assert running.state.positions_checked(A) == RESUME


def test_a_stop_that_comes_after_the_end_holds_at_once(running: Rank) -> None:
    running.end(A)
    assert running.state.stop_reported(A) == HOLD


def test_a_stop_of_an_earlier_call_leaves_the_running_one_alone(running: Rank) -> None:
    running.end(A)
    running.begin(B)
    assert running.state.stop_reported(A) == ()
    assert running.end(B) == ()


def test_a_stop_of_a_call_that_has_not_begun_holds_and_the_check_takes_it_back(rank: Rank) -> None:
    assert rank.state.stop_reported(A) == HOLD
    assert rank.state.positions_checked(A) == RESUME
    rank.begin(A)
    assert rank.end(A) == ()


def test_a_second_report_of_the_same_end_holds_again_and_changes_nothing_else(rank: Rank) -> None:
    rank.begin(A)
    assert rank.end(A) == ()
    assert rank.end(A, "error") == HOLD
    assert rank.state.running is None
    assert rank.state.positions_checked(A) == RESUME


def test_forming_groups_makes_checks_of_earlier_calls_obsolete(running: Rank) -> None:
    running.end(A, "error")
    running.begin(B)
    running.state.groups_forming()
    assert running.end(B) == ()
    assert running.state.positions_checked(A) == ()


def test_a_fault_while_groups_are_formed_holds_until_they_are_formed_again(rank: Rank) -> None:
    rank.begin(B)
    rank.state.groups_forming()
    assert rank.end(B, "error") == HOLD
    again = CallId("form-2")
    rank.begin(again)
    rank.state.groups_forming()
    assert rank.end(again) == ()
    assert rank.state.positions_checked(B) == ()


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that have left


def test_departures_from_the_running_call_are_watched_once(running: Rank) -> None:
    assert running.state.ranks_left(A, [left(1)]) == WATCH
    assert running.state.ranks_left(A, [left(2)]) == ()
    assert running.state.watched_departures() == (A, (left(1), left(2)))


def test_a_later_position_of_a_rank_replaces_its_earlier_one(running: Rank) -> None:
    running.state.ranks_left(A, [left(1)])
    running.state.ranks_left(A, [left(1, "it failed")])
    assert running.state.departed(A) == (left(1, "it failed"),)


def test_departures_from_a_queued_call_are_watched_when_it_begins(running: Rank) -> None:
    assert running.state.ranks_left(B, [left(1)]) == ()
    running.end(A)
    assert running.begin(B) == WATCH


def test_the_watch_ends_with_the_call_and_another_call_starts_its_own(running: Rank) -> None:
    running.state.ranks_left(A, [left(1)])
    running.state.ranks_left(B, [left(1)])
    running.end(A)
    assert running.state.watched_departures() is None
    assert running.begin(B) == WATCH


def test_a_watch_that_has_not_noticed_the_end_of_its_call_goes_on_with_the_next(running: Rank) -> None:
    running.state.ranks_left(A, [left(1)])
    running.state.ranks_left(B, [left(2)])
    running.end(A)
    assert running.begin(B) == ()
    assert running.state.watched_departures() == (B, (left(2),))


def test_a_watch_that_failed_can_start_again(running: Rank) -> None:
    assert running.state.ranks_left(A, [left(1)]) == WATCH
    running.state.watch_ended()
    assert running.state.ranks_left(A, [left(2)]) == WATCH


def test_without_groups_nobody_can_be_waited_for() -> None:
    rank = Rank(groups=False)
    rank.begin(A)
    assert rank.state.ranks_left(A, [left(1)]) == ()


def test_a_call_that_has_ended_is_not_released(running: Rank) -> None:
    running.state.ranks_left(A, [left(1)])
    assert running.state.release_from(A, aborted())
    running.end(A, "error")
    assert not running.state.release_from(A, aborted())
    running.begin(B)
    assert not running.state.release_from(A, aborted())
    assert running.state.release_error is None


# ---------------------------------------------------------------------------------------------------------------------
# What others are told


def failed(released_from: str | None = None) -> RankError:
    return RankError(ename="ValueError", evalue="no\nmore", traceback=(), released_from=released_from)


def test_others_are_told_why_they_wait_for_this_rank(rank: Rank) -> None:
    for status, error, reason in (
        ("error", failed(), "rank 0 raised ValueError: no"),
        ("interrupted", failed(), "rank 0 was stopped"),
        ("ok", None, ""),
    ):
        rank.begin(A)
        rank.end(A, status, error)
        assert rank.state.left_call(A) == (status, reason)


def test_of_a_call_that_others_still_run_a_rank_tells_its_end_after_later_calls_too(running: Rank) -> None:
    running.end(A, "error", failed())
    running.begin(B)
    assert running.state.left_call(B) is None
    running.end(B)
    assert running.state.left_call(A) == ("error", "rank 0 raised ValueError: no")


def test_a_rank_that_was_released_names_the_first_cause(running: Rank) -> None:
    running.state.release_from(A, aborted("rank 3 raised KeyError"))
    running.state.transport_failed(aborted("a consequence"))
    running.end(A, "error", failed(released_from="all_reduce at line 1"))
    assert running.state.left_call(A) == ("error", "rank 3 raised KeyError")


def test_positions_before_calls_are_remembered_for_the_last_ones(rank: Rank) -> None:
    for number in range(call_state._MAX_REMEMBERED_CALLS + 1):
        rank.begin(CallId(f"c-{number}"), last_seq=number)
    assert rank.state.seq_before(CallId("c-1"), 99) == 1
    assert rank.state.seq_before(CallId("c-0"), 99) == 99
