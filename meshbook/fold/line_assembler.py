"""Split a stream into lines: partial lines are joined, progress bars reduced to their current state.

A `LineAssembler` handles one stream of one rank. It buffers the line in progress and returns completed lines. It
emulates as much of a terminal as progress bars use: carriage return, backspace, erase-line, and cursor-up for nested
bars; a rewritten row replaces its former content. A finished bar stays among the open rows until other text follows, as
only then the cursor cannot return to it. While the cursor is hidden, as `rich.live` does, all rows stay open.
"""

from __future__ import annotations

import re

# Characters that the folding code uses as markers. Text has no use for them.
RESERVED_CHARS = "\0\1\2\3\4"
# A longer line is truncated in the middle.
MAX_LINE_CHARS = 1 << 16
# Nested bars are a handful; cursor movement beyond this many rows is ignored.
MAX_OPEN_ROWS = 64
# Finished bars that are retained, so that bars nested one level deeper than this are still assembled.
MAX_ENDED_BARS = 3

_RESERVED = re.compile(f"[{RESERVED_CHARS}]")
_CURSOR_MOVES = re.compile(r"\x1b\[(?:[0-9]{0,3}A|\?25[hl])")
_ROW_ENDS = re.compile(rf"(\n|{_CURSOR_MOVES.pattern})")
_CURSOR_UP = re.compile(r"\x1b\[[0-9]{0,3}A")
_CURSOR_HIDDEN, _CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"
_ERASE = re.compile(r"\x1b\[[0-3]?K")


class LineAssembler:
    """Assembles the lines of one stream of one rank.

    Attributes:
        open_since: when the row in progress got its first character; None if there is no such row.
        changed: whether the open rows changed since this was last set to False.
    """

    __slots__ = (
        "_hides_cursor",
        "_is_overwritten",
        "_num_skipped",
        "_row",
        "_rows_above",
        "_rows_below",
        "changed",
        "open_since",
    )

    def __init__(self) -> None:
        self._row = ""  # text since the last carriage return that something followed
        self._is_overwritten = False  # something in it followed a carriage return: a progress bar
        self._hides_cursor = False
        self._num_skipped = 0  # characters already cut from a row that grew too long
        # Rows around the cursor's row: finished bars, and rows of nested bars.
        self._rows_above: list[str] = []
        self._rows_below: list[str] = []
        self.open_since: float | None = None
        self.changed = False

    def write(self, text: str, now: float) -> list[str]:
        """Append text and return the lines that it completes, in order, without line ends."""
        for character in RESERVED_CHARS:
            if character in text:
                text = _RESERVED.sub("\N{REPLACEMENT CHARACTER}", text)
                break
        text = text.replace("\r\n", "\n")
        self.changed = True
        has_cursor_moves = "\r" in text or "\b" in text or ("\x1b[" in text and _CURSOR_MOVES.search(text))
        if has_cursor_moves or self._is_drawn_over():
            lines = self._write_rows(text)
        elif "\n" in text:
            long = len(self._row) + len(text) > MAX_LINE_CHARS
            lines = (self._row + text).split("\n")
            self._row = lines.pop()
            if self._num_skipped or long:
                lines = [self._finish_line(lines[0]), *map(shorten, lines[1:])]
        else:
            self._row += text
            lines = []
        if len(self._row) > 2 * MAX_LINE_CHARS:
            self._truncate_row()
        if not self._row and not self._rows_above and not self._rows_below:
            self.open_since = None
        elif self.open_since is None or lines:
            self.open_since = now
        return lines

    def _is_drawn_over(self) -> bool:
        """Whether open rows have been, or can be, rewritten."""
        is_overwritten = self._is_overwritten or self._row.endswith("\r")
        return bool(is_overwritten or self._rows_above or self._rows_below or self._hides_cursor)

    @property
    def is_progress_bar(self) -> bool:
        """Whether the row in progress is rewritten in place, and so continues below other output."""
        return bool(
            (self._row and self._is_overwritten) or self._rows_below or (self._hides_cursor and self._rows_above)
        )

    def render(self) -> str:
        """Return what the open rows show now. Nested bars are several rows, joined by line ends."""
        rows = [*self._rows_above, shorten(self._rendered_row(), self._num_skipped), *self._rows_below]
        return "\n".join(row for row in rows if row)

    def finish(self) -> list[str]:
        """Return the open rows as lines, without trailing blank ones, and reset the state."""
        rows = [
            *self._rows_above,
            *(row for row in (self._finish_line(self._rendered_row()), *self._rows_below) if row),
        ]
        self._row, self._is_overwritten, self._rows_above, self._rows_below = "", False, [], []
        self._hides_cursor = False
        self.open_since, self.changed = None, False
        return rows

    def _write_rows(self, text: str) -> list[str]:
        """Process text with cursor movement, row by row (slow path)."""
        lines: list[str] = []
        for piece in _ROW_ENDS.split(text):
            if piece == "\n":
                if self._rows_below:
                    self._rows_above.append(self._rendered_row())
                    self._row = self._rows_below.pop(0) + "\r"
                    continue
                row = self._finish_line(self._rendered_row())
                if self._is_overwritten or self._hides_cursor:
                    self._rows_above.append(row)
                    num_kept = MAX_OPEN_ROWS if self._hides_cursor else MAX_ENDED_BARS
                    lines += self._rows_above[:-num_kept]
                    del self._rows_above[:-num_kept]
                else:
                    lines += *self._rows_above, row
                    self._rows_above = []
                self._row, self._is_overwritten = "", False
            elif _CURSOR_UP.fullmatch(piece):
                max_rows_up = min(len(self._rows_above) + len(lines), MAX_OPEN_ROWS - len(self._rows_below))
                for _ in range(min(int(piece[2:-1] or 1), max_rows_up)):
                    self._rows_below.insert(0, self._rendered_row())
                    # A line that this same text completed is reopened; one already returned is final.
                    self._row = (self._rows_above or lines).pop() + "\r"
                    self._is_overwritten = True
            elif piece in (_CURSOR_HIDDEN, _CURSOR_SHOWN):
                self._hides_cursor = piece == _CURSOR_HIDDEN
                if not any(self._rows_below):
                    self._rows_below = []
            elif piece:
                if not self._row and not self._rows_below and not self._hides_cursor and "\r" not in piece:
                    lines += self._rows_above
                    self._rows_above = []
                row = self._row + piece
                self._is_overwritten = self._is_overwritten or "\r" in row.rstrip("\r")
                self._row = _apply_backspaces(_after_last_return(row))
        return lines

    def _rendered_row(self) -> str:
        row = render_row(self._row)
        return row.rstrip(" ") if self._is_overwritten else row  # bars pad with spaces to cover the text they replace

    def _finish_line(self, line: str) -> str:
        """Return a line's final form, with a note on what was cut while it grew."""
        skipped, self._num_skipped = self._num_skipped, 0
        return shorten(line, skipped)

    def _truncate_row(self) -> None:
        half = MAX_LINE_CHARS // 2
        self._num_skipped += len(self._row) - 2 * half
        self._row = self._row[:half] + self._row[-half:]


def render_row(row: str) -> str:
    """Return what a row shows after all text was written to it.

    Text after a carriage return replaces the row. A terminal would keep the end of a longer earlier text, which nobody
    intends.
    """
    if "\r" in row:
        row = _after_last_return(row).removesuffix("\r")
    return _ERASE.sub("", row) if "\x1b[" in row else row


def shorten(line: str, num_skipped: int = 0) -> str:
    """Shorten a line in the middle if it is very long, or if `num_skipped` characters are missing there already."""
    if len(line) <= MAX_LINE_CHARS and not num_skipped:
        return line
    half = min(MAX_LINE_CHARS, len(line)) // 2
    num_skipped += len(line) - 2 * half
    return f"{line[:half]} … {num_skipped:,} characters not shown … {line[-half:]}"


def _apply_backspaces(row: str) -> str:
    if "\b" not in row:
        return row
    characters: list[str] = []
    for character in row:
        if character != "\b":
            characters.append(character)
        elif characters:
            characters.pop()
    return "".join(characters)


def _after_last_return(row: str) -> str:
    """Return the relevant part of a row: the text after the last carriage return, or the text it will replace."""
    before, returned, last = row.rpartition("\r")
    if last or not returned:
        return last
    return before.rstrip("\r").rpartition("\r")[2] + "\r"
