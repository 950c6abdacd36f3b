"""Sequences of several sources, brought side by side: what they say alike at about the same place goes out as one.

A source is a rank, or a host that speaks for several ranks. Each has a queue, and a queue is only ever taken from its
front, so each source's order is kept whatever is folded. The art is in the choice of which fronts go next:

- Fronts that are alike on all sources go as one.
- A front that another source has further back in its queue lets that source come up first.
- A front that nobody else has goes alone, at once if the others have shown that they went on without it, else when it
  has waited for long enough.

Time comes from outside. Nothing here waits.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from meshbook.fold.cuts import Cut
from meshbook.fold.numbers import Fold, Member, Shape, fold, shape_of
from meshbook.ids import Ranks
from meshbook.wire.messages import ClearOutput, Display, FoldedItem, Line, Notice, RankDisplay

# How many entries of a queue are looked at for a partner of another source's front.
WINDOW = 64
# How many further lines of the same shape are looked at to see whether a source is some lines behind.
BEHIND = 16
# How far above its limit a queue may grow between two times that something is taken out, in times of the limit.
MAX_OVERFLOW = 4

# An entry of a queue is a str, so that stretches of two queues are compared at the speed of C. A line of stdout stands
# for itself; anything else starts with one of these, none of which is in text that comes here (rows.CONTROL).
_STDERR = "\0"  # then the line
_ITEM = "\1"  # then a digest: equal displays have equal entries
_CUT = "\2"  # then a number: a place where something was dropped
_SAID = "\3"  # then a number: a folded line that a host sent with more to it than text
_SPECIAL = frozenset((_STDERR, _ITEM, _CUT, _SAID))
# What the key of a line's shape starts with where the line is stderr's. Not in a key of stdout's, see _SPECIAL.
_STDERR_KEY = _STDERR
_CUT_SHAPE = Shape(_CUT, ())  # all gaps have one key, so sources come together at them

_digest_of = msgspec.msgpack.Encoder().encode


class _Stored:
    """What an entry that is not plain text stands for."""

    __slots__ = ("count", "line", "member", "num_chars", "shape", "thing")

    def __init__(self, thing: Display | ClearOutput | Notice | Cut | None, num_chars: int) -> None:
        self.thing = thing
        self.num_chars = num_chars
        self.count = 0  # queues that hold it, each time they do
        self.line: Line | None = None  # of _SAID, with what it is made of
        self.member: Member | None = None
        self.shape: Shape | None = None


class _Queue:
    """What one source has said and is not out yet."""

    __slots__ = (
        "ahead", "arrivals", "counted", "cut_at", "done", "entries", "num_chars", "num_special", "owed", "ranks",
        "start", "voices",
    )  # fmt: skip

    def __init__(self, ranks: Ranks, several: bool) -> None:
        self.ranks = ranks
        self.entries: list[str] = []
        self.start = 0  # entries before this one are out
        self.voices: list[Ranks] | None = [] if several else None  # who of the source said each entry; None: all of it
        self.arrivals: deque[list[float]] = deque()  # [how many entries, when], oldest first
        self.num_chars = 0
        self.num_special = 0  # entries that are not plain lines of stdout
        self.cut_at: int | None = None  # where in `entries` the cut is, if there is one
        self.done = False
        # Keys of the entries behind the front, up to `counted`, with how often they are there. None: not looked at yet.
        self.ahead: dict[str, int] | None = None
        self.counted = 0
        self.owed: deque[Shape] = deque(maxlen=WINDOW)  # lines that went out without this source, which was late

    def __len__(self) -> int:
        return len(self.entries) - self.start

    @property
    def front(self) -> str:
        return self.entries[self.start]

    @property
    def arrived(self) -> float:
        return self.arrivals[0][1]

    def ranks_at(self, index: int) -> Ranks:
        return self.ranks if self.voices is None else self.voices[index]


class Aligner:
    """Queues of several sources, folded from their fronts.

    Args:
        sources: number of each source and the ranks it speaks for.
        several: an entry may be of some of its source's ranks only.
        limit_chars: of one source's queue when something is taken out; the middle of what is more is dropped, and a
            notice says so.
        mergeable: lines keep the numbers of each rank, so that they can be folded again.
    """

    def __init__(
        self, sources: Iterable[tuple[int, Ranks]], *, several: bool, limit_chars: int, mergeable: bool
    ) -> None:
        self._queues = {source: _Queue(ranks, several) for source, ranks in sorted(sources)}
        self._limit = limit_chars
        self._mergeable = mergeable
        self._stored: dict[str, _Stored] = {}
        self._next_number = 0
        self._shapes: dict[str, Shape] = {}
        self._unions: dict[tuple[Ranks, ...], Ranks] = {}
        # False since an entry went out of which it is not sure that the other sources will not say it too, until an
        # entry of all sources goes out. While True, fronts of one key are folded without a look at what is behind them.
        self._in_step = True
        self.unended: Line | None = None  # the last line that went out of those that came without a line end

    # -----------------------------------------------------------------------------------------------------------------
    # In

    def add_lines(self, source: int, stream: str, lines: list[str], now: float) -> None:
        """Lines of all of a source's ranks, in order."""
        queue = self._queues[source]
        if stream == "stderr":
            lines = [_STDERR + line for line in lines]
            queue.num_special += len(lines)
        self._push(queue, lines, sum(map(len, lines)), now, None)

    def add_item(
        self, source: int, item: Display | ClearOutput | Notice, now: float, ranks: Ranks | None = None
    ) -> None:
        """A display or the like."""
        packed = _digest_of(item)
        entry = _ITEM + blake2b(packed, digest_size=16).hexdigest()
        self._push_stored(self._queues[source], entry, _Stored(item, len(packed)), now, ranks)

    def add_line(self, source: int, line: Line, now: float) -> None:
        """A line that was folded by the source."""
        queue = self._queues[source]
        text = line.text
        if text[:1] in _SPECIAL:
            text = text.lstrip("".join(_SPECIAL))
        if not line.varying and line.end:
            special = line.stream == "stderr"
            queue.num_special += special
            self._push(queue, [_STDERR + text if special else text], len(text) + special, now, line.ranks)
            return
        stored = _Stored(None, len(text))
        stored.line = line
        shape, stored.member = said(line)
        stored.shape = Shape(_STDERR_KEY + shape.key, shape.numbers) if line.stream == "stderr" else shape
        self._push_stored(queue, self._numbered(_SAID), stored, now, line.ranks)

    def add_cut(self, source: int, num_lines: int, num_chars: int, now: float) -> None:
        """Say that lines are missing here that never came."""
        queue = self._queues[source]
        if queue.cut_at is None:
            self._push_stored(queue, self._numbered(_CUT), _Stored(Cut(), 0), now, None)
            queue.cut_at = len(queue.entries) - 1
        else:
            self._drop(queue, len(queue.entries), now)
        self._cut_of(queue).add(queue.ranks, num_chars, num_lines)

    def finish(self, source: int) -> None:
        """The source will say nothing more; the others need not wait for it."""
        self._queues[source].done = True

    # -----------------------------------------------------------------------------------------------------------------
    # Out

    def is_empty(self, source: int) -> bool:
        """Whether all that the source said is out."""
        return not len(self._queues[source])

    def oldest(self) -> float | None:
        """When the front that waits longest came in."""
        return min((queue.arrived for queue in self._queues.values() if len(queue)), default=None)

    def take(
        self, now: float, *, final: bool, max_age_s: float, max_chars: int | None = None
    ) -> list[FoldedItem]:
        """What can go out now; all there is, when `final`. Stops once `max_chars` of text are out."""
        out: list[FoldedItem] = []
        queues = list(self._queues.values())
        num_looked_at = 0
        self._relieve(queues, now)
        while waiting := [queue for queue in queues if queue.start < len(queue.entries)]:
            if max_chars is not None:
                if max_chars <= 0:
                    break
                max_chars -= sum(len(item.text) + 1 for item in out[num_looked_at:] if isinstance(item, Line))
                num_looked_at = len(out)
            missing = not final and len(waiting) < len(queues) and any(not q.done for q in queues if not len(q))
            front = waiting[0].front
            alike = [queue.entries[queue.start] for queue in waiting].count(front) == len(waiting)
            if alike and not missing:
                self._take_run(waiting, self._run_length(waiting, max_chars), out)
                continue
            ripe = final or any(q.arrived + max_age_s <= now or q.num_chars > self._limit // 2 for q in waiting)
            if missing and not ripe:
                break
            if len(waiting) == 1:
                num_ripe = self._num_ripe(waiting[0], now, max_age_s)
                self._take_run(waiting, min(num_ripe, self._run_length(waiting, max_chars)), out)
                continue
            chosen = waiting if alike else self._choose(waiting, ripe)
            if chosen is None:
                break
            self._take_front(chosen, out)
        return out

    def _choose(self, waiting: list[_Queue], ripe: bool) -> list[_Queue] | None:
        """The sources whose fronts go next, as one; None to wait for more."""
        groups: dict[str, list[_Queue]] = {}
        for queue in waiting:
            groups.setdefault(self._shape(queue.front).key, []).append(queue)
        if len(groups) == 1:
            return waiting
        ahead = {id(queue): self._ahead(queue) for queue in waiting}
        free: list[tuple[float, bool, list[_Queue]]] = []  # oldest arrival, others went on, members
        for key, members in groups.items():
            others = [queue for other, queues in groups.items() if other != key for queue in queues]
            if any(key in ahead[id(queue)] for queue in others):
                continue  # a partner is on its way
            went_on = all(
                len(queue) > WINDOW or any(self._shape(queue.front).key in ahead[id(one)] for one in members)
                for queue in others
            )
            free.append((min(queue.arrived for queue in members), went_on, members))
        if not free:
            # Each front has a partner behind another front. The smallest group breaks up the fewest lines.
            self._in_step = False
            return min(groups.values(), key=len)
        if not ripe:
            free = [one for one in free if one[1]]
        if not free:
            return None
        _, went_on, members = min(free, key=operator.itemgetter(0))
        self._in_step = self._in_step and went_on
        return members

    def _take_front(self, group: list[_Queue], out: list[FoldedItem]) -> None:
        """Let the fronts of a group go out, which are equal or have one key."""
        entries = [queue.front for queue in group]
        if entries.count(entries[0]) == len(entries):
            self._take_run(group, 1, out)
            return
        if entries[0][:1] == _CUT:
            self._take_cuts(group, out)
            return
        folded = fold([self._member(queue) for queue in group])
        if folded is None:
            # Rows of data. Each rank's are shown as they are, and one rank's rows together.
            self._in_step = False
            self._take_run([queue for queue in group if queue.front == entries[0]], 1, out)
            return
        first = self._without_stragglers(group)
        if len(first) < len(group):
            self._take_front(first, out)
            return
        stream = "stderr" if self._shape(entries[0]).key[:1] == _STDERR_KEY else "stdout"
        line = folded_line(folded, stream, mergeable=self._mergeable)
        self._note_end(entries, line)
        out.append(line)
        self._note_step(group, entries[:1])
        for queue, entry in zip(group, entries, strict=True):
            self._pop(queue, 1, self._num_chars(entry))

    def _take_cuts(self, group: list[_Queue], out: list[FoldedItem]) -> None:
        """Let gaps of several sources go out as one."""
        whole = Cut()
        for queue in group:
            cut = self._stored[queue.front].thing
            assert isinstance(cut, Cut)
            whole.include(cut)
            self._pop(queue, 1, 0)
        out.append(RankDisplay(tuple(sorted(whole.ranks)), whole.notice()))

    def _take_run(self, group: list[_Queue], length: int, out: list[FoldedItem]) -> None:
        """Let the first entries of a group go out, which are the same in all of its queues."""
        first = group[0]
        run = first.entries[first.start : first.start + length]
        if first.voices is None:
            ranks = self._union(tuple(queue.ranks for queue in group))
            if first.num_special:
                out.extend(self._shown(entry, ranks) for entry in run)
            else:
                out.extend([Line(ranks, "stdout", entry) for entry in run])
        else:
            for step, entry in enumerate(run):
                ranks = self._union(tuple(queue.ranks_at(queue.start + step) for queue in group))
                out.append(self._shown(entry, ranks))
        self._note_step(group, run)
        num_chars = sum(map(self._num_chars, run)) if first.num_special else sum(map(len, run))
        for queue in group:
            self._pop(queue, length, num_chars)

    def _shown(self, entry: str, ranks: Ranks) -> FoldedItem:
        kind = entry[:1]
        if kind not in _SPECIAL:
            return Line(ranks, "stdout", entry)
        if kind == _STDERR:
            return Line(ranks, "stderr", entry[1:])
        stored = self._stored[entry]
        if stored.line is not None:
            line = stored.line
            plain = Line(line.ranks, line.stream, line.text)
            if self._mergeable:
                plain = Line(line.ranks, line.stream, line.text, lead=line.lead, varying=line.varying)
            self._note_end([entry], plain)
            return plain
        if isinstance(stored.thing, Cut):
            return RankDisplay(tuple(sorted(stored.thing.ranks)), stored.thing.notice())
        assert stored.thing is not None
        return RankDisplay(ranks, stored.thing)

    # -----------------------------------------------------------------------------------------------------------------
    # Sources that lag behind

    def _without_stragglers(self, group: list[_Queue]) -> list[_Queue]:
        """Of sources with fronts of one key: those that must go first, since the others are some lines ahead of them.

        Lines of a loop all have one key, so a source that is a step behind would be folded with the others' next step,
        and so for ever after. A step counter gives it away: there is a pairing in which more numbers are equal.
        """
        late = [queue for queue in group if queue.owed and self._is_late(queue, group)]
        if late:
            return late
        if self._in_step:
            return group
        fronts = {self._shape(queue.front).numbers for queue in group}
        if not 2 <= len(fronts) <= BEHIND:
            return group
        behind = [
            queue
            for queue in group
            if any(self._catches_up(queue, other) and not self._catches_up(other, queue) for other in group)
        ]
        return behind if behind and len(behind) < len(group) else group

    def _is_late(self, queue: _Queue, group: list[_Queue]) -> bool:
        """Whether a source's front belongs to a line that went out without it, rather than to the others' fronts."""
        key, numbers = self._shape(queue.front)
        best = max((_num_equal(numbers, self._shape(q.front).numbers) for q in group if q is not queue), default=-1)
        for at, shape in enumerate(queue.owed):
            if shape.key == key and _num_equal(numbers, shape.numbers) > best:
                for _ in range(at + 1):
                    queue.owed.popleft()
                return True
        return False

    def _catches_up(self, queue: _Queue, other: _Queue) -> bool:
        """Whether a later line of a source is more like the other's front than its own front is."""
        key, target = self._shape(other.front)
        best = _num_equal(self._shape(queue.front).numbers, target)
        later = queue.entries[queue.start + 1 : queue.start + 1 + WINDOW]
        alike = 0
        for entry in later:
            shape = self._shape(entry)
            if shape.key != key:
                continue
            if _num_equal(shape.numbers, target) > best:
                return True
            alike += 1
            if alike == BEHIND:
                break
        return False

    def _note_step(self, group: list[_Queue], run: list[str]) -> None:
        """Remember who was there when entries went out."""
        if len(group) > 1:
            for queue in group:
                queue.owed.clear()
        if len(group) == len(self._queues):
            self._in_step = True
            return
        absent = [queue for queue in self._queues.values() if not len(queue) and not queue.done]
        if absent:
            self._in_step = False
            shapes = [self._shape(entry) for entry in run[-WINDOW:]]
            for queue in absent:
                queue.owed.extend(shapes)
        elif len(group) == sum(1 for queue in self._queues.values() if len(queue)):
            self._in_step = True

    # -----------------------------------------------------------------------------------------------------------------
    # Looking at queues

    def _run_length(self, waiting: list[_Queue], max_chars: int | None) -> int:
        """How many entries from the front on are the same in all queues. The fronts are.

        No more than what makes about `max_chars`, in entries of the average length.
        """
        longest = min(map(len, waiting))
        first, rest = waiting[0], waiting[1:]
        if max_chars is not None:
            longest = max(1, min(longest, max_chars * len(first) // (first.num_chars + 1)))
        if not rest:
            return longest
        length, step = 1, 16
        while length < longest:
            stop = min(length + step, longest)
            part = first.entries[first.start + length : first.start + stop]
            others = [queue.entries[queue.start + length : queue.start + stop] for queue in rest]
            if any(other != part for other in others):
                same = (all(other[at] == entry for other in others) for at, entry in enumerate(part))
                return length + next(at for at, equal in enumerate(same) if not equal)
            length, step = stop, min(2 * step, 4096)
        return length

    def _num_ripe(self, queue: _Queue, now: float, max_age_s: float) -> int:
        """How many entries of the only queue that has any may go without the others: the ones that waited, or all."""
        num_aged = 0
        for count, arrived in queue.arrivals:
            if arrived + max_age_s > now:  # the same sum as in a deadline, so that at a deadline it is not in doubt
                break
            num_aged += int(count)
        return num_aged or len(queue)

    def _ahead(self, queue: _Queue) -> dict[str, int]:
        """The keys behind a queue's front, as far as the window goes."""
        if queue.ahead is None:
            queue.ahead, queue.counted = {}, queue.start + 1
        stop = min(len(queue.entries), queue.start + 1 + WINDOW)
        for index in range(queue.counted, stop):
            key = self._shape(queue.entries[index]).key
            queue.ahead[key] = queue.ahead.get(key, 0) + 1
        queue.counted = max(queue.counted, stop)
        return queue.ahead

    def _shape(self, entry: str) -> Shape:
        shape = self._shapes.get(entry)
        if shape is None:
            kind = entry[:1]
            if kind not in _SPECIAL:
                shape = shape_of(entry)
            elif kind == _STDERR:
                shape = shape_of(entry[1:])
                shape = Shape(_STDERR_KEY + shape.key, shape.numbers)
            elif kind == _CUT:
                return _CUT_SHAPE
            else:
                stored = self._stored.get(entry)
                return (stored.shape if stored is not None else None) or Shape(entry, ())
            if len(self._shapes) > 4096:
                self._shapes.clear()
            self._shapes[entry] = shape
        return shape

    def _member(self, queue: _Queue) -> Member:
        entry = queue.front
        kind = entry[:1]
        if kind == _SAID:
            made_of = self._stored[entry].member
            assert made_of is not None
            return made_of
        text = entry[1:] if kind == _STDERR else entry
        return Member(queue.ranks_at(queue.start), text, self._shape(entry).numbers)

    def _num_chars(self, entry: str) -> int:
        stored = self._stored.get(entry) if entry[:1] in _SPECIAL else None
        return len(entry) if stored is None else stored.num_chars

    def _note_end(self, entries: Sequence[str], line: Line) -> None:
        for entry in entries:
            stored = self._stored.get(entry)
            if stored is not None and stored.line is not None and not stored.line.end:
                self.unended = line

    def _union(self, voices: tuple[Ranks, ...]) -> Ranks:
        if len(voices) == 1:
            return voices[0]
        union = self._unions.get(voices)
        if union is None:
            if len(self._unions) > 1024:
                self._unions.clear()
            union = self._unions[voices] = tuple(sorted({rank for ranks in voices for rank in ranks}))
        return union

    # -----------------------------------------------------------------------------------------------------------------
    # Queues' upkeep

    def _push(self, queue: _Queue, entries: list[str], num_chars: int, now: float, ranks: Ranks | None) -> None:
        if not entries:
            return
        queue.entries += entries
        if queue.voices is not None:
            queue.voices += [queue.ranks if ranks is None else ranks] * len(entries)
        if queue.arrivals and queue.arrivals[-1][1] == now:
            queue.arrivals[-1][0] += len(entries)
        else:
            queue.arrivals.append([len(entries), now])
        queue.num_chars += num_chars
        if queue.num_chars > MAX_OVERFLOW * self._limit and len(queue) > 2:
            self._cut(queue, *self._gap(queue), now)

    def _push_stored(self, queue: _Queue, entry: str, stored: _Stored, now: float, ranks: Ranks | None) -> None:
        self._stored.setdefault(entry, stored).count += 1
        queue.num_special += 1
        self._push(queue, [entry], stored.num_chars, now, ranks)

    def _pop(self, queue: _Queue, count: int, num_chars: int) -> None:
        """Take entries off the front that are out."""
        if queue.num_special:
            self._forget(queue, queue.start, queue.start + count)
        queue.start += count
        queue.num_chars -= num_chars
        if queue.cut_at is not None and queue.cut_at < queue.start:
            queue.cut_at = None
        if queue.start == len(queue.entries) or (queue.start > 4096 and 2 * queue.start > len(queue.entries)):
            del queue.entries[: queue.start]
            if queue.voices is not None:
                del queue.voices[: queue.start]
            if queue.cut_at is not None:
                queue.cut_at -= queue.start
            queue.start = 0
            queue.ahead = None
        elif queue.ahead is not None:
            if count > 1:
                queue.ahead = None
            elif queue.counted > queue.start:
                key = self._shape(queue.front).key
                queue.ahead[key] -= 1
                if not queue.ahead[key]:
                    del queue.ahead[key]
            else:
                queue.counted = queue.start + 1
        while count:
            oldest = queue.arrivals[0]
            taken = min(count, int(oldest[0]))
            oldest[0] -= taken
            count -= taken
            if not oldest[0]:
                queue.arrivals.popleft()

    def _forget(self, queue: _Queue, start: int, stop: int) -> None:
        """Let go of what special entries stand for."""
        for entry in queue.entries[start:stop]:
            if entry[:1] not in _SPECIAL:
                continue
            queue.num_special -= 1
            stored = self._stored.get(entry)
            if stored is not None:
                stored.count -= 1
                if not stored.count:
                    del self._stored[entry]

    def _relieve(self, queues: list[_Queue], now: float) -> None:
        """Bring all queues below their limit by dropping from their middles.

        Ranks that run the same code flood alike, so what is dropped is the same stretch of all queues that are rather
        full: what follows the gap is then still side by side.
        """
        fullest = max(queues, key=lambda queue: queue.num_chars)
        if fullest.num_chars <= self._limit:
            return
        offset, count = self._gap(fullest)
        for queue in queues:
            if queue.num_chars > self._limit // 2:
                self._cut(queue, offset, count, now)
        for queue in queues:
            if queue.num_chars > self._limit:
                self._cut(queue, *self._gap(queue), now)

    def _gap(self, queue: _Queue) -> tuple[int, int]:
        """Where a queue is to be cut, counted from its front, and how many entries are to go."""
        if queue.cut_at is None:
            start, num_chars = queue.start, 0
            while start < len(queue.entries) - 2 and num_chars < self._limit // 2:
                num_chars += self._num_chars(queue.entries[start])
                start += 1
            offset = start - queue.start
        else:
            start = queue.cut_at + 1
            offset = queue.cut_at - queue.start
        # Somewhat below the limit, so that this happens once for many entries, and not so far below it that a source
        # which has said less by now would lose what it said last. The last entry stays.
        excess = queue.num_chars - self._limit * 7 // 8
        candidates = queue.entries[start:-1]
        only_lines = queue.num_special == (queue.cut_at is not None)
        sizes = itertools.accumulate(map(len if only_lines else self._num_chars, candidates))
        return offset, next((count for count, size in enumerate(sizes, 1) if size >= excess), len(candidates))

    def _cut(self, queue: _Queue, offset: int, count: int, now: float) -> None:
        """Drop `count` entries at `offset`, if the queue has them and is not cut elsewhere already."""
        if queue.cut_at is None:
            if len(queue) < offset + 2:
                return
            queue.cut_at = queue.start + offset
            entry = self._numbered(_CUT)
            self._stored[entry] = stored = _Stored(Cut(), 0)
            stored.count = 1
            queue.num_special += 1
            queue.entries.insert(queue.cut_at, entry)
            if queue.voices is not None:
                queue.voices.insert(queue.cut_at, queue.ranks)
            queue.arrivals[0][0] += 1  # _drop counts anew
        if queue.cut_at == queue.start + offset:
            self._drop(queue, min(queue.cut_at + 1 + count, len(queue.entries) - 1), now)

    def _drop(self, queue: _Queue, stop: int, now: float) -> None:
        """Drop what is behind a queue's cut, up to `stop`."""
        assert queue.cut_at is not None
        start, cut = queue.cut_at + 1, self._cut_of(queue)
        if queue.num_special == 1 and queue.voices is None:  # the cut itself; the rest is lines of all its ranks
            num_chars = sum(map(len, queue.entries[start:stop]))
            cut.add(queue.ranks, num_chars, stop - start)
            queue.num_chars -= num_chars
        else:
            for index in range(start, stop):
                entry = queue.entries[index]
                num_chars = self._num_chars(entry)
                if entry[:1] == _ITEM:
                    cut.add_display(queue.ranks_at(index), num_chars)
                else:
                    cut.add(queue.ranks_at(index), num_chars)
                queue.num_chars -= num_chars
            self._forget(queue, start, stop)
        first = queue.arrived
        del queue.entries[start:stop]
        if queue.voices is not None:
            del queue.voices[start:stop]
        queue.ahead = None
        queue.arrivals = deque([[start - queue.start, first]])
        if len(queue.entries) > start:
            queue.arrivals.append([len(queue.entries) - start, now])

    def _cut_of(self, queue: _Queue) -> Cut:
        assert queue.cut_at is not None
        cut = self._stored[queue.entries[queue.cut_at]].thing
        assert isinstance(cut, Cut)
        return cut

    def _numbered(self, kind: str) -> str:
        self._next_number += 1
        return f"{kind}{self._next_number}"


def said(line: Line) -> tuple[Shape, Member]:
    """A folded line on its way into another fold. Numbers that do not fit its text are not heeded."""
    text = line.lead or line.text
    shape = shape_of(text)
    places, num_ranks = len(shape.numbers), len(line.ranks)
    fitting = (one for one in line.varying if 0 <= one.place < places and len(one.written) == num_ranks)
    return shape, Member(line.ranks, text, shape.numbers, {one.place: one.written for one in fitting})


def folded_line(folded: Fold, stream: str, *, mergeable: bool, live: bool = False) -> Line:
    """A fold of lines as it goes out."""
    assert stream in ("stdout", "stderr")
    if mergeable and folded.varying:
        return Line(folded.ranks, stream, folded.text, live, lead=folded.lead, varying=folded.varying)  # type: ignore[arg-type]
    return Line(folded.ranks, stream, folded.text, live)  # type: ignore[arg-type]


def _num_equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(map(operator.eq, left, right))
