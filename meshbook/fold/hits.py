"""Fold the hits of a search in logs: a line that several ranks printed at about the same time appears once.

Hits come in order of time. A hit joins the first line of its kind that is not older than a second and comes after what
its ranks have joined last, so that the order of each rank's hits is kept; if there is one with equal text, that one.
Hits of hosts that have folded theirs are folded again in the same way, and exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from meshbook.fold.entries import line_of_fold, split_folded_line
from meshbook.fold.numbers import FoldMember, fold_all
from meshbook.wire.messages import Folding, LogMatch

# Seconds that ranks which print the same line may be apart. Ranks of one step are apart by milliseconds, and by as much
# as their machines' clocks; what is further apart has a line and a time of its own.
WINDOW_S = 1.0


@dataclass(slots=True)
class _OpenHit:
    """A hit that others may join."""

    index: int  # in the order in which they were opened
    first: LogMatch
    keys: tuple[object, object]  # of equal text, and of text that is equal but for numbers
    members: list[FoldMember]


class HitFolder:
    """Folds hits; the caller feeds them in order of time, and takes those that nothing joins any more."""

    def __init__(self, folding: Folding = "numbers", *, mergeable: bool = False, window_s: float = WINDOW_S) -> None:
        """
        Args:
            folding: which lines become one.
            mergeable: whether hits retain each rank's numbers, so that another folder can fold them further.
            window_s: seconds that equal lines may be apart.
        """
        self._folding, self._mergeable, self._window_s = folding, mergeable, window_s
        self._open: deque[_OpenHit] = deque()
        self._by_key: dict[object, list[_OpenHit]] = {}
        self._joined: dict[int, int] = {}  # rank -> index of the hit that it has joined last
        self._num_opened = 0

    def feed(self, hits: Iterable[LogMatch]) -> list[LogMatch]:
        """Take hits; return those that are complete, because they are older than these by more than the window."""
        done: list[LogMatch] = []
        for hit in hits:
            done += self.pop(hit.time - self._window_s)
            self._add(hit)
        return done

    def pop(self, before: float | None = None) -> list[LogMatch]:
        """Return the hits that were opened before this time, all if it is None. Nothing joins them any more."""
        done: list[LogMatch] = []
        while self._open and (before is None or self._open[0].first.time < before):
            opened = self._open.popleft()
            for key in opened.keys:
                same = self._by_key[key]
                same.remove(opened)  # the first one
                if not same:
                    del self._by_key[key]
            first = opened.first
            done += [
                LogMatch(first.time, line_of_fold(one, first.line.stream, mergeable=self._mergeable), first.matching)
                for one in fold_all(opened.members)
            ]
        return done

    def _add(self, hit: LogMatch) -> None:
        template, member = split_folded_line(hit.line)
        kind = (hit.line.stream, hit.matching)
        keys = (("equal", kind, member.text), ("alike", kind, template.key))
        last = max(self._joined.get(rank, -1) for rank in hit.line.ranks)
        opened = None
        if self._folding != "off" and not member.varying:
            opened = self._first_after(keys[0], last)
        if opened is None and self._folding == "numbers":
            opened = self._first_after(keys[1], last)
        if opened is None:
            opened = _OpenHit(self._num_opened, hit, keys, [member])
            self._num_opened += 1
            self._open.append(opened)
            for key in keys:
                self._by_key.setdefault(key, []).append(opened)
        else:
            opened.members.append(member)
        for rank in hit.line.ranks:
            self._joined[rank] = opened.index

    def _first_after(self, key: object, last: int) -> _OpenHit | None:
        same = self._by_key.get(key, [])
        at = bisect_right(same, last, key=lambda opened: opened.index)
        return same[at] if at < len(same) else None
