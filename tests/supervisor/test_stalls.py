"""Cells that stand still are noticed, and those that compute are left alone. Seconds pass as they are counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from meshbook.supervisor.stalls import STALL_S, Beat, CollectiveWait, StallDetector

RANKS = (0, 1, 2)


def beats(stalls: StallDetector, seconds: range, pulse_of: Callable[[int, int], dict[str, Any] | None]) -> int | None:
    """Let every rank beat once per second; when somebody was asked to look first, or None."""
    for now in seconds:
        for rank in RANKS:
            reported = pulse_of(rank, now)
            if reported is not None:
                still = {"line": 3, "num_collectives": 4, "num_steps": 0, "cpu_percent": 1}
                wait = reported.pop("wait", None)
                stalls.heartbeat(Beat(rank=rank, **{**still, **reported}), wait, float(now))
        if stalls.start_due_probes(float(now)):
            return now
    return None


def begun() -> StallDetector:
    stalls = StallDetector()
    stalls.call_began("c1", RANKS, 0.0)
    return stalls


def test_ranks_that_all_stand_still_are_looked_at_in_time() -> None:
    looked_at = beats(begun(), range(1, 60), lambda rank, now: {})
    assert looked_at is not None
    # Beats are up to 2 s old, the second look comes 2 s later, each takes up to 2.5 s: an answer within 15 s.
    assert STALL_S <= looked_at <= 10


@pytest.mark.parametrize(
    ("what", "pulse_of"),
    [
        ("collectives are begun", lambda rank, now: {"num_collectives": now // 5}),
        ("one rank logs", lambda rank, now: {"num_steps": now // 6 if rank == 1 else 0}),
        ("new lines are reached", lambda rank, now: {"line": now // 6 if rank == 1 else 3}),
        ("it asks for input()", lambda rank, now: {"awaiting_input": rank == 2}),
        ("all ranks compute", lambda rank, now: {"cpu_percent": 60}),
    ],
)
def test_a_cell_is_left_alone_while(what: str, pulse_of: Callable[[int, int], dict[str, Any]]) -> None:
    assert beats(begun(), range(1, 50), pulse_of) is None


def test_output_is_progress() -> None:
    stalls = begun()
    for now in range(1, 50):
        if now % 6 == 0:
            stalls.call_printed("c1", (1,), float(now))
        assert beats(stalls, range(now, now + 1), lambda rank, now: {}) is None
    assert beats(stalls, range(50, 80), lambda rank, now: {}) is not None


def test_a_loop_that_goes_round_the_same_lines_is_no_progress() -> None:
    looked_at = beats(begun(), range(1, 60), lambda rank, now: {"line": 3 + now % 3 if rank == 1 else 3})
    assert looked_at is not None
    assert looked_at <= 12


def test_ranks_that_wait_for_a_busy_one_are_looked_at() -> None:
    def pulse_of(rank: int, now: int) -> dict[str, Any]:
        if rank == 2:  # computes, at ever new lines
            return {"cpu_percent": 100, "line": now}
        return {"wait": CollectiveWait(RANKS, float(now)), "cpu_percent": 100}  # a GPU's wait is busy as well

    assert beats(begun(), range(1, 60), pulse_of) == pytest.approx(STALL_S, abs=1)


def test_a_rank_that_is_not_heard_of_any_more_is_looked_at_though_others_move() -> None:
    def pulse_of(rank: int, now: int) -> dict[str, Any]:
        return {"age_s": now} if rank == 0 else {"num_collectives": now, "line": now}

    assert beats(begun(), range(1, 60), pulse_of) == pytest.approx(STALL_S, abs=1)


def test_all_ranks_at_one_line_of_arithmetic_are_looked_at_after_a_minute() -> None:
    looked_at = beats(begun(), range(1, 200), lambda rank, now: {"cpu_percent": 100})
    assert looked_at is not None
    assert 60 <= looked_at <= 62


def test_ranks_that_are_done_are_not_waited_for() -> None:
    stalls = begun()
    stalls.ranks_finished("c1", RANKS)
    assert beats(stalls, range(6, 60), lambda rank, now: {}) is None
    stalls.call_began("c2", RANKS, 60.0)
    stalls.call_ended("c2")
    assert beats(stalls, range(61, 120), lambda rank, now: {}) is None


def test_the_user_is_told_once_and_once_more_what_is_certain() -> None:
    stalls = begun()
    first = beats(stalls, range(1, 60), lambda rank, now: {})
    assert first is not None
    assert stalls.may_report("c1", is_certain=False)
    stalls.probe_ended("c1", is_reported=True, is_certain=False, now=float(first))
    assert not stalls.may_report("c1", is_certain=False)
    again = beats(stalls, range(first + 1, 120), lambda rank, now: {})
    assert again is not None
    assert again >= first + 15
    assert stalls.may_report("c1", is_certain=True)
    stalls.probe_ended("c1", is_reported=True, is_certain=True, now=float(again))
    assert not stalls.may_report("c1", is_certain=True)
    assert beats(stalls, range(again + 1, again + 500), lambda rank, now: {}) is None


def test_a_cell_in_which_nothing_is_found_is_looked_at_ever_more_rarely_and_then_no_more() -> None:
    stalls, looks, now = begun(), [], 1
    while (at := beats(stalls, range(now, now + 3_000), lambda rank, now: {})) is not None:
        looks.append(at)
        stalls.probe_ended("c1", is_reported=False, is_certain=False, now=float(at))
        now = at + 1
    waits = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert waits == sorted(waits)
    assert len(looks) == 6


def test_it_can_be_switched_off() -> None:
    stalls = StallDetector(stall_s=0.0)
    stalls.call_began("c1", RANKS, 0.0)
    assert beats(stalls, range(1, 500), lambda rank, now: {}) is None
