"""The time that counts for timeouts."""

from __future__ import annotations

from meshbook.rank.process_groups.prompt_clock import PromptClock


def test_the_clock_stands_still_while_a_prompt_is_open() -> None:
    seconds = 10.0
    clock = PromptClock(lambda: seconds)
    assert clock.now() == 10.0
    clock.hold(True)
    seconds = 500.0
    clock.hold(True)  # another prompt
    assert clock.now() == 10.0
    clock.hold(False)
    seconds = 503.0
    assert clock.now() == 13.0
    clock.hold(False)
    assert clock.now() == 13.0
