"""What strangers and broken peers send, told in the log and never more often than anybody reads."""

from __future__ import annotations

import logging

from meshbook.clock import Clock, SystemClock

_AT_ONCE = 10  # lines told one by one
_THEN_EVERY_S = 60.0  # seconds; later ones are counted, and told as a number


class Refusals:
    """A bounded teller of refused messages: a peer may send 100,000 bad frames, and the log gets a dozen lines."""

    def __init__(self, log: logging.Logger, *, clock: Clock | None = None) -> None:
        self._log, self._clock = log, clock or SystemClock()
        self._left = _AT_ONCE
        self._num_untold = 0
        self._next_at = 0.0

    def tell(self, text: str, *arguments: object) -> None:
        """Log it as a warning, or count it."""
        now = self._clock.monotonic()
        if now >= self._next_at and self._num_untold:
            self._log.warning("%d more messages were refused meanwhile", self._num_untold)
            self._num_untold, self._left = 0, 1
        if not self._left:
            self._num_untold += 1
            return
        self._left -= 1
        self._next_at = now + _THEN_EVERY_S
        self._log.warning(text, *arguments)
