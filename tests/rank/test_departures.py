"""Ranks that have left a call: who waits for them in vain, and what is said of it."""

from __future__ import annotations

import pytest

from meshbook.errors import CollectiveAborted
from meshbook.rank.process_groups import departures
from meshbook.rank.process_groups.ring import GroupLabel
from meshbook.wire.messages import Frame, Outcome, RankError, RankPosition
from tests.rank.test_positions import Rank


def doomed(waiting: Rank, *left: RankPosition, connecting: tuple[GroupLabel, ...] = ()) -> CollectiveAborted | None:
    return departures.find_doomed_wait(
        waiting.ring.running(), connecting, left, rank=waiting.rank, running_file=__file__
    )


def transport_cause(error: RankError | None, waiting: Rank, *left: RankPosition) -> CollectiveAborted | None:
    recorded = reversed(waiting.ring.since(0))
    return departures.find_transport_cause(error, recorded, left, rank=waiting.rank, running_file=__file__)


def closed(text: str = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer") -> RankError:
    return RankError(ename="RuntimeError", evalue=text, traceback=())


def test_a_collective_that_a_departed_rank_has_not_joined_is_doomed() -> None:
    waiting, gone = Rank(0), Rank(1)
    assert doomed(waiting, gone.left()) is None  # nobody waits
    waiting.begin()
    error = doomed(waiting, gone.left(cause="rank 1 raised KeyError at line 2"))
    assert error is not None
    assert str(error) == "all_reduce #1 cannot be completed: rank 1 raised KeyError at line 2"
    assert (error.ranks, error.cause) == ((1,), "rank 1 raised KeyError at line 2")


def test_of_a_rank_that_left_without_an_error_it_is_said_what_it_did_not_come_to() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    error = doomed(waiting, gone.left())
    assert error is not None
    assert str(error).endswith("rank 1 ended the cell without coming to it")
    assert error.cause == "rank 1 ended the cell without coming to all_reduce #1"


def test_of_a_rank_that_failed_in_the_collective_it_is_not_said_that_it_did_not_come() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    gone.begin(error="RuntimeError: Connection closed by peer")
    error = doomed(waiting, gone.left(last_status="ok"))
    assert error is not None
    assert str(error) == "all_reduce #1 cannot be completed: rank 1 failed in it"
    assert error.cause == "rank 1 failed in all_reduce #1"


def test_a_collective_that_a_departed_rank_has_joined_can_complete() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    gone.done(1)
    assert doomed(waiting, gone.left()) is None


def test_a_group_that_a_departed_rank_does_not_form_is_doomed() -> None:
    error = doomed(Rank(0), Rank(1).left(), connecting=(GroupLabel("another", (0, 1)),))
    assert error is not None
    assert error.where == "new_group"


def test_a_closed_connection_is_explained_by_the_rank_that_left() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin(error="closed")
    assert transport_cause(closed(), waiting) is None
    assert transport_cause(closed("no"), waiting, gone.left()) is None
    assert transport_cause(None, waiting, gone.left()) is None
    cause = transport_cause(closed(), waiting, gone.left(cause="rank 1 was stopped"))
    assert cause is not None
    assert cause.cause == "rank 1 was stopped"


def test_a_connection_that_closed_in_another_collective_is_not_explained_by_it() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin(error="closed")
    gone.done(1)
    assert transport_cause(closed(), waiting, gone.left()) is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((("/tmp/ipykernel_1/3.py", 4),), "rank 2 raised ValueError: no at line 4"),
        ((), "rank 2 raised ValueError: no"),
    ],
)
def test_the_reason_of_a_failure_has_the_users_innermost_line(files: tuple[tuple[str, int], ...], reason: str) -> None:
    frames = tuple(Frame(file=file, line=line, function="f") for file, line in files)
    error = RankError(ename="ValueError", evalue="no\nat all", traceback=(), frames=frames)
    assert departures.describe_leave_reason(2, Outcome(status="error", error=error), None) == reason
