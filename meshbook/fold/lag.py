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

# What the maximum age is multiplied by: a step further at each line that came too late from a source. A source that is
# late even then is not waited for any longer than one that is not: it is another loop, or a straggler.
_PATIENCE_STEPS = (1.0, 4.0, 10.0)
# Further lines with the same key that are searched to detect that a source is some lines behind.
MAX_LAG_LINES = 16


class LagDetector:
    """Remembers what was emitted without a source, and finds the sources that are behind."""

    def __init__(self, queues: Collection[SourceQueue], templates: LineTemplates) -> None:
        self._templates = templates
        # By source: lines that were emitted without it, which was late, and the patience with which they were.
        self._missed: dict[SourceQueue, deque[tuple[TextTemplate, float]]] = {
            queue: deque(maxlen=LOOKAHEAD) for queue in queues
        }
        self._patience_steps = list(_PATIENCE_STEPS)
        # Becomes False when an emitted entry may still arrive from other sources, and True when all sources emit one
        # entry together. While True, fronts with one key are folded without inspecting the entries behind them.
        self.is_aligned = True

    @property
    def patience(self) -> float:
        """What the maximum age is multiplied by."""
        return self._patience_steps[0]

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
        if len(group) < len(self._missed):
            for queue in group:
                self._look_for_late(queue, run[0])
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
                self._missed[queue].extend((template, self.patience) for template in templates)
        elif len(group) == sum(1 for queue in self._missed if len(queue)):
            self.is_aligned = True

    def _look_for_late(self, queue: SourceQueue, entry: str) -> None:
        """Look whether an entry of a source was emitted without it: more patience would have folded it."""
        if not self._missed[queue]:
            return
        key, numbers = self._templates(entry)
        for missed, patience in self._missed[queue]:
            if key == missed.key and (not numbers or _num_equal(numbers, missed.numbers)):
                self._note_late(patience)

    def _note_late(self, patience: float) -> None:
        """Record that a line came too late that was emitted without its source after so much patience."""
        if patience == self.patience and (len(self._patience_steps) > 1 or patience != _PATIENCE_STEPS[0]):
            self._patience_steps = self._patience_steps[1:] or [_PATIENCE_STEPS[0]]

    def _is_late(self, queue: SourceQueue, group: list[SourceQueue]) -> bool:
        """Whether a source's front belongs to a line emitted without it rather than to the others' fronts."""
        key, numbers = self._templates(queue.front)
        others = [self._templates(other.front).numbers for other in group if other is not queue]
        best = max((_num_equal(numbers, other) for other in others), default=-1)
        missed = self._missed[queue]
        for index, (template, patience) in enumerate(missed):
            if template.key == key and _num_equal(numbers, template.numbers) > best:
                self._note_late(patience)
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
