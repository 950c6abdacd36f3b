"""What a press of the Stop button means: a new interrupt, a repeat of the last one, or an order to kill. Pure.

A Stop reaches a notebook twice, as a message and as a SIGINT, in either order. `wire.stop_timing` has the times.
"""

from __future__ import annotations

from typing import Literal

from meshbook.wire import stop_timing

_NEVER = float("-inf")


class StopPresses:
    """The presses of Stop in one session. Times are seconds of any clock that only goes forward."""

    def __init__(self) -> None:
        self._call: str | None = None  # the call that the last press interrupted
        self._at = _NEVER  # the last press
        self._killed_at: float | None = None  # the press that ordered to kill the foreground call's ranks
        self._sigint_expected_until = _NEVER

    def press(self, call: str, now: float, *, may_escalate: bool = True) -> Literal["interrupt", "kill", "repeat"]:
        """Decide what a press means for this foreground call.

        Args:
            may_escalate: False: it is never an order to kill.
        """
        since_last = now - self._at if self._call == call else float("inf")
        if since_last < stop_timing.INTERRUPT_DEBOUNCE_S:
            return "repeat"
        self._call, self._at = call, now
        if may_escalate and since_last < stop_timing.SECOND_INTERRUPT_S:
            self._killed_at = now
            return "kill"
        return "interrupt"

    def press_when_idle(self, now: float) -> Literal["kill", "repeat"]:
        """Decide what a press means for ranks that have not returned from the last one, without a foreground call."""
        if now - self._at < stop_timing.INTERRUPT_DEBOUNCE_S:
            return "repeat"
        self._at = now
        return "kill"

    def expect_sigint(self, now: float) -> None:
        """Record a press that came as a message: the same press also arrives as a SIGINT, now or soon."""
        self._sigint_expected_until = now + stop_timing.SECOND_INTERRUPT_S

    def is_new_sigint(self, now: float) -> bool:
        """Whether a SIGINT is a press of its own. At most one SIGINT belongs to a message."""
        expected, self._sigint_expected_until = now <= self._sigint_expected_until, _NEVER
        return not expected

    def was_interrupted(self, call: str) -> bool:
        """Whether the last press interrupted this call."""
        return self._call == call

    @property
    def interrupted_call(self) -> str | None:
        """The call that the last press interrupted; None: there was none."""
        return self._call

    def call_ended(self) -> None:
        """Record the end of the foreground call."""
        self._killed_at = None

    @property
    def is_killing(self) -> bool:
        """Whether the foreground call's ranks are being killed."""
        return self._killed_at is not None

    def has_given_up(self, now: float) -> bool:
        """Whether the foreground call's ranks should have been killed by now."""
        return self._killed_at is not None and now - self._killed_at > stop_timing.GIVE_UP_AFTER_S
