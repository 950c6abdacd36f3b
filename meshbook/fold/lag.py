"""Which of several sources at lines of one key are behind the others, so that lines of one step are folded.

The lines of a loop all have one key, so a source that lags one step would be folded with the others' next step, and so
on until the end. A step counter reveals this: another pairing has more equal numbers.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Collection, Sequence

from meshbook.fold.entries import LineTemplates
from meshbook.fold.numbers import TextTemplate
from meshbook.fold.source_queue import LOOKAHEAD, SourceQueue

# Further lines with the same key that are searched to detect that a source is some lines behind.
MAX_LAG_LINES = 16


class LagDetector:
    """Remembers what was emitted without a source, and finds the sources that are behind."""

    def __init__(self, queues: Collection[SourceQueue], templates: LineTemplates) -> None:
        self._templates = templates
        # By source: lines that were emitted without it, which was late.
        self._missed: dict[SourceQueue, deque[TextTemplate]] = {queue: deque(maxlen=LOOKAHEAD) for queue in queues}
        # Becomes False when an emitted entry may still arrive from other sources, and True when all sources emit one
        # entry together. While True, fronts with one key are folded without inspecting the entries behind them.
        self.is_aligned = True

    def select_lagging(self, group: list[SourceQueue]) -> list[SourceQueue]:
        """Return the sources, of those with fronts of one key, that go first as the others are some lines ahead."""
        late = [queue for queue in group if self._missed[queue] and self._is_late(queue, group)]
        if late:
            return late
        if self.is_aligned:
            return group
        fronts = {self._templates(queue.front).numbers for queue in group}
        if not 2 <= len(fronts) <= MAX_LAG_LINES:
            return group
        lagging = [
            queue
            for queue in group
            if any(self._has_later_match(queue, other) and not self._has_later_match(other, queue) for other in group)
        ]
        return lagging or group

    def note_emitted(self, group: Sequence[SourceQueue], run: Sequence[str]) -> None:
        """Record which sources took part when entries were emitted."""
        if len(group) > 1:
            for queue in group:
                self._missed[queue].clear()
        if len(group) == len(self._missed):
            self.is_aligned = True
            return
        absent = [queue for queue in self._missed if not len(queue) and not queue.finished]
        if absent:
            self.is_aligned = False
            templates = [self._templates(entry) for entry in run[-LOOKAHEAD:]]
            for queue in absent:
                self._missed[queue].extend(templates)
        elif len(group) == sum(1 for queue in self._missed if len(queue)):
            self.is_aligned = True

    def _is_late(self, queue: SourceQueue, group: list[SourceQueue]) -> bool:
        """Whether a source's front belongs to a line emitted without it rather than to the others' fronts."""
        key, numbers = self._templates(queue.front)
        others = [self._templates(other.front).numbers for other in group if other is not queue]
        best = max((_num_equal(numbers, other) for other in others), default=-1)
        missed = self._missed[queue]
        for index, template in enumerate(missed):
            if template.key == key and _num_equal(numbers, template.numbers) > best:
                for _ in range(index + 1):
                    missed.popleft()
                return True
        return False

    def _has_later_match(self, queue: SourceQueue, other: SourceQueue) -> bool:
        """Whether a later line of a source matches the other's front better than its own front does."""
        key, target = self._templates(other.front)
        best = _num_equal(self._templates(queue.front).numbers, target)
        later = map(self._templates, queue.entries[queue.start + 1 : queue.start + 1 + LOOKAHEAD])
        same_key = itertools.islice((template for template in later if template.key == key), MAX_LAG_LINES)
        return any(_num_equal(template.numbers, target) > best for template in same_key)


def _num_equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(map(operator.eq, left, right))
