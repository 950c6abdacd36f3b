"""Outcomes and failures of many ranks, each distinct one once."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import Failure, Released
from meshbook.fold.outcomes import fold_errors, fold_outcomes, fold_released, merge_parts, ranks_with_status
from meshbook.wire.messages import Frame, Outcome, OutcomeGroup, Preview, RankError, Value


def ok(text, **more):
    return Outcome("ok", value=Value(Preview("plain", "int", text)), **more)


def failed(ename, evalue, line=3, status="error", traceback=None):
    frames = (Frame("cell 7", line, "<module>"), Frame("model.py", 12, "forward"))
    return Outcome(status, error=RankError(ename, evalue, traceback or ("Traceback", f"{ename}: {evalue}"), frames))


def fold(*outcomes):
    return fold_outcomes(enumerate(outcomes))


def test_equal_outcomes_are_one_part_with_their_ranks():
    assert fold(ok("1"), ok("2"), ok("1")) == (OutcomeGroup((0, 2), ok("1")), OutcomeGroup((1,), ok("2")))


def test_any_difference_keeps_outcomes_apart():
    assert len(fold(ok("1"), ok("1", bound_names=("x",)), ok("1", groups_broken=True), Outcome("ok"))) == 4


def test_an_answer_of_plain_data_is_compared_by_content():
    answers = [Outcome("ok", reply={"x": [1, 2.5, None]}), Outcome("ok", reply={"x": [1, 2.5, None]})]
    assert [part.ranks for part in fold(*answers)] == [(0, 1)]
    assert len(fold(Outcome("ok", reply=1), Outcome("ok", reply=1.0), Outcome("ok", reply=True))) == 3


def test_no_outcomes_are_no_parts():
    assert fold_outcomes([]) == ()
    assert merge_parts([]) == ()


@given(st.lists(st.sampled_from("abc"), max_size=12), st.data())
def test_hosts_parts_merge_to_what_all_ranks_fold_to(values, data):
    outcomes = list(enumerate(ok(value) for value in values))
    hosts = [[pair for pair in outcomes if owner == pair[0] % 3] for owner in data.draw(st.permutations(range(3)))]
    parts = [fold_outcomes(host) for host in hosts]
    whole = fold_outcomes(outcomes)
    assert merge_parts(parts) == whole
    arrived = [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=tuple[OutcomeGroup, ...]) for one in parts]
    assert merge_parts(arrived) == whole
    assert sorted(rank for part in whole for rank in part.ranks) == list(range(len(values)))


def test_one_failure_of_many_ranks_is_one_failure():
    (failure,) = fold_errors(fold(*[failed("KeyError", "'x'")] * 500))
    assert failure == Failure(tuple(range(500)), "KeyError", "'x'", ("Traceback", "KeyError: 'x'"))


def test_the_failure_of_most_ranks_comes_first():
    parts = fold(failed("KeyError", "'x'"), failed("ValueError", "no"), failed("ValueError", "no"))
    failures = [(failure.ename, failure.ranks) for failure in fold_errors(parts)]
    assert failures == [("ValueError", (1, 2)), ("KeyError", (0,))]


def test_messages_that_differ_in_numbers_are_one_failure_with_the_numbers_of_each():
    parts = fold(*(failed("ValueError", f"rank {rank} has {2 * rank} rows") for rank in range(3)))
    (failure,) = fold_errors(parts)
    assert failure.evalue == "rank 0…2 has {0, 2, 4} rows"
    assert failure.traceback == ("Traceback", "ValueError: rank 0…2 has {0, 2, 4} rows")
    assert failure.ranks == (0, 1, 2)


def test_colours_in_a_tracebacks_last_line_survive_the_folding_of_its_message():
    def at(rank):
        return failed("ValueError", f"bad {rank}", traceback=("T", f"\x1b[31mValueError\x1b[39m: bad {rank}"))

    (failure,) = fold_errors(fold(at(0), at(1)))
    assert failure.traceback[-1] == "\x1b[31mValueError\x1b[39m: bad 0…1"


def test_a_message_with_many_numbers_is_still_one_failure():
    parts = fold(*(failed("ValueError", " ".join(str(rank + at) for at in range(30))) for rank in range(2)))
    assert len(fold_errors(parts)) == 1


def test_the_same_message_from_another_line_is_another_failure():
    assert len(fold_errors(fold(failed("KeyError", "'x'", line=3), failed("KeyError", "'x'", line=4)))) == 2
    assert len(fold_errors(fold(failed("KeyError", "'x'"), failed("KeyError", "'y'")))) == 2
    assert len(fold_errors(fold(failed("KeyError", "'x'"), failed("IndexError", "'x'")))) == 2


def test_what_is_no_failure_of_the_code_is_left_out():
    parts = fold(ok("1"), Outcome("lost", error=RankError("RankLost", "killed", ())), Outcome("skipped"))
    assert fold_errors(parts) == ()


def test_an_interrupted_rank_has_a_failure_too():
    (failure,) = fold_errors(fold(ok("1"), failed("KeyboardInterrupt", "", status="interrupted")))
    assert (failure.ranks, failure.ename, failure.evalue) == ((1,), "KeyboardInterrupt", "")


def test_ranks_are_looked_up_by_how_they_ended():
    parts = fold(ok("1"), Outcome("lost"), ok("2"), failed("E", ""))
    assert ranks_with_status(parts, "ok") == (0, 2)
    assert ranks_with_status(parts, "lost", "error") == (1, 3)


def waited(where):
    return Outcome("error", error=RankError("CollectiveAborted", "rank 1 raised", ("Traceback",), released_from=where))


def test_ranks_that_waited_for_others_are_grouped_by_where_and_are_no_failures():
    barrier, gather = waited("barrier at line 2"), waited("gather at line 4")
    parts = fold(barrier, failed("ValueError", "no"), gather, barrier)
    assert fold_released(parts) == (Released((0, 3), "barrier at line 2"), Released((2,), "gather at line 4"))
    assert [failure.ranks for failure in fold_errors(parts)] == [(1,)]
    assert fold_released(fold(ok("1"), failed("ValueError", "no"))) == ()


def test_ranks_that_waited_at_one_line_on_two_hosts_are_one_group():
    parts = merge_parts([fold_outcomes([(rank, waited("barrier at line 2"))]) for rank in (2, 0)])
    assert fold_released(parts) == (Released((0, 2), "barrier at line 2"),)
