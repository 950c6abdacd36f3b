"""The latest cells that a mesh has run, bounded in number and in bytes.

So the reply to a history query fits a message, and a mesh may run for months.
"""

from __future__ import annotations

from collections import deque

import msgspec

from meshbook.wire.messages import HistoryEntry

MAX_ENTRIES = 10_000
MAX_CHARS = 16 << 20  # of all sources together
MAX_SOURCE_CHARS = 1 << 20  # of one source: longer ones are data


class History:
    """History entries, oldest first."""

    def __init__(
        self,
        *,
        max_entries: int = MAX_ENTRIES,
        max_chars: int = MAX_CHARS,
        max_source_chars: int = MAX_SOURCE_CHARS,
    ) -> None:
        self._entries: deque[HistoryEntry] = deque()
        self._num_chars = 0
        self._max_entries, self._max_chars, self._max_source_chars = max_entries, max_chars, max_source_chars

    def add(self, entry: HistoryEntry) -> HistoryEntry:
        """Add a cell that begins; return the stored entry, in which a very long source is truncated."""
        length = len(entry.source)
        if length > self._max_source_chars:
            cut = f"{entry.source[: self._max_source_chars]}\n# ... {length:,} characters in all"
            entry = msgspec.structs.replace(entry, source=cut)
        self._entries.append(entry)
        self._num_chars += len(entry.source)
        while len(self._entries) > self._max_entries or (self._num_chars > self._max_chars and len(self._entries) > 1):
            self._num_chars -= len(self._entries.popleft().source)
        return entry

    def finish(self, entry: HistoryEntry, *, seconds: float, status: str) -> None:
        """Record how a cell ended, if its entry is still stored."""
        for index in range(len(self._entries) - 1, -1, -1):
            if self._entries[index] is entry:
                self._entries[index] = msgspec.structs.replace(entry, seconds=seconds, status=status)
                return

    def entries(self) -> tuple[HistoryEntry, ...]:
        return tuple(self._entries)
