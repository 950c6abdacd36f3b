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

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from meshbook.fold.numbers import Fold, FoldMember, TextTemplate, fold, template_of
from meshbook.fold.truncation import Truncation
from meshbook.ids import Ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, Notice, RankDisplay

# Queue entries that are searched for a match of another source's front.
LOOKAHEAD = 64
# Further lines with the same key that are searched to detect that a source is some lines behind.
MAX_LAG_LINES = 16
# Factor by which a queue may exceed its limit between two calls of `pop_ready`.
MAX_OVERFLOW = 4

# An entry of a queue is a str, so that runs of two queues are compared at C speed. A stdout line is stored as it is;
# any other entry starts with one of these characters, none of which occurs in incoming text
# (`line_assembler.RESERVED_CHARS`).
_STDERR = "\0"  # followed by the line
_ITEM = "\1"  # followed by a digest: equal displays have equal entries
_TRUNCATION = "\2"  # followed by a number: a gap where entries were dropped
_FOLDED_LINE = "\3"  # followed by a number: a line folded by a host that is more than its text
_SPECIAL = frozenset((_STDERR, _ITEM, _TRUNCATION, _FOLDED_LINE))
# Prefix of a stderr line's key. No key of a stdout line starts with it, see `_SPECIAL`.
_STDERR_KEY = _STDERR
_TRUNCATION_TEMPLATE = TextTemplate(_TRUNCATION, ())  # all gaps have one key, so sources align at them

_encode = msgspec.msgpack.Encoder().encode


class _EntryPayload:
    """What an entry that is not plain text refers to."""

    __slots__ = ("item", "line", "member", "num_chars", "ref_count", "template")

    def __init__(self, item: Display | ClearOutput | Notice | Truncation | None, num_chars: int) -> None:
        self.item = item
        self.num_chars = num_chars
        self.ref_count = 0  # occurrences in all queues
        self.line: Line | None = None  # of a `_FOLDED_LINE`, with the parts below
        self.member: FoldMember | None = None
        self.template: TextTemplate | None = None


class _SourceQueue:
    """What one source has printed and that is not emitted yet."""

    __slots__ = (
        "arrivals",
        "entries",
        "entry_ranks",
        "finished",
        "lookahead_end",
        "lookahead_keys",
        "missed",
        "num_chars",
        "num_special",
        "ranks",
        "start",
        "truncation_index",
    )  # fmt: skip

    def __init__(self, ranks: Ranks, per_entry_ranks: bool) -> None:
        self.ranks = ranks
        self.entries: list[str] = []
        self.start = 0  # entries before this index are emitted
        # The source's ranks that printed each entry; None: all of them.
        self.entry_ranks: list[Ranks] | None = [] if per_entry_ranks else None
        self.arrivals: deque[list[float]] = deque()  # [number of entries, arrival time], oldest first
        self.num_chars = 0
        self.num_special = 0  # entries that are not plain stdout lines
        self.truncation_index: int | None = None  # index in `entries` of the gap, if there is one
        self.finished = False
        # Keys of the entries behind the front, up to `lookahead_end`, with their counts. None: not computed yet.
        self.lookahead_keys: dict[str, int] | None = None
        self.lookahead_end = 0
        # Lines that were emitted without this source, which was late.
        self.missed: deque[TextTemplate] = deque(maxlen=LOOKAHEAD)

    def __len__(self) -> int:
        return len(self.entries) - self.start

    @property
    def front(self) -> str:
        return self.entries[self.start]

    @property
    def oldest_arrival(self) -> float:
        return self.arrivals[0][1]

    def ranks_at(self, index: int) -> Ranks:
        return self.ranks if self.entry_ranks is None else self.entry_ranks[index]


class Aligner:
    """Queues of several sources, folded from their fronts.

    Args:
        sources: number of each source and the ranks it reports.
        per_entry_ranks: whether an entry may come from only some of its source's ranks.
        limit_chars: of one source's queue at `pop_ready`; the excess is dropped from the middle and a notice says so.
        mergeable: whether lines retain the numbers of each rank, so that they can be folded again.
    """

    def __init__(
        self, sources: Iterable[tuple[int, Ranks]], *, per_entry_ranks: bool, limit_chars: int, mergeable: bool
    ) -> None:
        self._queues = {source: _SourceQueue(ranks, per_entry_ranks) for source, ranks in sorted(sources)}
        self._limit_chars = limit_chars
        self._mergeable = mergeable
        self._payloads: dict[str, _EntryPayload] = {}
        self._next_number = 0
        self._template_cache: dict[str, TextTemplate] = {}
        self._union_cache: dict[tuple[Ranks, ...], Ranks] = {}
        # Becomes False when an emitted entry may still arrive from other sources, and True when all sources emit one
        # entry together. While True, fronts with one key are folded without inspecting the entries behind them.
        self._aligned = True
        self.unterminated_line: Line | None = None  # the last emitted line that arrived without a line end

    # -----------------------------------------------------------------------------------------------------------------
    # Input

    def add_lines(self, source: int, stream: str, lines: list[str], now: float) -> None:
        """Append lines that all of a source's ranks printed, in order."""
        queue = self._queues[source]
        if stream == "stderr":
            lines = [_STDERR + line for line in lines]
            queue.num_special += len(lines)
        self._push(queue, lines, sum(map(len, lines)), now, None)

    def add_item(
        self, source: int, item: Display | ClearOutput | Notice, now: float, ranks: Ranks | None = None
    ) -> None:
        """Append a display, clear-output or notice."""
        packed = _encode(item)
        entry = _ITEM + blake2b(packed, digest_size=16).hexdigest()
        self._push_payload(self._queues[source], entry, _EntryPayload(item, len(packed)), now, ranks)

    def add_folded_line(self, source: int, line: Line, now: float) -> None:
        """Append a line that the source has folded."""
        queue = self._queues[source]
        text = line.text
        if text[:1] in _SPECIAL:
            text = text.lstrip("".join(_SPECIAL))
        if not line.varying_numbers and line.end:
            special = line.stream == "stderr"
            queue.num_special += special
            self._push(queue, [_STDERR + text if special else text], len(text) + special, now, line.ranks)
            return
        payload = _EntryPayload(None, len(text))
        payload.line = line
        template, payload.member = split_folded_line(line)
        payload.template = (
            TextTemplate(_STDERR_KEY + template.key, template.numbers) if line.stream == "stderr" else template
        )
        self._push_payload(queue, self._new_entry(_FOLDED_LINE), payload, now, line.ranks)

    def add_truncation(self, source: int, num_lines: int, num_chars: int, now: float) -> None:
        """Record that lines are missing at this position."""
        queue = self._queues[source]
        if queue.truncation_index is None:
            self._push_payload(queue, self._new_entry(_TRUNCATION), _EntryPayload(Truncation(), 0), now, None)
            queue.truncation_index = len(queue.entries) - 1
        else:
            self._drop_entries(queue, len(queue.entries), now)
        self._truncation_of(queue).add(queue.ranks, num_chars, num_lines)

    def finish(self, source: int) -> None:
        """Record that the source is complete, so that the others do not wait for it."""
        self._queues[source].finished = True

    # -----------------------------------------------------------------------------------------------------------------
    # Output

    def is_empty(self, source: int) -> bool:
        """Whether everything from the source is emitted."""
        return not len(self._queues[source])

    def oldest_arrival(self) -> float | None:
        """Return when the front that has waited longest arrived."""
        return min((queue.oldest_arrival for queue in self._queues.values() if len(queue)), default=None)

    def pop_ready(self, now: float, *, final: bool, max_age_s: float, max_chars: int | None = None) -> list[FoldedItem]:
        """Pop and return what can be emitted now; with `final`, everything. Stops after `max_chars` of text."""
        out: list[FoldedItem] = []
        queues = list(self._queues.values())
        num_counted = 0
        self._enforce_limit(queues, now)
        while waiting := [queue for queue in queues if queue.start < len(queue.entries)]:
            if max_chars is not None:
                if max_chars <= 0:
                    break
                max_chars -= sum(len(item.text) + 1 for item in out[num_counted:] if isinstance(item, Line))
                num_counted = len(out)
            missing = not final and len(waiting) < len(queues) and any(not q.finished for q in queues if not len(q))
            front = waiting[0].front
            all_equal = [queue.entries[queue.start] for queue in waiting].count(front) == len(waiting)
            if all_equal and not missing:
                self._emit_run(waiting, self._run_length(waiting, max_chars), out)
                continue
            ready = final or any(
                q.oldest_arrival + max_age_s <= now or q.num_chars > self._limit_chars // 2 for q in waiting
            )
            if missing and not ready:
                break
            if len(waiting) == 1:
                num_ready = self._num_ready(waiting[0], now, max_age_s)
                self._emit_run(waiting, min(num_ready, self._run_length(waiting, max_chars)), out)
                continue
            chosen = waiting if all_equal else self._choose_group(waiting, ready)
            if chosen is None:
                break
            self._emit_front(chosen, out)
        return out

    def _choose_group(self, waiting: list[_SourceQueue], ready: bool) -> list[_SourceQueue] | None:
        """Return the sources whose fronts are emitted next as one; None to wait for more input."""
        groups: dict[str, list[_SourceQueue]] = {}
        for queue in waiting:
            groups.setdefault(self._template(queue.front).key, []).append(queue)
        if len(groups) == 1:
            return waiting
        lookahead = {id(queue): self._lookahead(queue) for queue in waiting}
        candidates: list[tuple[float, bool, list[_SourceQueue]]] = []  # (oldest arrival, others passed, members)
        for key, members in groups.items():
            others = [queue for other, queues in groups.items() if other != key for queue in queues]
            if any(key in lookahead[id(queue)] for queue in others):
                continue  # a matching entry follows in another queue
            others_passed = all(
                len(queue) > LOOKAHEAD
                or any(self._template(queue.front).key in lookahead[id(candidate)] for candidate in members)
                for queue in others
            )
            candidates.append((min(queue.oldest_arrival for queue in members), others_passed, members))
        if not candidates:
            # Each front has a match behind another front. Emitting the smallest group splits the fewest lines.
            self._aligned = False
            return min(groups.values(), key=len)
        if not ready:
            candidates = [candidate for candidate in candidates if candidate[1]]
        if not candidates:
            return None
        _, others_passed, members = min(candidates, key=operator.itemgetter(0))
        self._aligned = self._aligned and others_passed
        return members

    def _emit_front(self, group: list[_SourceQueue], out: list[FoldedItem]) -> None:
        """Emit the fronts of a group, which are equal or have one key."""
        entries = [queue.front for queue in group]
        if entries.count(entries[0]) == len(entries):
            self._emit_run(group, 1, out)
            return
        if entries[0][:1] == _TRUNCATION:
            self._emit_truncations(group, out)
            return
        folded = fold([self._front_member(queue) for queue in group])
        if folded is None:
            # Rows of data: shown unchanged, with the rows of one rank together.
            self._aligned = False
            self._emit_run([queue for queue in group if queue.front == entries[0]], 1, out)
            return
        lagging = self._select_lagging(group)
        if len(lagging) < len(group):
            self._emit_front(lagging, out)
            return
        stream = "stderr" if self._template(entries[0]).key[:1] == _STDERR_KEY else "stdout"
        line = line_of_fold(folded, stream, mergeable=self._mergeable)
        self._note_unterminated(entries, line)
        out.append(line)
        self._update_alignment(group, entries[:1])
        for queue, entry in zip(group, entries, strict=True):
            self._pop(queue, 1, self._num_chars(entry))

    def _emit_truncations(self, group: list[_SourceQueue], out: list[FoldedItem]) -> None:
        """Emit the gaps of several sources as one notice."""
        combined = Truncation()
        for queue in group:
            truncation = self._payloads[queue.front].item
            assert isinstance(truncation, Truncation)
            combined.merge(truncation)
            self._pop(queue, 1, 0)
        out.append(RankDisplay(tuple(sorted(combined.ranks)), combined.notice()))

    def _emit_run(self, group: list[_SourceQueue], length: int, out: list[FoldedItem]) -> None:
        """Emit the first entries of a group, which are equal in all of its queues."""
        first = group[0]
        run = first.entries[first.start : first.start + length]
        if first.entry_ranks is None:
            ranks = self._union(tuple(queue.ranks for queue in group))
            if first.num_special:
                out.extend(self._to_item(entry, ranks) for entry in run)
            else:
                out.extend([Line(ranks, "stdout", entry) for entry in run])
        else:
            for offset, entry in enumerate(run):
                ranks = self._union(tuple(queue.ranks_at(queue.start + offset) for queue in group))
                out.append(self._to_item(entry, ranks))
        self._update_alignment(group, run)
        num_chars = sum(map(self._num_chars, run)) if first.num_special else sum(map(len, run))
        for queue in group:
            self._pop(queue, length, num_chars)

    def _to_item(self, entry: str, ranks: Ranks) -> FoldedItem:
        kind = entry[:1]
        if kind not in _SPECIAL:
            return Line(ranks, "stdout", entry)
        if kind == _STDERR:
            return Line(ranks, "stderr", entry[1:])
        payload = self._payloads[entry]
        if payload.line is not None:
            line = payload.line
            plain = Line(line.ranks, line.stream, line.text)
            if self._mergeable:
                plain = Line(
                    line.ranks, line.stream, line.text, first_text=line.first_text, varying_numbers=line.varying_numbers
                )
            self._note_unterminated([entry], plain)
            return plain
        if isinstance(payload.item, Truncation):
            return RankDisplay(tuple(sorted(payload.item.ranks)), payload.item.notice())
        assert payload.item is not None
        return RankDisplay(ranks, payload.item)

    # -----------------------------------------------------------------------------------------------------------------
    # Lagging sources

    def _select_lagging(self, group: list[_SourceQueue]) -> list[_SourceQueue]:
        """Return the sources, of those with fronts of one key, that go first as the others are some lines ahead.

        The lines of a loop all have one key, so a source that lags one step would be folded with the others' next step,
        and so on until the end. A step counter reveals this: another pairing has more equal numbers.
        """
        late = [queue for queue in group if queue.missed and self._is_late(queue, group)]
        if late:
            return late
        if self._aligned:
            return group
        fronts = {self._template(queue.front).numbers for queue in group}
        if not 2 <= len(fronts) <= MAX_LAG_LINES:
            return group
        lagging = [
            queue
            for queue in group
            if any(self._has_later_match(queue, other) and not self._has_later_match(other, queue) for other in group)
        ]
        return lagging if lagging and len(lagging) < len(group) else group

    def _is_late(self, queue: _SourceQueue, group: list[_SourceQueue]) -> bool:
        """Whether a source's front belongs to a line emitted without it rather than to the others' fronts."""
        key, numbers = self._template(queue.front)
        best = max((_num_equal(numbers, self._template(q.front).numbers) for q in group if q is not queue), default=-1)
        for index, template in enumerate(queue.missed):
            if template.key == key and _num_equal(numbers, template.numbers) > best:
                for _ in range(index + 1):
                    queue.missed.popleft()
                return True
        return False

    def _has_later_match(self, queue: _SourceQueue, other: _SourceQueue) -> bool:
        """Whether a later line of a source matches the other's front better than its own front does."""
        key, target = self._template(other.front)
        best = _num_equal(self._template(queue.front).numbers, target)
        later = queue.entries[queue.start + 1 : queue.start + 1 + LOOKAHEAD]
        num_compared = 0
        for entry in later:
            template = self._template(entry)
            if template.key != key:
                continue
            if _num_equal(template.numbers, target) > best:
                return True
            num_compared += 1
            if num_compared == MAX_LAG_LINES:
                break
        return False

    def _update_alignment(self, group: list[_SourceQueue], run: list[str]) -> None:
        """Record which sources took part when entries were emitted."""
        if len(group) > 1:
            for queue in group:
                queue.missed.clear()
        if len(group) == len(self._queues):
            self._aligned = True
            return
        absent = [queue for queue in self._queues.values() if not len(queue) and not queue.finished]
        if absent:
            self._aligned = False
            templates = [self._template(entry) for entry in run[-LOOKAHEAD:]]
            for queue in absent:
                queue.missed.extend(templates)
        elif len(group) == sum(1 for queue in self._queues.values() if len(queue)):
            self._aligned = True

    # -----------------------------------------------------------------------------------------------------------------
    # Queue inspection

    def _run_length(self, waiting: list[_SourceQueue], max_chars: int | None) -> int:
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

    def _num_ready(self, queue: _SourceQueue, now: float, max_age_s: float) -> int:
        """Return how many entries the only non-empty queue may emit alone: those past the maximum age, else all."""
        num_aged = 0
        for count, arrived in queue.arrivals:
            if arrived + max_age_s > now:  # the same sum as in the deadline, so the comparison is exact then
                break
            num_aged += int(count)
        return num_aged or len(queue)

    def _lookahead(self, queue: _SourceQueue) -> dict[str, int]:
        """Return the keys behind a queue's front, within the lookahead window, with their counts."""
        if queue.lookahead_keys is None:
            queue.lookahead_keys, queue.lookahead_end = {}, queue.start + 1
        stop = min(len(queue.entries), queue.start + 1 + LOOKAHEAD)
        for index in range(queue.lookahead_end, stop):
            key = self._template(queue.entries[index]).key
            queue.lookahead_keys[key] = queue.lookahead_keys.get(key, 0) + 1
        queue.lookahead_end = max(queue.lookahead_end, stop)
        return queue.lookahead_keys

    def _template(self, entry: str) -> TextTemplate:
        template = self._template_cache.get(entry)
        if template is None:
            kind = entry[:1]
            if kind not in _SPECIAL:
                template = template_of(entry)
            elif kind == _STDERR:
                template = template_of(entry[1:])
                template = TextTemplate(_STDERR_KEY + template.key, template.numbers)
            elif kind == _TRUNCATION:
                return _TRUNCATION_TEMPLATE
            else:
                payload = self._payloads.get(entry)
                return (payload.template if payload is not None else None) or TextTemplate(entry, ())
            if len(self._template_cache) > 4096:
                self._template_cache.clear()
            self._template_cache[entry] = template
        return template

    def _front_member(self, queue: _SourceQueue) -> FoldMember:
        entry = queue.front
        kind = entry[:1]
        if kind == _FOLDED_LINE:
            member = self._payloads[entry].member
            assert member is not None
            return member
        text = entry[1:] if kind == _STDERR else entry
        return FoldMember(queue.ranks_at(queue.start), text, self._template(entry).numbers)

    def _num_chars(self, entry: str) -> int:
        payload = self._payloads.get(entry) if entry[:1] in _SPECIAL else None
        return len(entry) if payload is None else payload.num_chars

    def _note_unterminated(self, entries: Sequence[str], line: Line) -> None:
        for entry in entries:
            payload = self._payloads.get(entry)
            if payload is not None and payload.line is not None and not payload.line.end:
                self.unterminated_line = line

    def _union(self, rank_sets: tuple[Ranks, ...]) -> Ranks:
        if len(rank_sets) == 1:
            return rank_sets[0]
        union = self._union_cache.get(rank_sets)
        if union is None:
            if len(self._union_cache) > 1024:
                self._union_cache.clear()
            union = self._union_cache[rank_sets] = tuple(sorted({rank for ranks in rank_sets for rank in ranks}))
        return union

    # -----------------------------------------------------------------------------------------------------------------
    # Queue maintenance

    def _push(self, queue: _SourceQueue, entries: list[str], num_chars: int, now: float, ranks: Ranks | None) -> None:
        if not entries:
            return
        queue.entries += entries
        if queue.entry_ranks is not None:
            queue.entry_ranks += [queue.ranks if ranks is None else ranks] * len(entries)
        if queue.arrivals and queue.arrivals[-1][1] == now:
            queue.arrivals[-1][0] += len(entries)
        else:
            queue.arrivals.append([len(entries), now])
        queue.num_chars += num_chars
        if queue.num_chars > MAX_OVERFLOW * self._limit_chars and len(queue) > 2:
            self._truncate(queue, *self._truncation_range(queue), now)

    def _push_payload(
        self, queue: _SourceQueue, entry: str, payload: _EntryPayload, now: float, ranks: Ranks | None
    ) -> None:
        self._payloads.setdefault(entry, payload).ref_count += 1
        queue.num_special += 1
        self._push(queue, [entry], payload.num_chars, now, ranks)

    def _pop(self, queue: _SourceQueue, count: int, num_chars: int) -> None:
        """Remove emitted entries from the front."""
        if queue.num_special:
            self._release_payloads(queue, queue.start, queue.start + count)
        queue.start += count
        queue.num_chars -= num_chars
        if queue.truncation_index is not None and queue.truncation_index < queue.start:
            queue.truncation_index = None
        if queue.start == len(queue.entries) or (queue.start > 4096 and 2 * queue.start > len(queue.entries)):
            del queue.entries[: queue.start]
            if queue.entry_ranks is not None:
                del queue.entry_ranks[: queue.start]
            if queue.truncation_index is not None:
                queue.truncation_index -= queue.start
            queue.start = 0
            queue.lookahead_keys = None
        elif queue.lookahead_keys is not None:
            if count > 1:
                queue.lookahead_keys = None
            elif queue.lookahead_end > queue.start:
                key = self._template(queue.front).key
                queue.lookahead_keys[key] -= 1
                if not queue.lookahead_keys[key]:
                    del queue.lookahead_keys[key]
            else:
                queue.lookahead_end = queue.start + 1
        while count:
            oldest = queue.arrivals[0]
            taken = min(count, int(oldest[0]))
            oldest[0] -= taken
            count -= taken
            if not oldest[0]:
                queue.arrivals.popleft()

    def _release_payloads(self, queue: _SourceQueue, start: int, stop: int) -> None:
        """Drop the payloads of special entries."""
        for entry in queue.entries[start:stop]:
            if entry[:1] not in _SPECIAL:
                continue
            queue.num_special -= 1
            payload = self._payloads.get(entry)
            if payload is not None:
                payload.ref_count -= 1
                if not payload.ref_count:
                    del self._payloads[entry]

    def _enforce_limit(self, queues: list[_SourceQueue], now: float) -> None:
        """Bring all queues below their limit by dropping entries from the middle.

        Ranks that run the same code overflow alike, so the same range is dropped from all queues that are rather full.
        What follows the gap then stays aligned.
        """
        fullest = max(queues, key=lambda queue: queue.num_chars)
        if fullest.num_chars <= self._limit_chars:
            return
        offset, count = self._truncation_range(fullest)
        for queue in queues:
            if queue.num_chars > self._limit_chars // 2:
                self._truncate(queue, offset, count, now)
        for queue in queues:
            if queue.num_chars > self._limit_chars:
                self._truncate(queue, *self._truncation_range(queue), now)

    def _truncation_range(self, queue: _SourceQueue) -> tuple[int, int]:
        """Return where to truncate a queue, as an offset from its front, and how many entries to drop."""
        if queue.truncation_index is None:
            start, num_chars = queue.start, 0
            while start < len(queue.entries) - 2 and num_chars < self._limit_chars // 2:
                num_chars += self._num_chars(queue.entries[start])
                start += 1
            offset = start - queue.start
        else:
            start = queue.truncation_index + 1
            offset = queue.truncation_index - queue.start
        # Somewhat below the limit, so that truncation is rare, but not so far below that a source with less output
        # loses its last lines. The last entry is retained.
        excess = queue.num_chars - self._limit_chars * 7 // 8
        candidates = queue.entries[start:-1]
        only_lines = queue.num_special == (queue.truncation_index is not None)
        sizes = itertools.accumulate(map(len if only_lines else self._num_chars, candidates))
        return offset, next((count for count, size in enumerate(sizes, 1) if size >= excess), len(candidates))

    def _truncate(self, queue: _SourceQueue, offset: int, count: int, now: float) -> None:
        """Drop `count` entries at `offset`, if the queue has them and no gap elsewhere."""
        if queue.truncation_index is None:
            if len(queue) < offset + 2:
                return
            queue.truncation_index = queue.start + offset
            entry = self._new_entry(_TRUNCATION)
            self._payloads[entry] = payload = _EntryPayload(Truncation(), 0)
            payload.ref_count = 1
            queue.num_special += 1
            queue.entries.insert(queue.truncation_index, entry)
            if queue.entry_ranks is not None:
                queue.entry_ranks.insert(queue.truncation_index, queue.ranks)
            queue.arrivals[0][0] += 1  # `_drop_entries` recounts
        if queue.truncation_index == queue.start + offset:
            self._drop_entries(queue, min(queue.truncation_index + 1 + count, len(queue.entries) - 1), now)

    def _drop_entries(self, queue: _SourceQueue, stop: int, now: float) -> None:
        """Drop the entries behind a queue's gap, up to `stop`."""
        assert queue.truncation_index is not None
        start, truncation = queue.truncation_index + 1, self._truncation_of(queue)
        if queue.num_special == 1 and queue.entry_ranks is None:  # the gap itself; the rest is lines of all its ranks
            num_chars = sum(map(len, queue.entries[start:stop]))
            truncation.add(queue.ranks, num_chars, stop - start)
            queue.num_chars -= num_chars
        else:
            for index in range(start, stop):
                entry = queue.entries[index]
                num_chars = self._num_chars(entry)
                if entry[:1] == _ITEM:
                    truncation.add_display(queue.ranks_at(index), num_chars)
                else:
                    truncation.add(queue.ranks_at(index), num_chars)
                queue.num_chars -= num_chars
            self._release_payloads(queue, start, stop)
        first = queue.oldest_arrival
        del queue.entries[start:stop]
        if queue.entry_ranks is not None:
            del queue.entry_ranks[start:stop]
        queue.lookahead_keys = None
        queue.arrivals = deque([[start - queue.start, first]])
        if len(queue.entries) > start:
            queue.arrivals.append([len(queue.entries) - start, now])

    def _truncation_of(self, queue: _SourceQueue) -> Truncation:
        assert queue.truncation_index is not None
        truncation = self._payloads[queue.entries[queue.truncation_index]].item
        assert isinstance(truncation, Truncation)
        return truncation

    def _new_entry(self, kind: str) -> str:
        self._next_number += 1
        return f"{kind}{self._next_number}"


def split_folded_line(line: Line) -> tuple[TextTemplate, FoldMember]:
    """Convert a folded line to a member of another fold. Varying numbers that do not fit its text are ignored."""
    text = line.first_text or line.text
    template = template_of(text)
    num_numbers, num_ranks = len(template.numbers), len(line.ranks)
    fitting = (one for one in line.varying_numbers if 0 <= one.position < num_numbers and len(one.texts) == num_ranks)
    return template, FoldMember(line.ranks, text, template.numbers, {one.position: one.texts for one in fitting})


def line_of_fold(folded: Fold, stream: str, *, mergeable: bool, live: bool = False) -> Line:
    """Convert a fold of lines to the `Line` to be sent."""
    assert stream in ("stdout", "stderr")
    if mergeable and folded.varying:
        text, varying = folded.first_text, folded.varying
        return Line(folded.ranks, stream, folded.text, live, first_text=text, varying_numbers=varying)  # type: ignore[arg-type]
    return Line(folded.ranks, stream, folded.text, live)  # type: ignore[arg-type]


def _num_equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(map(operator.eq, left, right))
