"""What clients hear of the end of a job that a mesh's machines belong to."""

from __future__ import annotations

import pytest

from meshbook.supervisor.allocation import Allocation
from meshbook.supervisor.effects import Effect, SetTimer
from meshbook.wire import messages
from tests.supervisor.test_state import messages_of, steps_of

HOUR = 3600.0


@pytest.fixture
def saved() -> list[str]:
    return []


@pytest.fixture
def allocation(saved: list[str]) -> Allocation:
    return Allocation(lambda: (0, 1), lambda: tuple(saved))


def timer(effects: list[Effect]) -> SetTimer:
    (found,) = steps_of(effects, SetTimer)
    return found


def warnings(allocation: Allocation, at: float) -> list[str]:
    effects = allocation.timer_fired(str(at))
    return [announced.text for announced in messages_of(effects, messages.MeshAnnounced)]


def test_clients_are_warned_once_some_minutes_before_the_end(allocation: Allocation, saved: list[str]) -> None:
    set_timer = timer(allocation.ends(2 * HOUR, HOUR))
    assert (set_timer.name, set_timer.delay_s) == ("allocation 7200.0", HOUR - 300.0)
    (text,) = warnings(allocation, 2 * HOUR)
    assert "comes to its time limit at " in text
    assert text.endswith("its ranks end; %mesh checkpoint PATH NAMES saves what ranks hold")
    assert warnings(allocation, 2 * HOUR) == []
    saved.append("model")
    allocation.ends(2 * HOUR + 60, 120.0)
    assert warnings(allocation, 2 * HOUR + 60) == [], "moved by a minute: that is no news"


def test_a_short_job_is_warned_of_at_once_with_what_will_be_saved(allocation: Allocation, saved: list[str]) -> None:
    saved += ["model", "opt"]
    assert timer(allocation.ends(60.0, 60.0)).delay_s == 0.0
    (text,) = warnings(allocation, 60.0)
    assert text.endswith("its ranks end; before, model, opt will be saved")


def test_an_end_that_was_moved_is_warned_of_at_its_new_time(allocation: Allocation) -> None:
    allocation.ends(HOUR, 60.0)
    assert len(warnings(allocation, HOUR)) == 1
    allocation.ends(9 * HOUR, 8 * HOUR)
    assert warnings(allocation, HOUR) == []
    assert len(warnings(allocation, 9 * HOUR)) == 1
    assert allocation.ends(None, 0.0) == []
    assert warnings(allocation, 9 * HOUR) == []
