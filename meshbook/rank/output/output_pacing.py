"""When a rank sends its output: in batches, and no faster than a front end can show it. Pure; times are passed in."""

from __future__ import annotations

# How long output is batched before it is sent: not noticeable to a reader, but longer than print() takes for its parts.
BATCH_S = 0.03

# Output limit of one rank: a burst, then a rate per second. Beyond it the buffer in `capture` fills, and its middle is
# dropped with a notice. 512 KiB/s from each of several ranks already exceeds a front end's own limit (1 MB/s), and far
# exceeds what anyone reads.
BURST_BYTES = 2 << 20
BYTES_PER_S = 512 << 10


class OutputPacer:
    """Schedules the sending of output within a token bucket.

    Attributes:
        deadline: when `flush_due` is to be called; None if there is nothing to send.
    """

    def __init__(self, now: float) -> None:
        self.deadline: float | None = None
        self._budget = float(BURST_BYTES)
        self._updated_at = now

    def output_ready(self, now: float, delay_s: float = BATCH_S) -> float | None:
        """Return in how many seconds to call `flush_due`; None if that is already scheduled."""
        if self.deadline is not None:
            return None
        self.deadline = now + delay_s
        return delay_s

    def flush_due(self, now: float) -> float | None:
        """Return None if output may be sent now, else in how many seconds to call this again."""
        self.deadline = None
        self._budget = min(BURST_BYTES, self._budget + (now - self._updated_at) * BYTES_PER_S)
        self._updated_at = now
        return None if self._budget > 0 else self.output_ready(now, 4 * BATCH_S)

    def sent(self, num_bytes: int) -> None:
        self._budget -= num_bytes
