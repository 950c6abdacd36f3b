"""Progress bars of ranks under a cell: one display that is updated."""

from __future__ import annotations

import re
import secrets

from meshbook.fold import rendering
from meshbook.fold.entries import without_ranks
from meshbook.ids import Ranks
from meshbook.wire.messages import Line

_NUMBER = re.compile(r"\d[\d.,]*")


class ProgressBlock:
    """Progress bars of one call: a block of lines, each at a fixed position until the last one is finished."""

    def __init__(self) -> None:
        self.changed = False
        self.retained_last = False  # whether the last applied line stays in the block
        self._lines: list[Line] = []
        self._finished: list[Line] = []  # of a block that is complete
        self._display_id: str | None = None  # display id of the block; None: not shown yet

    def has_live_line(self, line: Line) -> bool:
        """Whether a finished line replaces a live one."""
        return any(
            other.live and other.stream == line.stream and not set(other.ranks).isdisjoint(line.ranks)
            for other in self._lines
        )

    def apply(self, line: Line) -> None:
        """Apply a line to the block.

        A live line replaces its ranks' previous one; a finished one stays in place if it ends that line.
        """
        updated_ranks = set(line.ranks)
        self.retained_last = False
        lines: list[Line] = []
        placed = False
        for other in self._lines:
            if not other.live or other.stream != line.stream or updated_ranks.isdisjoint(other.ranks):
                lines.append(other)
                continue
            same = line.live or _is_end_of(other.text, line.text)
            if not placed and same and line.text:
                lines.append(line)
                placed = True
            if (remaining := without_ranks(other, updated_ranks)) is not None:
                lines.append(remaining)
        if line.live and line.text and not placed:
            lines.append(line)
            placed = True
        self.retained_last = placed and not line.live
        self.changed = self.changed or lines != self._lines
        self._lines = lines

    def discard_ranks(self, ranks: set[int]) -> None:
        self._lines = [remaining for line in self._lines if (remaining := without_ranks(line, ranks)) is not None]

    def take_finished(self) -> list[Line]:
        """Return the lines of a block that is complete."""
        finished, self._finished = self._finished, []
        return finished

    def display_cleared(self) -> None:
        """Redraw the remaining lines as a new display: the old one was cleared."""
        self._display_id = None
        self.changed = bool(self._lines)

    def render(self, ranks: Ranks) -> tuple[str, str, str]:
        """Return the message that shows the block's state: its type, the display id, the text.

        A block without live lines is complete; the next line begins another.
        """
        kind = "display_data" if self._display_id is None else "update_display_data"
        name = self._display_id or f"meshbook-{secrets.token_hex(8)}"
        # The last updated line must not move up: live lines are in rank order, at the positions of live lines.
        live = iter(sorted((line for line in self._lines if line.live), key=lambda line: line.ranks))
        lines = [next(live) if line.live else line for line in self._lines]
        text = "\n".join(rendering.render_line(line, ranks) for line in lines)
        self.changed = False
        self._display_id = name
        if not any(line.live for line in self._lines):
            self._finished, self._lines, self._display_id = self._lines, [], None
        return kind, name, text


def _is_end_of(live: str, finished: str) -> bool:
    """Whether a finished line is the last state of the live one, and not other output of its rank.

    A live line of nested bars has several rows.
    """
    return any(_same_up_to_number(row, finished) for row in live.split("\n"))


def _same_up_to_number(row: str, finished: str) -> bool:
    """Whether two rows match up to the first number and one character behind it, as two states of one bar do."""
    numbers = _NUMBER.search(row), _NUMBER.search(finished)
    if numbers[0] is None or numbers[1] is None:
        return bool(row.strip()) and finished.startswith(row.rstrip())
    (head, tail), (other_head, other_tail) = (
        (text[: number.start()].strip(), text[number.end() : number.end() + 1])
        for text, number in zip((row, finished), numbers, strict=True)
        if number is not None
    )
    return head == other_head and tail == other_tail
