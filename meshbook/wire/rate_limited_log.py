"""A rate-limited log of rejected messages from unauthenticated or broken peers."""

from __future__ import annotations

import logging

from meshbook.clock import Clock, SystemClock

_BURST_LINES = 10  # lines that are logged one by one
_INTERVAL_S = 60.0  # seconds; later ones are counted, and logged as a number


class RateLimitedLog:
    """Logs rejected messages at a bounded rate: for 100,000 bad frames, the log gets a dozen lines."""

    def __init__(self, log: logging.Logger, *, clock: Clock | None = None) -> None:
        self._log, self._clock = log, clock or SystemClock()
        self._burst_left = _BURST_LINES
        self._num_suppressed = 0
        self._next_line_at = 0.0

    def warning(self, text: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        now = self._clock.monotonic()
        if now >= self._next_line_at and self._num_suppressed:
            self._log.warning("%d more messages were refused meanwhile", self._num_suppressed)
            self._num_suppressed, self._burst_left = 0, 1
        if not self._burst_left:
            self._num_suppressed += 1
            return
        self._burst_left -= 1
        self._next_line_at = now + _INTERVAL_S
        self._log.warning(text, *arguments)
