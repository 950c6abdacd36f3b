"""The error that a finished call stands for: its class and its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.controller.call_errors import error_from, render_error
from meshbook.errors import CellError, CellInterrupted, RankLost
from meshbook.wire.messages import CallFinished, Outcome, OutcomeGroup, RankError, RankExited

OK, SKIPPED, LOST = Outcome(status="ok"), Outcome(status="skipped"), Outcome(status="lost")
RAISED = Outcome(status="error", error=RankError(ename="ValueError", evalue="bad", traceback=("ValueError: bad",)))
STOPPED = Outcome(
    status="interrupted", error=RankError(ename="KeyboardInterrupt", evalue="", traceback=("KeyboardInterrupt",))
)
RELEASED = Outcome(
    status="error",
    error=RankError(ename="CollectiveAborted", evalue="left", traceback=("left",), released_from="all_reduce"),
)


def finished(*parts: tuple[tuple[int, ...], Outcome], lost: tuple[RankExited, ...] = ()) -> CallFinished:
    outcomes = tuple(OutcomeGroup(ranks, outcome) for ranks, outcome in parts)
    return CallFinished(call="c", outcomes=outcomes, seconds=0.1, lost=lost)  # type: ignore[arg-type]


def exited(**changes: Any) -> RankExited:
    facts = {"rank": 2, "pid": 7, "exit_code": None, "signal": 9, "host": "here", "last_lines": (),
             "last_collective": None}  # fmt: skip
    return RankExited(**{**facts, **changes})


def test_ranks_that_were_lost_alike_are_one_clause() -> None:
    gone = [exited(rank=rank, pid=10 + rank) for rank in (3, 1, 2)] + [exited(rank=0, signal=None, exit_code=3, pid=9)]
    error = error_from(finished(((0, 1, 2, 3), LOST), lost=tuple(gone)), "cell 5")
    assert str(error).startswith(
        "rank 0 (pid 9 on here) exited with status 3 while cell 5 ran; ranks 1-3 (pids 11, 12, 13 on here) were killed "
        "by SIGKILL while cell 5 ran. "
    )


@pytest.mark.parametrize(
    ("parts", "kind", "text"),
    [
        ([((0, 1), OK)], None, None),
        ([((0,), OK), ((1,), RAISED)], CellError, "rank 1: ValueError: bad (rank 0 ran to the end)"),
        ([((0, 1), STOPPED)], CellInterrupted, "the cell was stopped on ranks 0-1"),
        ([((0,), OK), ((1,), STOPPED)], CellInterrupted, "the cell was stopped on rank 1; rank 0 had ended already"),
        ([((0,), RAISED), ((1,), STOPPED)], CellError, "rank 0: ValueError: bad; rank 1: KeyboardInterrupt"),
        ([((0,), STOPPED), ((1,), RAISED)], CellError, "rank 1: ValueError: bad; rank 0: KeyboardInterrupt"),
        ([((0,), OK), ((1,), SKIPPED)], CellError, "rank 1 did not answer"),
    ],
)
def test_how_a_call_ended_is_one_error_and_one_sentence(parts: Any, kind: type | None, text: str | None) -> None:
    error = error_from(finished(*parts))
    if kind is None:
        assert error is None
    else:
        assert type(error) is kind
        assert str(error) == text


def test_released_ranks_are_a_note_beside_what_was_raised_and_a_failure_where_nothing_was() -> None:
    beside = error_from(finished(((0,), RAISED), ((1,), RELEASED)))
    assert isinstance(beside, CellError)
    assert [failure.ename for failure in beside.failures] == ["ValueError"]
    assert [one.ranks for one in beside.released] == [(1,)]
    alone = error_from(finished(((0,), OK), ((1,), RELEASED)))
    assert isinstance(alone, CellError)
    assert [failure.ename for failure in alone.failures] == ["CollectiveAborted"]
    stopped = error_from(finished(((0,), STOPPED), ((1,), RELEASED)))
    assert isinstance(stopped, CellInterrupted)


def test_a_lost_rank_is_told_with_its_last_words_and_the_next_step() -> None:
    gone = exited(last_lines=("step 3",), last_collective="all_reduce #4")
    error = error_from(finished(((0, 1), STOPPED), ((3,), SKIPPED), lost=(gone,)), "cell 5")
    assert isinstance(error, RankLost)
    assert str(error).splitlines() == [
        "rank 2 (pid 7 on here) was killed by SIGKILL while cell 5 ran. SIGKILL is also how the system ends a process "
        "when memory runs out. Ranks 0-1,3 keep their state. Rank 3 had not come back from it yet.",
        "Its last collective: all_reduce #4",
        "Its last lines:",
        "    step 3",
        "Next: %mesh heal puts a new process in its place, and the others keep what they hold; or go on with these "
        "alone (%%mesh --ranks 0-1,3).",
    ]
    assert (error.ranks, error.survivors, error.failures) == ((2,), (0, 1, 3), ())
    assert (error.signal, error.pid) == ("SIGKILL", 7)


def test_memory_is_not_suspected_of_what_meshbook_has_killed() -> None:
    ours, others = exited(is_killed_by_us=True), exited(rank=1)
    assert "memory" not in str(error_from(finished(((0,), OK), ((2,), LOST), lost=(ours,))))
    assert "when memory runs out" in str(error_from(finished(((0,), OK), ((1, 2), LOST), lost=(ours, others))))


def test_a_rank_that_ended_with_its_host_is_told_with_the_cause() -> None:
    error = error_from(finished(((2,), LOST), lost=(exited(signal=None, cause="ended with its host"),)))
    assert str(error) == (
        "rank 2 (pid 7 on here) ended with its host while the cell ran.\n"
        "Next: %mesh heal puts a new process in its place."
    )
    assert isinstance(error, RankLost)
    assert error.signal is None


def test_a_lost_machine_is_healed_when_it_can_be_reached_and_not_before() -> None:
    how = {"signal": None, "cause": "is lost: n2", "heals_when": "machine n2 can be reached"}
    gone = exited(rank=2, **how), exited(rank=3, **how)
    error = error_from(finished(((0, 1), STOPPED), ((2, 3), LOST), lost=gone))
    assert str(error).splitlines()[-1] == (
        "Next: %mesh heal puts new processes in their place when machine n2 can be reached (it is refused until then), "
        "and the others keep what they hold; or go on with these alone (%%mesh --ranks 0-1)."
    )


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (LOST, "ranks 0-1 are gone."),
        (Outcome(status="lost", error=RankError(ename="RankLost", evalue="rank 0 is dead", traceback=())),
         "rank 0 is dead."),
    ],
)  # fmt: skip
def test_ranks_that_were_lost_before_the_call_are_told_without_an_exit(outcome: Outcome, text: str) -> None:
    error = error_from(finished(((0, 1), outcome)))
    assert isinstance(error, RankLost)
    assert (str(error), error.pid, error.signal) == (text, None, None)


def test_a_rendered_error_has_the_tracebacks_of_ranks_that_raised_as_a_note_once() -> None:
    error = error_from(finished(((0,), STOPPED), ((1,), RAISED)))
    assert error is not None
    assert render_error(render_error(error)) is error
    assert error.__notes__ == ["rank 1: ValueError: bad\n\nrank 0: KeyboardInterrupt"]
