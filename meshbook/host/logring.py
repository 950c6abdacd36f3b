"""The last output of a rank, stored on its host: for `%mesh logs`, and for the last lines of a dead rank."""

from __future__ import annotations

from collections import deque

MAX_CHARS = 1 << 20


class LogRing:
    """The newest text, at most `max_chars` characters."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._pieces: deque[str] = deque()
        self._num_chars = 0

    def append(self, text: str) -> None:
        self._pieces.append(text[-self._max_chars :])
        self._num_chars += len(self._pieces[-1])
        while self._num_chars > self._max_chars and len(self._pieces) > 1:
            self._num_chars -= len(self._pieces.popleft())

    def tail(self, max_chars: int) -> str:
        text = "".join(self._pieces)
        if len(text) <= max_chars:
            return text
        cut = text[-max_chars:]
        return cut[cut.find("\n") + 1 :]


def last_lines_of(text: str, count: int = 10) -> tuple[str, ...]:
    """Return the last non-empty lines; of a progress bar, its last state."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text[-(1 << 14) :].split("\n")]
    return tuple([line for line in lines if line][-count:])
