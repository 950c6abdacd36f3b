"""Align the output of several sources: what they print alike at about the same position is emitted once.

A source is a rank, or a host that reports several ranks. Each has a queue from which entries are only popped at the
front, so the order of each source is preserved. The algorithm chooses which fronts to pop next:

- Fronts that are alike on all sources are emitted as one.
- If a source has an entry like another's front further back in its queue, its earlier entries are emitted first.
- A front that no other source has is emitted alone: at once if the others have demonstrably skipped it, else after it
  has waited for the maximum age.

The caller passes the time. Nothing here blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from meshbook.fold.entries import (
    FoldedLineEntry,
    LineTemplates,
    TruncationEntry,
    folded_line_entry,
    is_special,
    item_entry,
    line_of_fold,
    member_of,
    num_chars_of,
    output_of,
    stderr_entry,
    stream_of,
    truncation_notice,
)
from meshbook.fold.lag import LagDetector
from meshbook.fold.numbers import fold
from meshbook.fold.source_queue import LOOKAHEAD, SourceQueue
from meshbook.fold.truncation import Truncation
from meshbook.ids import Ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Folding, Line, Notice


class Aligner:
    """Queues of several sources, folded from their fronts.

    Args:
        sources: number of each source and the ranks it reports.
        per_entry_ranks: whether an entry may come from only some of its source's ranks.
        limit_chars: of one source's queue at `pop_ready`; the excess is dropped from the middle and a notice says so.
        mergeable: whether lines retain the numbers of each rank, so that they can be folded again.
        folding: "equal": lines that differ in numbers are not folded; "off": no lines are.
    """

    def __init__(
        self,
        sources: Iterable[tuple[int, Ranks]],
        *,
        per_entry_ranks: bool,
        limit_chars: int,
        mergeable: bool,
        folding: Folding = "numbers",
    ) -> None:
        self._templates = LineTemplates()
        self._queues = {
            source: SourceQueue(ranks, self._templates, limit_chars, per_entry_ranks=per_entry_ranks)
            for source, ranks in sorted(sources)
        }
        self._lag = LagDetector(self._queues.values(), self._templates)
        self._mergeable, self._folding = mergeable, folding
        self._union_cache: dict[tuple[Ranks, ...], Ranks] = {}
        self.unterminated_line: Line | None = None  # the last emitted line that arrived without a line end

    # ---- input

    def add_lines(self, source: int, stream: str, lines: list[str], now: float) -> None:
        """Append lines that all of a source's ranks printed, in order."""
        is_stderr = stream == "stderr"
        entries = [stderr_entry(line) for line in lines] if is_stderr else lines
        self._queues[source].push(entries, sum(map(len, entries)), now, special=is_stderr)

    def add_item(
        self, source: int, item: Display | ClearOutput | Notice, now: float, ranks: Ranks | None = None
    ) -> None:
        """Append a display, clear-output or notice."""
        entry = item_entry(item)
        self._queues[source].push([entry], entry.num_chars, now, ranks)

    def add_folded_line(self, source: int, line: Line, now: float) -> None:
        """Append a line that the source has folded."""
        entry = folded_line_entry(line)
        self._queues[source].push([entry], num_chars_of(entry), now, line.ranks, special=is_special(entry))

    def add_truncation(self, source: int, num_lines: int, num_chars: int, now: float) -> None:
        """Record that lines are missing at this position."""
        self._queues[source].push_truncation(num_lines, num_chars, now)

    def finish(self, source: int) -> None:
        """Record that the source is complete, so that the others do not wait for it."""
        self._queues[source].finished = True

    # ---- output

    def is_empty(self, source: int) -> bool:
        """Whether everything from the source is emitted."""
        return not len(self._queues[source])

    def next_deadline(self, max_age_s: float) -> float | None:
        """Return when the front that has waited longest has reached the maximum age; None: nothing waits."""
        oldest = min((queue.oldest_arrival for queue in self._queues.values() if len(queue)), default=None)
        return None if oldest is None else oldest + max_age_s * self._lag.patience

    def pop_ready(self, now: float, *, final: bool, max_age_s: float, max_chars: int | None = None) -> list[FoldedItem]:
        """Pop and return what can be emitted now; with `final`, everything. Stops after `max_chars` of text.

        Args:
            max_age_s: how long an entry waits for other sources; longer once it was too short for one of them.
        """
        queues = list(self._queues.values())
        max_age_s *= self._lag.patience
        _enforce_limit(queues, now)
        if self._folding == "off":
            return self._pop_by_source(queues, max_chars)
        out: list[FoldedItem] = []
        num_counted = 0
        while waiting := [queue for queue in queues if queue.start < len(queue.entries)]:
            if max_chars is not None:
                if max_chars <= 0:
                    break
                max_chars -= sum(len(item.text) + 1 for item in out[num_counted:] if isinstance(item, Line))
                num_counted = len(out)
            missing = not final and len(waiting) < len(queues) and _is_any_awaited(queues)
            front = waiting[0].front
            all_equal = [queue.entries[queue.start] for queue in waiting].count(front) == len(waiting)
            if all_equal and not missing:
                self._emit_run(waiting, _run_length(waiting, max_chars), out)
                continue
            ready = final or any(q.oldest_arrival + max_age_s <= now or q.is_rather_full for q in waiting)
            if missing and not ready:
                break
            if len(waiting) == 1:  # alone it emits what is past the maximum age, else all
                num_ready = waiting[0].num_aged(now, max_age_s) or len(waiting[0])
                self._emit_run(waiting, min(num_ready, _run_length(waiting, max_chars)), out)
                continue
            chosen = waiting if all_equal else self._choose_group(waiting, ready)
            if chosen is None:
                break
            self._emit_front(chosen, out)
        return out

    def _pop_by_source(self, queues: Sequence[SourceQueue], max_chars: int | None) -> list[FoldedItem]:
        """Pop what there is, of each source by itself."""
        out: list[FoldedItem] = []
        for queue in sorted((queue for queue in queues if len(queue)), key=lambda queue: queue.oldest_arrival):
            if max_chars is not None and max_chars <= 0:
                break
            before = queue.num_chars
            self._emit_run([queue], _run_length([queue], max_chars), out)
            max_chars = None if max_chars is None else max_chars - (before - queue.num_chars)
        return out

    def _choose_group(self, waiting: list[SourceQueue], ready: bool) -> list[SourceQueue] | None:
        """Return the sources whose fronts are emitted next as one; None to wait for more input."""
        groups: dict[str, list[SourceQueue]] = {}
        for queue in waiting:
            groups.setdefault(self._templates(queue.front).key, []).append(queue)
        if len(groups) == 1:
            return waiting
        lookahead = {queue: queue.lookahead() for queue in waiting}
        candidates: list[tuple[float, bool, list[SourceQueue]]] = []  # (oldest arrival, others passed, members)
        for key, members in groups.items():
            others = [queue for other, queues in groups.items() if other != key for queue in queues]
            if any(key in lookahead[queue] for queue in others):
                continue  # a matching entry follows in another queue
            others_passed = all(
                len(queue) > LOOKAHEAD
                or any(self._templates(queue.front).key in lookahead[candidate] for candidate in members)
                for queue in others
            )
            candidates.append((min(queue.oldest_arrival for queue in members), others_passed, members))
        if not candidates:
            # Each front has a match behind another front. Emitting the smallest group splits the fewest lines.
            self._lag.is_aligned = False
            return min(groups.values(), key=len)
        if not ready:
            candidates = [candidate for candidate in candidates if candidate[1]]
        if not candidates:
            return None
        _, others_passed, members = min(candidates, key=operator.itemgetter(0))
        self._lag.is_aligned = self._lag.is_aligned and others_passed
        return members

    def _emit_front(self, group: list[SourceQueue], out: list[FoldedItem]) -> None:
        """Emit the fronts of a group, which are equal or have one key."""
        entries = [queue.front for queue in group]
        if entries.count(entries[0]) == len(entries):
            self._emit_run(group, 1, out)
            return
        if isinstance(entries[0], TruncationEntry):
            out.append(_pop_truncations(group))
            return
        templates = [self._templates(entry) for entry in entries]
        folded = None
        if self._folding == "numbers":
            folded = fold(
                [
                    member_of(entry, queue.ranks_at(queue.start), template)
                    for entry, queue, template in zip(entries, group, templates, strict=True)
                ]
            )
        if folded is None:
            self._lag.is_aligned = False
            self._emit_rows(group, out)
            return
        lagging = self._lag.select_lagging(group)
        if len(lagging) < len(group):
            self._emit_front(lagging, out)
            return
        line = line_of_fold(folded, stream_of(templates[0]), mergeable=self._mergeable)
        if any(isinstance(entry, FoldedLineEntry) and not entry.line.end for entry in entries):
            self.unterminated_line = line
        out.append(line)
        self._lag.note_emitted(group, entries[:1])
        for queue, entry in zip(group, entries, strict=True):
            queue.pop(1, num_chars_of(entry))

    def _emit_rows(self, group: list[SourceQueue], out: list[FoldedItem]) -> None:
        """Emit the fronts of a group, which are not folded, unchanged, with the rows of one rank together."""
        key = self._templates(group[0].front).key
        while group:
            first = group[0]
            same = [queue for queue in group if queue.front == first.front]
            length = 1
            while (
                length < min(LOOKAHEAD, *map(len, same))
                and self._templates(row := first.entries[first.start + length]).key == key
                and all(queue.entries[queue.start + length] == row for queue in same)
            ):
                length += 1
            self._emit_run(same, length, out)
            group = [queue for queue in group if queue not in same]

    def _emit_run(self, group: list[SourceQueue], length: int, out: list[FoldedItem]) -> None:
        """Emit the first entries of a group, which are equal in all of its queues."""
        first = group[0]
        run = first.entries[first.start : first.start + length]
        if first.entry_ranks is not None:
            for offset, entry in enumerate(run):
                ranks = self._union(tuple(queue.ranks_at(queue.start + offset) for queue in group))
                out.append(self._output_of(entry, ranks))
        else:
            ranks = self._union(tuple(queue.ranks for queue in group))
            if first.has_only_lines:
                out.extend([Line(ranks, "stdout", entry) for entry in run])
            else:
                out.extend(self._output_of(entry, ranks) for entry in run)
        self._lag.note_emitted(group, run)
        num_chars = sum(map(len, run)) if first.has_only_lines else sum(map(num_chars_of, run))
        for queue in group:
            queue.pop(length, num_chars)

    def _output_of(self, entry: str, ranks: Ranks) -> FoldedItem:
        item = output_of(entry, ranks, mergeable=self._mergeable)
        if isinstance(entry, FoldedLineEntry) and not entry.line.end:
            assert isinstance(item, Line)
            self.unterminated_line = item
        return item

    def _union(self, rank_sets: tuple[Ranks, ...]) -> Ranks:
        if len(rank_sets) == 1:
            return rank_sets[0]
        union = self._union_cache.get(rank_sets)
        if union is None:
            if len(self._union_cache) > 1024:
                self._union_cache.clear()
            union = self._union_cache[rank_sets] = tuple(sorted({rank for ranks in rank_sets for rank in ranks}))
        return union


def _is_any_awaited(queues: Sequence[SourceQueue]) -> bool:
    """Whether a source without entries may still have some."""
    return any(not queue.finished for queue in queues if not len(queue))


def _run_length(waiting: Sequence[SourceQueue], max_chars: int | None) -> int:
    """Return how many entries from the front on are equal in all queues; at least 1, as the fronts are equal.

    Limited to about `max_chars`, estimated from the average entry length.
    """
    longest = min(map(len, waiting))
    first, other_queues = waiting[0], waiting[1:]
    if max_chars is not None:
        longest = max(1, min(longest, max_chars * len(first) // (first.num_chars + 1)))
    if not other_queues:
        return longest
    length, step = 1, 16
    while length < longest:
        stop = min(length + step, longest)
        part = first.entries[first.start + length : first.start + stop]
        others = [queue.entries[queue.start + length : queue.start + stop] for queue in other_queues]
        if any(other != part for other in others):
            same = (all(other[at] == entry for other in others) for at, entry in enumerate(part))
            return length + next(at for at, equal in enumerate(same) if not equal)
        length, step = stop, min(2 * step, 4096)
    return length


def _pop_truncations(group: Sequence[SourceQueue]) -> FoldedItem:
    """Pop the gaps of several sources and return one notice for all."""
    combined = Truncation()
    for queue in group:
        entry = queue.front
        assert isinstance(entry, TruncationEntry)
        combined.merge(entry.truncation)
        queue.pop(1, 0)
    return truncation_notice(combined)


def _enforce_limit(queues: Sequence[SourceQueue], now: float) -> None:
    """Bring all queues below their limit by dropping entries from the middle.

    Ranks that run the same code overflow alike, so the same range is dropped from all queues that are rather full. What
    follows the gap then stays aligned.
    """
    fullest = max(queues, key=lambda queue: queue.num_chars, default=None)
    if fullest is None or not fullest.is_too_full:
        return
    offset, count = fullest.truncation_range()
    for queue in queues:
        if queue.is_rather_full:
            queue.truncate(offset, count, now)
    for queue in queues:
        if queue.is_too_full:
            queue.truncate(*queue.truncation_range(), now)
