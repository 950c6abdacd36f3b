"""Ranks that have left a call: who waits for them in vain, and what is said of it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from meshbook.errors import CollectiveAborted
from meshbook.rank.process_groups import departures
from meshbook.rank.process_groups.ring import GroupLabel
from meshbook.wire.messages import Frame, Outcome, RankError, RankPosition
from tests.rank.test_positions import Rank


def doomed(waiting: Rank, *left: RankPosition, connecting: tuple[GroupLabel, ...] = ()) -> CollectiveAborted | None:
    return departures.find_doomed_wait(
        waiting.ring.running(),
        connecting,
        left,
        rank=waiting.rank,
        recorded=lambda: waiting.ring.since(0),
        locate=departures.make_locate(__file__),
    )


def why_doomed(waiting: Rank, *left: RankPosition, connecting: tuple[GroupLabel, ...] = ()) -> CollectiveAborted:
    error = doomed(waiting, *left, connecting=connecting)
    assert error is not None
    return error


def transport_cause(error: RankError | None, waiting: Rank, *left: RankPosition) -> CollectiveAborted | None:
    return departures.find_transport_cause(
        error, waiting.ring.since(0), left, rank=waiting.rank, locate=departures.make_locate(__file__)
    )


def closed(text: str = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer") -> RankError:
    return RankError(ename="RuntimeError", evalue=text, traceback=())


def test_a_collective_that_a_departed_rank_has_not_joined_is_doomed() -> None:
    waiting, gone = Rank(0), Rank(1)
    assert doomed(waiting, gone.left()) is None  # nobody waits
    waiting.begin()
    error = why_doomed(waiting, gone.left(cause="rank 1 raised KeyError at line 2"))
    assert str(error) == "all_reduce #1 cannot be completed: rank 1 raised KeyError at line 2"
    assert (error.ranks, error.cause) == ((1,), "rank 1 raised KeyError at line 2")


def test_of_a_rank_that_left_without_an_error_it_is_said_what_it_did_not_come_to() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    error = why_doomed(waiting, gone.left())
    assert str(error).endswith("rank 1 ended the cell without coming to it")
    assert error.cause == "rank 1 ended the cell without coming to all_reduce #1"


def test_of_a_rank_that_failed_in_the_collective_it_is_not_said_that_it_did_not_come() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    gone.begin(error="RuntimeError: Connection closed by peer")
    error = why_doomed(waiting, gone.left(status="ok"))
    assert str(error) == "all_reduce #1 cannot be completed: rank 1 failed in it"
    assert error.cause == "rank 1 failed in all_reduce #1"


def test_all_ranks_that_ended_without_coming_to_it_are_named_with_how_many_each_came_to() -> None:
    ranks = [Rank(rank, 4) for rank in range(4)]
    for rank in ranks:
        rank.done(4)
    waiting = ranks.pop(2)
    waiting.begin()
    error = why_doomed(waiting, *(rank.left() for rank in ranks))
    first, second = str(error).splitlines()
    assert first == "all_reduce #5 cannot be completed: ranks 0-1,3 ended the cell without coming to it"
    assert second.startswith("rank 2 came to 5 collectives, ranks 0-1,3 to 4. Which one of rank 2's is too many")
    assert error.ranks == (0, 1, 3)


def log_all(rank: Rank, count: int) -> None:
    for _ in range(count):
        rank.ring.finish(rank.ring.begin("all_reduce", rank.label))


def test_the_first_collective_that_ranks_called_elsewhere_is_named_with_both_lines() -> None:
    waiting, other = Rank(2), Rank(0)
    for rank, count in ((waiting, 3), (other, 2)):
        log_all(rank, count)
    for rank in (waiting, other):
        log_all(rank, 1)
    waiting.begin()
    error = why_doomed(waiting, other.left())
    _, second = str(error).splitlines()
    assert "They differ from #3 on: all_reduce at line" in second
    assert second.endswith("What #3 and those after it have computed may mix different values")
    lines = re.findall(r"called at line (\d+)", second)
    assert len(set(lines)) == 2


def test_other_shapes_at_the_same_line_are_a_difference() -> None:
    waiting, other = Rank(1), Rank(0)
    for rank, sizes in ((waiting, (4, 8, 4)), (other, (4, 4))):
        for size in sizes:
            tensor = SimpleNamespace(shape=(size,), dtype="float32")
            rank.ring.finish(rank.ring.begin("all_reduce", rank.label, [tensor]))
    waiting.begin()
    error = why_doomed(waiting, other.left())
    assert "They differ from #2 on: all_reduce of 8 float32 at line" in str(error)


def test_ranks_that_called_at_different_lines_are_not_said_to_have_called_at_one() -> None:
    waiting, one, another = Rank(2), Rank(0), Rank(1)
    log_all(waiting, 1)
    log_all(one, 1)
    log_all(another, 1)
    waiting.begin()
    error = why_doomed(waiting, one.left(), another.left())
    assert "ranks 0-1 ended the cell" in str(error)
    assert re.search(r"called at line \d+ on rank 0\. What #1", str(error))


def test_what_ranks_may_bring_in_other_shapes_is_no_difference() -> None:
    waiting, other = Rank(1), Rank(0)
    for rank, size in ((waiting, 4), (other, 8)):
        tensor = SimpleNamespace(shape=(size,), dtype="float32")
        rank.ring.finish(rank.ring.begin("all_gather", rank.label, [tensor]))
    waiting.begin()
    error = why_doomed(waiting, other.left())
    assert "They differ" not in str(error)


def test_a_difference_from_the_first_that_is_known_on_may_be_an_earlier_one() -> None:
    waiting, other = Rank(2), Rank(0)
    log_all(waiting, 41)
    log_all(other, 40)  # at another line
    waiting.begin()
    error = why_doomed(waiting, other.left())
    assert "They differ from #27 on, or from an earlier one: " in str(error)


def test_what_was_begun_on_former_connections_is_not_compared() -> None:
    waiting, other = Rank(2), Rank(0)
    log_all(waiting, 1)
    for rank in (waiting, other):
        rank.label.reset_counters(2)
        log_all(rank, 1)
    waiting.begin()
    error = why_doomed(waiting, other.left())
    assert "They differ" not in str(error)


def test_a_rank_that_was_in_no_collective_of_the_call_has_mixed_nothing() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    error = why_doomed(waiting, gone.left())
    assert "\n" not in str(error)


def test_a_line_of_another_cell_is_named_by_its_cell() -> None:
    locate = departures.make_locate("/tmp/1.py", {"/tmp/2.py": "cell 7"}.get)
    assert [locate(f"/tmp/{number}.py", 3) for number in (1, 2, 3)] == ["line 3", "line 3 of cell 7", "3.py:3"]


def test_a_collective_that_a_departed_rank_has_joined_can_complete() -> None:
    waiting, gone = Rank(0), Rank(1)
    waiting.begin()
    gone.done(1)
    assert doomed(waiting, gone.left()) is None


def test_a_group_that_a_departed_rank_does_not_form_is_doomed() -> None:
    error = why_doomed(Rank(0), Rank(1).left(), connecting=(GroupLabel("another", (0, 1)),))
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
