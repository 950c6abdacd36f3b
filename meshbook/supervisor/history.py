"""The latest cells that a mesh has run, and the names that they bound. All of it is bounded.

So the reply to a history query fits a message, and a mesh may run for months.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from meshbook.ids import Ranks
from meshbook.wire.messages import HistoryEntry, OutcomeGroup, RunCell

MAX_ENTRIES = 10_000
MAX_CHARS = 16 << 20  # of all sources together
MAX_SOURCE_CHARS = 1 << 20  # of one source: longer ones are data
_MAX_SETUP_CELLS = 1000
_MAX_NAMES = 10_000  # that are reported to clients


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


class CellRecord:
    """What the cells of a mesh were, and what they left behind.

    Attributes:
        num_cells: how many were run.
        setup_cells: the cells to run again on ranks that join.
    """

    def __init__(self) -> None:
        self.history = History()
        self.num_cells = 0
        self.setup_cells: deque[RunCell] = deque(maxlen=_MAX_SETUP_CELLS)
        self._names: OrderedDict[str, None] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that calls have bound on the ranks, in order of appearance."""
        return tuple(self._names)

    def began(self, command: RunCell, at: float, *, whole_mesh: bool, by: str) -> HistoryEntry:
        """Record a cell that begins at `at`, wall clock.

        Args:
            whole_mesh: it runs on all ranks that there are.
            by: the kind of its client.
        """
        self.num_cells += 1
        if command.setup:
            self.setup_cells.append(command)
        entry = HistoryEntry(
            number=command.execution_count,
            label=command.label,
            source=command.source,
            ranks=command.ranks,
            started_at=at,
            seconds=None,
            status="running",
            setup=command.setup,
            whole_mesh=whole_mesh,
            call=command.call,
            by=by,
        )
        return self.history.add(entry)

    def acted(self, action: str, ranks: Ranks, by: str, at: float) -> None:
        """Record what a client did that is no cell, as the magic that does the same: `%mesh interrupt 0-1`."""
        entry = HistoryEntry(
            number=None, label=action, source=action, ranks=ranks, started_at=at, seconds=0.0, status="sent", by=by
        )
        self.history.add(entry)

    def ended(self, entry: HistoryEntry | None, parts: Iterable[OutcomeGroup], seconds: float) -> None:
        """Record how a call ended.

        Args:
            entry: of a cell; None: the call is none.
        """
        outcomes = [part.outcome for part in parts]
        for outcome in outcomes:
            self._names.update(dict.fromkeys(outcome.bound_names))
            for name in outcome.deleted_names:
                self._names.pop(name, None)
        while len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)
        if entry is not None:
            found = {outcome.status for outcome in outcomes}
            status = next((word for word in ("lost", "error", "interrupted", "ok") if word in found), "ok")
            self.history.finish(entry, seconds=seconds, status=status)
