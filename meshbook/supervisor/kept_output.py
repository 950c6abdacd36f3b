"""What cells printed and how they ended, kept for whoever was not there to see it. All of it is bounded.

The output of every cell is kept as it is sent to its client, whether there is one or not: what a client had received
and did not show any more is kept too. Of a progress bar only its present state is kept, of an updated display the last
version, and nothing of what was cleared. Where the limits are exceeded, displays go first, then the oldest lines; a
notice in their place says how much.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from meshbook.fold.entries import without_ranks
from meshbook.fold.truncation import Truncation
from meshbook.ids import CallId, Ranks, format_ranks
from meshbook.wire.messages import (
    CallFinished,
    ClearOutput,
    Display,
    FoldedItem,
    HistoryEntry,
    KeptCell,
    KeptItem,
    Line,
    NewOutput,
    Notice,
    OutcomeGroup,
    QueryNewOutput,
    RankDisplay,
)

MAX_CELLS = 1000
MAX_CELL_BYTES = 2 << 20  # of one cell: some 5,000 lines, more than a page scrolls through
MAX_BYTES = 16 << 20  # of all cells; the supervisor itself takes 20 MiB
# Memory of an item besides its text: a decoded line with four ranks took 382 bytes by tracemalloc, as the tests look.
ITEM_BYTES = 380
_NUMBER_BYTES = 60  # a short text in a tuple
# Seconds before a client was gone whose output it may not have shown any more.
UNSHOWN_S = 2.0
# Values and errors of one cell; of larger ones only texts are kept. They leave half of a cell's room to its lines.
_MAX_OUTCOME_BYTES = MAX_CELL_BYTES // 2
_MAX_UNATTENDED = 20  # cells that a new client hears of


# Plain tuples, because one is made for each line that is printed.
_Item = tuple[FoldedItem, int, float]  # an item, the memory it takes, and when it was sent


class _Cell:
    """The output of one cell. `num_bytes` is what it holds."""

    def __init__(self, number: int | None, ranks: Ranks, client: str, next_place: Callable[[], int]) -> None:
        self.number, self.ranks, self.client = number, ranks, client
        self._next_place = next_place
        self.finished: CallFinished | None = None  # None: it still runs
        self.left_at: float | None = None  # when its client was gone before its end; None: it was not, or users know
        self.num_bytes = 0
        self.num_lines = 0  # printed, since the last clear_output
        self.displays: dict[int, None] = {}  # places of the items that are displays, oldest first
        self._items: dict[int, _Item] = {}  # by place among the items of all cells, oldest first
        self._live: list[Line] = []
        self._dropped = Truncation()
        self._cleared_next: set[int] = set()  # ranks that made clear_output(wait=True) since the last item
        self._has_cleared = False  # whether a rank has ever cleared its output: others' lines may lose its numbers

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show of it."""
        outcomes = [part.outcome for part in self.finished.outcomes] if self.finished is not None else []
        return self.num_lines > 0 or bool(self._items) or any(one.status != "ok" or one.value for one in outcomes)

    # ---- output

    def add(self, items: Iterable[FoldedItem], now: float) -> None:
        for item in items:
            if type(item) is Line and not (item.live or self._live or self._cleared_next):  # as nearly all items are
                self.num_lines += 1
                self._append_line(item, now)
            else:
                self._add(item, now)

    def _add(self, item: FoldedItem, now: float) -> None:
        if isinstance(item, RankDisplay) and isinstance(item.item, ClearOutput):
            self._cleared_next.update(item.ranks)
            self._has_cleared = True
            if not item.item.wait:
                self._clear()
            return
        if self._cleared_next:
            self._clear()
        if isinstance(item, Line):
            self._add_line(item, now)
        elif isinstance(item.item, Display):
            if item.item.update:
                self._update(item.ranks, item.item, now)
            else:
                self.displays[self._append(item, _display_bytes(item.item), now)] = None
        elif isinstance(item.item, Notice):
            self._append(item, len(item.item.text), now)

    def finish(self, finished: CallFinished, now: float) -> None:
        """Record the end. Bars that stand still are lines from now on."""
        live, self._live = self._live, []
        for line in live:
            self._append_line(msgspec.structs.replace(line, live=False), now)
        outcomes = _bounded_parts(finished.outcomes)
        self.num_bytes += sum(map(_part_bytes, outcomes))
        self.finished = msgspec.structs.replace(finished, outcomes=outcomes, items=(), rank_seconds=None)

    def shown_items(self, since: float = float("-inf")) -> tuple[FoldedItem, ...]:
        """Return the output that was sent since then, with a notice at its beginning if there was more."""
        items = [item for item, _, sent_at in self._items.values() if sent_at >= since]
        return (*self.dropped_notice(), *items, *self._live)

    def dropped_notice(self) -> tuple[FoldedItem, ...]:
        """Return a notice of what is no longer kept, if there is such output."""
        if not self._dropped:
            return ()
        notice = Notice(f"… {self._dropped.describe()} of this cell's output are no longer kept")
        return (RankDisplay(tuple(sorted(self._dropped.ranks)), notice),)

    def newest(self, after: int) -> Iterable[tuple[int, FoldedItem, float]]:
        """Yield place, item and time of the output after a place, newest first."""
        for place in reversed(self._items):
            if place <= after:
                return
            item, _, sent_at = self._items[place]
            yield place, item, sent_at

    @property
    def live_lines(self) -> Sequence[Line]:
        """The present state of lines that are still being written."""
        return self._live

    def drop_oldest(self) -> bool:
        """Drop an item, displays first. Return whether there was one."""
        key = next(iter(self.displays or self._items), None)
        if key is None:
            return False
        item, num_bytes, _ = self._items.pop(key)
        self.displays.pop(key, None)
        self.num_bytes -= num_bytes
        if isinstance(item, RankDisplay) and isinstance(item.item, Display):
            self._dropped.add_display(item.ranks, num_bytes - ITEM_BYTES)
        else:
            self._dropped.add(item.ranks, num_bytes - ITEM_BYTES)
        return True

    def _append(self, item: FoldedItem, num_bytes: int, now: float) -> int:
        key = self._next_place()
        num_bytes += ITEM_BYTES
        self._items[key] = (item, num_bytes, now)
        self.num_bytes += num_bytes
        return key

    def _append_line(self, line: Line, now: float) -> None:
        num_bytes = len(line.text) + 1
        if line.varying_numbers:
            if self._has_cleared:
                num_bytes += len(line.first_text) + sum(_NUMBER_BYTES * len(one.texts) for one in line.varying_numbers)
            else:  # as nearly all cells: the numbers of each rank would take more room than the line
                line = Line(line.ranks, line.stream, line.text, end=line.end)
        self._append(line, num_bytes, now)

    def _add_line(self, line: Line, now: float) -> None:
        """Add a line, or the state of one that is still being written, by the rules of `fold.lines`."""
        if self._live:
            self._live = [
                remaining
                for other in self._live
                if (remaining := without_ranks(other, line.ranks if other.stream == line.stream else ()))
            ]
        if not line.live:
            self.num_lines += 1
            self._append_line(line, now)
        elif line.text:
            self._live.append(line)

    def _update(self, ranks: Ranks, new: Display, now: float) -> None:
        """Replace the displays with this id that these ranks made. One of another cell is that cell's."""
        for key in list(self.displays):
            item, num_bytes, sent_at = self._items[key]
            old = item.item if isinstance(item, RankDisplay) else None
            if not isinstance(old, Display) or old.display_id != new.display_id:
                continue
            others, updated = _without(item.ranks, ranks), set(item.ranks) & set(ranks)
            if not updated:
                continue
            shown = RankDisplay(tuple(sorted(updated)), msgspec.structs.replace(new, update=False))
            if not others:
                new_bytes = _display_bytes(new) + ITEM_BYTES
                self.num_bytes += new_bytes - num_bytes
                self._items[key] = (shown, new_bytes, now)
            else:
                self._items[key] = (RankDisplay(others, old), num_bytes, sent_at)
                self.displays[self._append(shown, _display_bytes(new), now)] = None

    def _clear(self) -> None:
        """Drop the output of the ranks that have cleared theirs."""
        ranks, self._cleared_next = self._cleared_next, set()
        if ranks.issuperset(self.ranks):
            self.num_bytes -= sum(num_bytes for _, num_bytes, _ in self._items.values())
            self._items.clear()
            self.displays.clear()
            self._live.clear()
            self._dropped = Truncation()
            self.num_lines = 0
            return
        for key, (item, num_bytes, sent_at) in list(self._items.items()):
            if isinstance(item, Line):
                remaining: FoldedItem | None = without_ranks(item, ranks)
            else:
                others = _without(item.ranks, ranks)
                remaining = msgspec.structs.replace(item, ranks=others) if others else None
            if remaining is not None:
                self._items[key] = (remaining, num_bytes, sent_at)
            else:
                del self._items[key]
                self.displays.pop(key, None)
                self.num_bytes -= num_bytes
                self.num_lines -= isinstance(item, Line)
        self._live = [remaining for line in self._live if (remaining := without_ranks(line, ranks))]


class KeptOutput:
    """The output of the latest cells."""

    def __init__(
        self, *, max_cells: int = MAX_CELLS, max_cell_bytes: int = MAX_CELL_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._cells: dict[str, _Cell] = {}  # by call, oldest first
        self._max_cells, self._max_cell_bytes, self._max_bytes = max_cells, max_cell_bytes, max_bytes
        self._num_bytes = 0
        self._last_place = 0

    def __contains__(self, call: str) -> bool:
        return call in self._cells

    @property
    def num_bytes(self) -> int:
        """What is held in all."""
        return self._num_bytes

    # ---- events

    def began(self, call: str, number: int | None, ranks: Ranks, client: str) -> None:
        """Begin to keep the output of a cell."""
        self._cells[call] = _Cell(number, ranks, client, self._next_place)
        if len(self._cells) > self._max_cells:
            self._drop_cell(next(iter(self._cells)))

    def printed(self, call: str, items: Iterable[FoldedItem], now: float) -> None:
        """Keep output that is sent to a client; of a call that is no cell nothing is kept."""
        cell = self._cells.get(call)
        if cell is not None and items:
            before = cell.num_bytes
            cell.add(items, now)
            self._trim(cell, before)

    def ended(self, finished: CallFinished, now: float) -> None:
        """Keep the last output of a cell, and how it ended."""
        cell = self._cells.get(finished.call)
        if cell is not None and cell.finished is None:
            before = cell.num_bytes
            cell.add(finished.items, now)
            cell.finish(finished, now)
            self._trim(cell, before)

    def client_left(self, client: str, now: float) -> None:
        """Record that the client of these cells is gone: what they do from now on, no user sees."""
        for cell in self._cells.values():
            if cell.client == client and cell.finished is None:
                cell.left_at = now

    def follow(self, call: str, client: str) -> tuple[FoldedItem, ...]:
        """Make a client that of a cell; return what the cell printed since its client was gone, or shortly before."""
        cell = self._cells.get(call)
        if cell is None:
            return ()
        since = float("-inf") if cell.left_at is None else cell.left_at - UNSHOWN_S
        cell.client, cell.left_at = client, None
        return cell.shown_items(since)

    def acknowledge(self, calls: Iterable[str]) -> None:
        """Record that a user knows how these cells ended."""
        for call in calls:
            if (cell := self._cells.get(call)) is not None and cell.finished is not None:
                cell.left_at = None

    # ---- queries

    def unattended(self, entries: Iterable[HistoryEntry]) -> tuple[HistoryEntry, ...]:
        """Return the cells that ended after their client was gone, oldest first, without their sources."""
        calls = {call for call, cell in self._cells.items() if cell.left_at is not None and cell.finished is not None}
        if not calls:
            return ()
        found = [msgspec.structs.replace(entry, source="") for entry in entries if entry.call in calls]
        return self.mark(found[-_MAX_UNATTENDED:])

    def mark(self, entries: Iterable[HistoryEntry]) -> tuple[HistoryEntry, ...]:
        """Return the entries, with the number of lines of those whose output is kept."""
        return tuple(
            msgspec.structs.replace(entry, num_lines=cell.num_lines)
            if (cell := self._cells.get(entry.call)) is not None and cell.has_content
            else entry
            for entry in entries
        )

    def finished(self, call: str) -> CallFinished | None:
        """Return how a cell ended; None: it runs, or is not kept."""
        cell = self._cells.get(call)
        return cell.finished if cell is not None else None

    def find(self, number: int, entries: Iterable[HistoryEntry]) -> tuple[KeptCell, ...]:
        """Return the cells with this number whose output is kept, oldest first."""
        found = [entry for entry in entries if entry.number == number and entry.call in self._cells]
        cells = [self._cells[entry.call] for entry in found]
        return tuple(
            KeptCell(entry, cell.shown_items(), cell.finished)
            for entry, cell in zip(self.mark(found), cells, strict=True)
        )

    def new_output(
        self, query: QueryNewOutput, entries: Iterable[HistoryEntry], wall_time: Callable[[float], float]
    ) -> NewOutput:
        """Return the output after a place, of all cells or of one, with the cells that it is of."""
        chosen = self._cells if query.target is None else {query.target: self._cells[query.target]}
        merged = heapq.merge(
            *(_labelled(call, cell.newest(query.since or 0)) for call, cell in chosen.items()),
            key=lambda one: one[1],
            reverse=True,
        )
        newest = list(islice(merged, query.max_items) if query.since is None else merged)
        found = newest[::-1][: query.max_items]
        shown = [KeptItem(place, CallId(call), wall_time(sent_at), item) for call, place, item, sent_at in found]
        if len(newest) <= query.max_items:  # nothing follows these items
            shown += [KeptItem(0, CallId(call), 0.0, line) for call, cell in chosen.items() for line in cell.live_lines]
        calls = {one.call for one in shown} | ({query.target} if query.target is not None else set())
        cells = tuple(
            KeptCell(
                msgspec.structs.replace(entry, source=""),
                self._cells[entry.call].dropped_notice(),
                self._cells[entry.call].finished if query.target is not None else None,
            )
            for entry in entries
            if entry.call in calls
        )
        return NewOutput(tuple(shown), cells, self._last_place, len(newest) - len(found))

    def _next_place(self) -> int:
        self._last_place += 1
        return self._last_place

    def describe_numbers(self) -> str:
        """Return the numbers of the cells that are kept: `3-7,9`, or `none`."""
        return format_ranks(cell.number for cell in self._cells.values() if cell.number is not None)

    # ---- limits

    def _trim(self, cell: _Cell, num_bytes_before: int) -> None:
        while cell.num_bytes > self._max_cell_bytes and cell.drop_oldest():
            pass
        self._num_bytes += cell.num_bytes - num_bytes_before
        if self._num_bytes > self._max_bytes:
            self._trim_all()

    def _trim_all(self) -> None:
        """Drop the oldest cells' displays, then the oldest cells; of one that runs or is unattended, its items.

        Makes room for more than was asked, because all cells are looked at each time.
        """
        limit = self._max_bytes - self._max_bytes // 16
        for cell in self._cells.values():
            while self._num_bytes > limit and cell.displays:
                self._drop_item(cell)
        for call, cell in list(self._cells.items()):
            if self._num_bytes <= limit:
                return
            if cell.finished is not None and cell.left_at is None and len(self._cells) > 1:
                self._drop_cell(call)
            while self._num_bytes > limit and call in self._cells and self._drop_item(cell):
                pass

    def _drop_item(self, cell: _Cell) -> bool:
        before = cell.num_bytes
        has_dropped = cell.drop_oldest()
        self._num_bytes += cell.num_bytes - before
        return has_dropped

    def _drop_cell(self, call: str) -> None:
        self._num_bytes -= self._cells.pop(call).num_bytes


def _labelled(
    call: str, items: Iterable[tuple[int, FoldedItem, float]]
) -> Iterator[tuple[str, int, FoldedItem, float]]:
    for place, item, sent_at in items:
        yield call, place, item, sent_at


def _without(ranks: Ranks, others: Iterable[int]) -> Ranks:
    excluded = set(others)
    return tuple(rank for rank in ranks if rank not in excluded) if excluded else ranks


def _bounded_parts(parts: tuple[OutcomeGroup, ...]) -> tuple[OutcomeGroup, ...]:
    """Return outcomes as far as they can be shown, cut where together they are too large."""
    shown = tuple(map(_shown_part, parts))
    if sum(map(_part_bytes, shown)) <= _MAX_OUTCOME_BYTES:
        return shown
    max_chars = _MAX_OUTCOME_BYTES // len(shown)
    return tuple(_cut_part(part, max_chars) for part in shown)


def _cut_part(part: OutcomeGroup, max_chars: int) -> OutcomeGroup:
    """Return an outcome with the text of its value, or with its error and no traceback."""
    changes: dict[str, Any] = {}
    if (value := part.outcome.value) is not None:
        text = value.preview.text if len(value.preview.text) <= max_chars else f"{value.preview.text[:max_chars]}…"
        preview = msgspec.structs.replace(value.preview, text=text, html=None, data={}, metadata={})
        changes["value"] = msgspec.structs.replace(value, preview=preview)
    if (error := part.outcome.error) is not None:
        cut = error.evalue[:max_chars]
        changes["error"] = msgspec.structs.replace(
            error, evalue=cut, traceback=("(its traceback was too large to be kept)",), frames=()
        )
    return OutcomeGroup(part.ranks, msgspec.structs.replace(part.outcome, **changes))


def _shown_part(part: OutcomeGroup) -> OutcomeGroup:
    """Return an outcome without what only its client can use: objects, their references, the names that it bound."""
    outcome = part.outcome
    changes: dict[str, Any] = {}
    if outcome.value is not None:
        changes["value"] = msgspec.structs.replace(outcome.value, ref=None, payload=None)
    if outcome.error is not None and outcome.error.pickled is not None:
        changes["error"] = msgspec.structs.replace(outcome.error, pickled=None)
    if outcome.bound_names or outcome.deleted_names:
        changes |= {"bound_names": (), "deleted_names": ()}
    return OutcomeGroup(part.ranks, msgspec.structs.replace(outcome, **changes)) if changes else part


def _part_bytes(part: OutcomeGroup) -> int:
    """Return about what an outcome holds."""
    value, error = part.outcome.value, part.outcome.error
    total = ITEM_BYTES
    if value is not None:
        total += ITEM_BYTES + len(value.preview.text) + len(value.preview.html or "") + _bytes_of(value.preview.data)
    if error is not None:
        total += ITEM_BYTES + len(error.evalue) + sum(map(len, error.traceback)) + ITEM_BYTES * len(error.frames)
    return total


def _display_bytes(display: Display) -> int:
    return _bytes_of(display.data) + _bytes_of(display.metadata)


def _bytes_of(data: dict[str, Any]) -> int:
    return sum(len(part) if isinstance(part, str | bytes) else len(msgspec.json.encode(part)) for part in data.values())
