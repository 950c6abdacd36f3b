"""What a press of Stop means, by when it comes."""

from __future__ import annotations

import pytest

from meshbook.controller.stop_presses import StopPresses
from meshbook.wire.stop_timing import GIVE_UP_AFTER_S, INTERRUPT_DEBOUNCE_S, SECOND_INTERRUPT_S


@pytest.fixture
def presses() -> StopPresses:
    return StopPresses()


def test_a_second_press_of_the_same_call_kills_and_one_that_comes_at_once_is_a_repeat(presses: StopPresses) -> None:
    assert presses.press("call", 100.0) == "interrupt"
    assert presses.press("call", 100.0 + INTERRUPT_DEBOUNCE_S / 2) == "repeat"
    assert presses.press("call", 101.0) == "kill"
    assert presses.was_interrupted("call")


def test_a_press_long_after_the_first_is_a_first_one_again(presses: StopPresses) -> None:
    presses.press("call", 100.0)
    assert presses.press("call", 100.0 + SECOND_INTERRUPT_S) == "interrupt"


def test_a_press_of_another_call_does_not_kill(presses: StopPresses) -> None:
    presses.press("first", 100.0)
    assert presses.press("second", 100.1) == "interrupt"
    assert not presses.was_interrupted("first")


def test_a_press_that_may_not_escalate_interrupts_again(presses: StopPresses) -> None:
    presses.press("call", 100.0)
    assert presses.press("call", 101.0, may_escalate=False) == "interrupt"
    assert not presses.is_killing


def test_ranks_that_were_to_be_killed_are_given_up_in_time(presses: StopPresses) -> None:
    presses.press("call", 100.0)
    assert not presses.has_given_up(1000.0)  # nobody has ordered to kill them
    presses.press("call", 101.0)
    assert presses.is_killing
    assert not presses.has_given_up(101.0 + GIVE_UP_AFTER_S)
    assert presses.has_given_up(101.1 + GIVE_UP_AFTER_S)
    presses.call_ended()
    assert not presses.has_given_up(1000.0)


def test_a_press_without_a_call_kills_who_has_not_returned_from_the_last_one(presses: StopPresses) -> None:
    presses.press("call", 100.0)
    assert presses.press_when_idle(100.1) == "repeat"
    assert presses.press_when_idle(200.0) == "kill"
    assert presses.press_when_idle(200.1) == "repeat"


def test_one_sigint_belongs_to_a_press_that_came_as_a_message(presses: StopPresses) -> None:
    assert presses.is_new_sigint(99.0)
    presses.expect_sigint(100.0)
    assert not presses.is_new_sigint(100.1)
    assert presses.is_new_sigint(100.2)
    presses.expect_sigint(100.0)
    assert presses.is_new_sigint(100.1 + SECOND_INTERRUPT_S)  # so late that it is another press
