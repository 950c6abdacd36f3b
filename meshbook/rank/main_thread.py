"""Where the main thread of this process is, read from other threads while it runs."""

from __future__ import annotations

import sys
from types import FrameType

from meshbook.clock import sleep

# Number of samples, and seconds between them, to detect whether the main thread moves.
_PROGRESS_SAMPLES, _PROGRESS_SAMPLE_S = 5, 0.002


class MainThreadProbe:
    """Reads the frames of the thread that runs cells."""

    def __init__(self, ident: int) -> None:
        self.ident = ident

    def has_moved(self) -> bool:
        """Whether the thread is at another instruction some moments later. Blocks for 10 ms at most."""
        before = self._position()
        for _ in range(_PROGRESS_SAMPLES):
            sleep(_PROGRESS_SAMPLE_S)
            if self._position() != before:
                return True
        return False

    def line_in(self, filename: str | None) -> int | None:
        """Return the line of this file that the thread executes, ignoring called functions; None outside of it."""
        frame = None if filename is None else self._frame()
        while frame is not None:
            if frame.f_code.co_filename == filename:
                return frame.f_lineno
            frame = frame.f_back
        return None

    def _position(self) -> tuple[int, int]:
        frame = self._frame()
        return (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self.ident)
