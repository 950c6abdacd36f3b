"""What the fault campaign draws and counts is what it says. The soak runs it (tests/soak)."""

from __future__ import annotations

import os
from collections import Counter

import psutil
import pytest

from tests.campaign import arithmetic, checks
from tests.campaign.checks import Problem, Remains
from tests.campaign.draws import WORLD_SIZE, deck, draw_case, works_for
from tests.campaign.faults import FAULTS
from tests.campaign.report import Result, describe
from tests.campaign.work import WORKS

SEED = 7


# ---- what is drawn


def test_a_case_depends_on_the_seed_and_its_number_alone() -> None:
    cases = [draw_case(SEED, number) for number in range(100)]
    assert [draw_case(SEED, number) for number in reversed(range(100))] == cases[::-1]
    assert cases != [draw_case(SEED + 1, number) for number in range(100)]


def test_every_deck_has_each_fault_as_often_as_it_weighs() -> None:
    weights = {fault.name: fault.weight for fault in FAULTS.values()}
    for index in range(3):
        assert Counter(deck(SEED, index)) == weights
    assert deck(SEED, 0) != deck(SEED, 1)


def test_every_fault_meets_every_work_that_it_may_come_in() -> None:
    met = {(case.fault, case.work) for case in (draw_case(SEED, number) for number in range(20_000))}
    assert met == {(fault.name, work.name) for fault in FAULTS.values() for work in works_for(fault)}


def test_what_a_fault_takes_is_needed_by_some_work() -> None:
    needed = frozenset[str]().union(*(work.needs for work in WORKS.values()))
    assert {fault.takes for fault in FAULTS.values() if fault.takes} <= needed


# ---- what is computed in one process


def test_collectives_give_each_rank_what_the_table_says() -> None:
    assert [arithmetic.collect("all_reduce", [1, 2, 4], rank, 0) for rank in range(3)] == [7, 7, 7]
    assert [arithmetic.collect("all_gather", [1, 2, 4], rank, 0) for rank in range(3)] == [17, 17, 17]
    assert [arithmetic.collect("broadcast", [1, 2, 4], rank, 4) for rank in range(3)] == [2, 2, 2]
    assert [arithmetic.collect("ring", [1, 2, 4], rank, 0) for rank in range(3)] == [4, 1, 2]


def test_one_turn_more_or_another_seed_gives_other_numbers() -> None:
    found = {tuple(arithmetic.numbers_after(seed, turns, WORLD_SIZE)) for seed in range(20) for turns in range(20)}
    assert len(found) == 400


# ---- what is counted


def _case(fault: str, work: str = "loop"):  # type: ignore[no-untyped-def]
    return next(
        case
        for case in (draw_case(SEED, number) for number in range(20_000))
        if (case.fault, case.work) == (fault, work)
    )


def _blame(case, error, lost=()):  # type: ignore[no-untyped-def]
    return [problem.text.split(":")[0] for problem in checks.check_blame(case, error, lost)]


def test_a_loss_is_blamed_on_the_rank_that_was_hit_and_on_nobody_else() -> None:
    from meshbook.errors import CellError, Failure, RankLost

    case = _case("kill")
    other = (case.victim + 1) % WORLD_SIZE
    right = RankLost("rank was killed by SIGKILL", ranks=[case.victim], signal="SIGKILL")
    assert _blame(case, right, (case.victim,)) == []
    assert _blame(case, RankLost("", ranks=[other], signal="SIGKILL"), (case.victim,)) != []
    assert _blame(case, RankLost("", ranks=[case.victim, other], signal="SIGKILL"), (case.victim,)) != []
    assert _blame(case, RankLost("", ranks=[case.victim], signal="SIGSEGV"), (case.victim,)) != []
    assert _blame(case, CellError([Failure((other,), "RuntimeError", "peer")]), (case.victim,)) != []
    assert _blame(case, None, (case.victim,)) != []


def test_a_work_fails_only_by_what_was_taken_from_it_and_says_so() -> None:
    from meshbook.errors import CellError, CellInterrupted, Failure, RankLost

    full = CellError([Failure((0,), "OSError", "[Errno 28] No space left on device")])
    assert _blame(_case("full disk", "files"), full) == []
    assert _blame(_case("full disk", "files"), CellError([Failure((0,), "KeyError", "x")])) != []
    assert _blame(_case("full disk", "files"), RankLost("No space left", ranks=[0])) == ["no rank has ended"]
    assert _blame(_case("full disk", "loop"), full) != []
    assert _blame(_case("freeze", "loop"), CellInterrupted([])) != []
    assert _blame(_case("interrupt storm", "loop"), CellInterrupted([])) == []
    assert _blame(_case("interrupt storm", "loop"), full) != []


def test_a_process_that_is_new_or_has_gone_is_a_leak_unless_it_was_to() -> None:
    before = Remains({1: "supervisor", 2: "rank"}, frozenset({"a"}), {1: 10, 2: 10})
    after = Remains({1: "supervisor", 3: "rank"}, frozenset({"a", "b"}), {1: 10 + checks.FD_SLACK + 1, 3: 10})
    assert checks._leaks(after, before, {3}, {2}) == [
        "b",
        f"process 1 has {10 + checks.FD_SLACK + 1} open files, and had 10",
    ]
    assert checks._leaks(before, before, (), ()) == []
    assert checks._leaks(before, before, (), {2}) == ["process 2 was to end: rank"]
    assert checks._leaks(after, before, (), ())[:2] == ["process 3 is new: rank", "process 2 has ended: rank"]


def test_a_process_that_ends_as_it_is_looked_at_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checks._comes_and_goes(os.getpid())
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: [])  # its memory is gone, and it is no zombie yet
    assert checks._comes_and_goes(os.getpid())


def test_a_case_is_told_with_its_times_and_its_problems() -> None:
    case = draw_case(SEED, 3)
    good = Result(case, "healed", 0.01, 0.02, 0.5, 1.0)
    bad = Result(case, problems=[Problem("hang", "stuck"), Problem("leak", "a process")])
    assert "healed (named 0.01 s, unblocked 0.02 s, healed 0.50 s" in describe(good)
    assert "HANG: stuck\n  LEAK: a process" in describe(bad)
