"""The queue of what one source has printed and that is not emitted yet: bounded, popped only at the front."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from meshbook.fold.entries import (
    ItemEntry,
    LineTemplates,
    TruncationEntry,
    is_special,
    num_chars_of,
    truncation_entry,
)
from meshbook.fold.truncation import Truncation
from meshbook.ids import Ranks

# Queue entries that are searched for a match of another source's front.
LOOKAHEAD = 64
# Factor by which a queue may exceed its limit between two calls of `Aligner.pop_ready`.
MAX_OVERFLOW = 4


class SourceQueue:
    """Entries of one source, oldest first.

    Args:
        ranks: the ranks that the source reports.
        templates: the templates of entries.
        limit_chars: how many characters may wait; `push` allows `MAX_OVERFLOW` times as many.
        per_entry_ranks: whether an entry may come from only some of the ranks.
    """

    __slots__ = (
        "_arrivals",
        "_limit_chars",
        "_num_special",
        "_templates",
        "_truncation_index",
        "entries",
        "entry_ranks",
        "finished",
        "lookahead_end",
        "lookahead_keys",
        "num_chars",
        "ranks",
        "start",
    )  # fmt: skip

    def __init__(self, ranks: Ranks, templates: LineTemplates, limit_chars: int, *, per_entry_ranks: bool) -> None:
        self.ranks = ranks
        self._templates, self._limit_chars = templates, limit_chars
        self.entries: list[str] = []
        self.start = 0  # entries before this index are emitted
        # The source's ranks that printed each entry; None: all of them.
        self.entry_ranks: list[Ranks] | None = [] if per_entry_ranks else None
        self._arrivals: deque[list[float]] = deque()  # [number of entries, arrival time], oldest first
        self.num_chars = 0
        self._num_special = 0  # entries that are not plain stdout lines
        self._truncation_index: int | None = None  # index in `entries` of the gap, if there is one
        self.finished = False
        # Keys of the entries behind the front, up to `lookahead_end`, with their counts. None: not computed yet.
        self.lookahead_keys: dict[str, int] | None = None
        self.lookahead_end = 0

    def __len__(self) -> int:
        return len(self.entries) - self.start

    @property
    def front(self) -> str:
        return self.entries[self.start]

    @property
    def oldest_arrival(self) -> float:
        return self._arrivals[0][1]

    @property
    def has_only_lines(self) -> bool:
        """Whether all entries are plain stdout lines."""
        return not self._num_special

    @property
    def is_rather_full(self) -> bool:
        return self.num_chars > self._limit_chars // 2

    @property
    def is_too_full(self) -> bool:
        return self.num_chars > self._limit_chars

    def ranks_at(self, index: int) -> Ranks:
        return self.ranks if self.entry_ranks is None else self.entry_ranks[index]

    def num_aged(self, now: float, max_age_s: float) -> int:
        """Return how many entries are past the maximum age."""
        num_aged = 0
        for count, arrived in self._arrivals:
            if arrived + max_age_s > now:  # the same sum as in the deadline, so the comparison is exact then
                break
            num_aged += int(count)
        return num_aged

    def lookahead(self) -> dict[str, int]:
        """Return the keys behind the front, within the lookahead window, with their counts."""
        if self.lookahead_keys is None:
            self.lookahead_keys, self.lookahead_end = {}, self.start + 1
        stop = min(len(self.entries), self.start + 1 + LOOKAHEAD)
        for index in range(self.lookahead_end, stop):
            key = self._templates(self.entries[index]).key
            self.lookahead_keys[key] = self.lookahead_keys.get(key, 0) + 1
        self.lookahead_end = max(self.lookahead_end, stop)
        return self.lookahead_keys

    # ---- appending and emitting

    def push(
        self, entries: Sequence[str], num_chars: int, now: float, ranks: Ranks | None = None, *, special: bool = True
    ) -> None:
        """Append entries.

        Args:
            ranks: the ranks that printed them; None: all.
            special: False if they are plain stdout lines.
        """
        if not entries:
            return
        self._num_special += special * len(entries)
        self.entries += entries
        if self.entry_ranks is not None:
            self.entry_ranks += [self.ranks if ranks is None else ranks] * len(entries)
        if self._arrivals and self._arrivals[-1][1] == now:
            self._arrivals[-1][0] += len(entries)
        else:
            self._arrivals.append([len(entries), now])
        self.num_chars += num_chars
        if self.num_chars > MAX_OVERFLOW * self._limit_chars and len(self) > 2:
            self.truncate(*self.truncation_range(), now)

    def push_truncation(self, num_lines: int, num_chars: int, now: float) -> None:
        """Record that lines are missing after the last entry."""
        if self._truncation_index is None:
            self.push([truncation_entry()], 0, now)
            self._truncation_index = len(self.entries) - 1
        else:
            self._drop_entries(len(self.entries), now)
        self._truncation.add(self.ranks, num_chars, num_lines)

    def pop(self, count: int, num_chars: int) -> None:
        """Remove emitted entries from the front."""
        self._forget_special(self.start, self.start + count)
        self.start += count
        self.num_chars -= num_chars
        if self._truncation_index is not None and self._truncation_index < self.start:
            self._truncation_index = None
        if self.start == len(self.entries) or (self.start > 4096 and 2 * self.start > len(self.entries)):
            del self.entries[: self.start]
            if self.entry_ranks is not None:
                del self.entry_ranks[: self.start]
            if self._truncation_index is not None:
                self._truncation_index -= self.start
            self.start = 0
            self.lookahead_keys = None
        elif self.lookahead_keys is not None:
            self._move_lookahead(count)
        while count:
            oldest = self._arrivals[0]
            taken = min(count, int(oldest[0]))
            oldest[0] -= taken
            count -= taken
            if not oldest[0]:
                self._arrivals.popleft()

    def _move_lookahead(self, count: int) -> None:
        """Remove the new front from the counted keys."""
        assert self.lookahead_keys is not None
        if count > 1:
            self.lookahead_keys = None
        elif self.lookahead_end > self.start:
            key = self._templates(self.front).key
            self.lookahead_keys[key] -= 1
            if not self.lookahead_keys[key]:
                del self.lookahead_keys[key]
        else:
            self.lookahead_end = self.start + 1

    def _forget_special(self, start: int, stop: int) -> None:
        """Release what special entries carry; the list itself is shortened later."""
        if not self._num_special:
            return
        for index in range(start, stop):
            if is_special(self.entries[index]):
                self.entries[index] = ""
                self._num_special -= 1

    # ---- truncating

    def truncation_range(self) -> tuple[int, int]:
        """Return where to truncate this queue, as an offset from its front, and how many entries to drop."""
        if self._truncation_index is None:
            start, num_chars = self.start, 0
            while start < len(self.entries) - 2 and num_chars < self._limit_chars // 2:
                num_chars += num_chars_of(self.entries[start])
                start += 1
            offset = start - self.start
        else:
            start = self._truncation_index + 1
            offset = self._truncation_index - self.start
        # Somewhat below the limit, so that truncation is rare, but not so far below that a source with less output
        # loses its last lines. The last entry is retained.
        excess = self.num_chars - self._limit_chars * 7 // 8
        candidates = self.entries[start:-1]
        only_lines = self._num_special == (self._truncation_index is not None)
        sizes = itertools.accumulate(map(len if only_lines else num_chars_of, candidates))
        return offset, next((count for count, size in enumerate(sizes, 1) if size >= excess), len(candidates))

    def truncate(self, offset: int, count: int, now: float) -> None:
        """Drop `count` entries at `offset`, if the queue has them and no gap elsewhere."""
        if self._truncation_index is None:
            if len(self) < offset + 2:
                return
            self._truncation_index = self.start + offset
            self.entries.insert(self._truncation_index, truncation_entry())
            self._num_special += 1
            if self.entry_ranks is not None:
                self.entry_ranks.insert(self._truncation_index, self.ranks)
            self._arrivals[0][0] += 1  # `_drop_entries` recounts
        if self._truncation_index == self.start + offset:
            self._drop_entries(min(self._truncation_index + 1 + count, len(self.entries) - 1), now)

    def _drop_entries(self, stop: int, now: float) -> None:
        """Drop the entries behind the gap, up to `stop`."""
        assert self._truncation_index is not None
        start, truncation = self._truncation_index + 1, self._truncation
        if self._num_special == 1 and self.entry_ranks is None:  # the gap itself; the rest is lines of all its ranks
            num_chars = sum(map(len, self.entries[start:stop]))
            truncation.add(self.ranks, num_chars, stop - start)
            self.num_chars -= num_chars
        else:
            for index in range(start, stop):
                entry = self.entries[index]
                num_chars = num_chars_of(entry)
                add = truncation.add_display if isinstance(entry, ItemEntry) else truncation.add
                add(self.ranks_at(index), num_chars)
                self.num_chars -= num_chars
            self._forget_special(start, stop)
        first = self.oldest_arrival
        del self.entries[start:stop]
        if self.entry_ranks is not None:
            del self.entry_ranks[start:stop]
        self.lookahead_keys = None
        self._arrivals = deque([[start - self.start, first]])
        if len(self.entries) > start:
            self._arrivals.append([len(self.entries) - start, now])

    @property
    def _truncation(self) -> Truncation:
        assert self._truncation_index is not None
        entry = self.entries[self._truncation_index]
        assert isinstance(entry, TruncationEntry)
        return entry.truncation
