"""A flood of bad frames is a dozen lines in the log."""

from __future__ import annotations

import logging

import pytest

from meshbook.wire.rate_limited_log import RateLimitedLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def test_a_flood_of_bad_frames_is_told_in_a_few_lines_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RateLimitedLog(logging.getLogger("test.refusals"), clock=clock)
    for number in range(100_000):
        refusals.warning("message %d was refused", number)
    assert len(caplog.messages) == 10
    caplog.clear()
    clock.now += 61.0
    for number in range(100_000):
        refusals.warning("message %d was refused", number)
    assert caplog.messages == ["99990 more messages were refused meanwhile", "message 0 was refused"]


def test_a_refusal_now_and_then_is_told_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RateLimitedLog(logging.getLogger("test.refusals"), clock=clock)
    for _ in range(10):
        clock.now += 100.0
        refusals.warning("refused")
    assert caplog.messages == ["refused"] * 10
