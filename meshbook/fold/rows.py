"""What a stream writes, made into lines: partial lines joined, progress bars brought to their state.

A `Pen` is one stream of one rank. It keeps the line that is still being written and gives back the lines that are
complete. It knows as much of a terminal as progress bars use: carriage return, backspace, erase-line, and cursor-up for
nested bars; a row that is rewritten replaces what was in it. A bar that ended stays with the open rows until other text
follows, since only then it is clear that nobody will go back up to it.
"""

from __future__ import annotations

import re

# Characters that the folding code uses for itself. No text has a use for them.
CONTROL = "\0\1\2\3\4"
# A line longer than this is cut in the middle.
MAX_LINE_CHARS = 1 << 16
# Nested bars are some handful; a stream that moves up further than this is not followed.
MAX_OPEN_ROWS = 64
# Bars that ended and are kept for a while: bars nested one deeper than this are still put together.
MAX_ENDED_BARS = 3

_CONTROL = re.compile(f"[{CONTROL}]")
_MOVES = re.compile(r"(\n|\x1b\[[0-9]{0,3}A)")
_CURSOR_UP = re.compile(r"\x1b\[[0-9]{0,3}A")
_ERASE = re.compile(r"\x1b\[[0-3]?K")


class Pen:
    """One stream of one rank, on its way to lines.

    Attributes:
        since: when the row that is being written got its first character; None while there is no such row.
        changed: whether the open rows changed since this was last set to False.
    """

    __slots__ = ("_above", "_below", "_returned", "_row", "_skipped", "changed", "since")

    def __init__(self) -> None:
        self._row = ""  # as written since its last carriage return that something followed
        self._returned = False  # something in it followed a carriage return: a progress bar
        self._skipped = 0  # characters already cut out of a row that grew too long
        # Rows around the one with the cursor: bars that ended, and nested bars' rows.
        self._above: list[str] = []
        self._below: list[str] = []
        self.since: float | None = None
        self.changed = False

    def write(self, text: str, now: float) -> list[str]:
        """Take a piece of text; give the lines that are complete with it, in order, without their ends."""
        for character in CONTROL:
            if character in text:
                text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
                break
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
        self.changed = True
        moves = self._above or self._below or ("\x1b[" in text and _CURSOR_UP.search(text))
        returned = self._returned or self._row.endswith("\r")
        if moves or returned or "\r" in text or "\b" in text:
            lines = self._write_rows(text)
        elif "\n" in text:
            long = len(self._row) + len(text) > MAX_LINE_CHARS
            lines = (self._row + text).split("\n")
            self._row = lines.pop()
            if self._skipped or long:
                lines = [self._complete(lines[0]), *map(shorten, lines[1:])]
        else:
            self._row += text
            lines = []
        if len(self._row) > 2 * MAX_LINE_CHARS:
            self._cut_row()
        if not self._row and not self._above and not self._below:
            self.since = None
        elif self.since is None or lines:
            self.since = now
        return lines

    @property
    def is_bar(self) -> bool:
        """Whether what is being written is rewritten in place, and goes on below what else is shown."""
        return bool((self._row and self._returned) or self._below)

    def state(self) -> str:
        """What the open rows show now. Nested bars are several rows, joined by line ends."""
        rows = [*self._above, shorten(self._settled(), self._skipped), *self._below]
        return "\n".join(row for row in rows if row)

    def finish(self) -> list[str]:
        """The open rows as lines, blank ones at the end left out. The pen starts anew."""
        rows = [*self._above, *(row for row in (self._complete(self._settled()), *self._below) if row)]
        self._row, self._returned, self._above, self._below = "", False, [], []
        self.since, self.changed = None, False
        return rows

    def _write_rows(self, text: str) -> list[str]:
        """The slow way: a row at a time, with the cursor."""
        lines: list[str] = []
        for piece in _MOVES.split(text):
            if piece == "\n":
                if self._below:
                    self._above.append(self._settled())
                    self._row = self._below.pop(0) + "\r"
                    continue
                row = self._complete(self._settled())
                if self._returned:
                    self._above.append(row)
                    lines += self._above[:-MAX_ENDED_BARS]
                    del self._above[:-MAX_ENDED_BARS]
                else:
                    lines += *self._above, row
                    self._above = []
                self._row, self._returned = "", False
            elif _CURSOR_UP.fullmatch(piece):
                room = min(len(self._above) + len(lines), MAX_OPEN_ROWS - len(self._below))
                for _ in range(min(int(piece[2:-1] or 1), room)):
                    self._below.insert(0, self._settled())
                    # A line that this same piece of text completed is taken back; one that is given away stays.
                    self._row = (self._above or lines).pop() + "\r"
                    self._returned = True
            elif piece:
                if not self._row and not self._below and "\r" not in piece:
                    lines += self._above
                    self._above = []
                row = self._row + piece
                self._returned = self._returned or "\r" in row.rstrip("\r")
                self._row = _rub_out(_latest(row))
        return lines

    def _settled(self) -> str:
        row = settle(self._row)
        return row.rstrip(" ") if self._returned else row  # bars pad with spaces against what they replace

    def _complete(self, line: str) -> str:
        """A line's final form, with what was cut out of it while it grew."""
        skipped, self._skipped = self._skipped, 0
        return shorten(line, skipped)

    def _cut_row(self) -> None:
        half = MAX_LINE_CHARS // 2
        self._skipped += len(self._row) - 2 * half
        self._row = self._row[:half] + self._row[-half:]


def settle(row: str) -> str:
    """What a row shows once all that was written to it is there.

    Whatever follows a carriage return replaces the row. A terminal would leave the end of a longer earlier text
    standing; nobody means that.
    """
    if "\r" in row:
        row = _latest(row).removesuffix("\r")
    return _ERASE.sub("", row) if "\x1b[" in row else row


def shorten(line: str, skipped: int = 0) -> str:
    """A line cut in the middle, if it is very long or `skipped` characters are missing there already."""
    if len(line) <= MAX_LINE_CHARS and not skipped:
        return line
    half = min(MAX_LINE_CHARS, len(line)) // 2
    skipped += len(line) - 2 * half
    return f"{line[:half]} … {skipped:,} characters not shown … {line[-half:]}"


def _rub_out(row: str) -> str:
    if "\b" not in row:
        return row
    kept: list[str] = []
    for character in row:
        if character != "\b":
            kept.append(character)
        elif kept:
            kept.pop()
    return "".join(kept)


def _latest(row: str) -> str:
    """The part of a row that counts: what follows the last carriage return, or what the last one waits to replace."""
    before, returned, last = row.rpartition("\r")
    if last or not returned:
        return last
    return before.rstrip("\r").rpartition("\r")[2] + "\r"
