"""What was omitted from the output, and the notice that says so."""

from __future__ import annotations

from meshbook.ids import Ranks, name_ranks
from meshbook.wire.messages import Notice


class Truncation:
    """A gap in the output, with counts of what is missing."""

    __slots__ = ("num_chars", "num_displays", "num_lines", "ranks")

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_displays = 0
        self.num_chars = 0  # for most text, bytes
        self.ranks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.num_lines or self.num_displays)

    def add(self, ranks: Ranks, num_chars: int, num_lines: int = 1) -> None:
        self.ranks.update(ranks)
        self.num_lines += num_lines
        self.num_chars += num_chars

    def add_display(self, ranks: Ranks, num_chars: int) -> None:
        self.ranks.update(ranks)
        self.num_displays += 1
        self.num_chars += num_chars

    def merge(self, other: Truncation) -> None:
        """Add the counts of another gap to this one."""
        self.ranks |= other.ranks
        self.num_lines += other.num_lines
        self.num_displays += other.num_displays
        self.num_chars += other.num_chars

    def describe(self) -> str:
        """Return `12,345 lines (8.1 MB) from rank 3`."""
        what = [
            f"{count:,} {word}{'' if count == 1 else 's'}"
            for count, word in ((self.num_lines, "line"), (self.num_displays, "display"))
            if count
        ]
        whose = f" from {name_ranks(self.ranks)}" if self.ranks else ""
        return f"{' and '.join(what)} ({_format_size(self.num_chars)}){whose}"

    def notice(self) -> Notice:
        """Return `… 12,345 lines (8.1 MB) from rank 3 not shown; %mesh logs 3 shows the last of them`."""
        where = f"; %mesh logs {min(self.ranks, default=0)} shows the last of them" if self.num_lines else ""
        return Notice(f"… {self.describe()} not shown{where}")


def _format_size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} B"
    power, unit = next((one for one in ((1, "kB"), (2, "MB")) if num_bytes < 999.95 * 1000 ** one[0]), (3, "GB"))
    return f"{num_bytes / 1000**power:,.1f} {unit}"
