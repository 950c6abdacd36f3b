"""The templates of an engine, by the kinds of operations; those used least recently are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshbook.controller.sigint import defer_sigint
from meshbook.tensors.op_queue import OpQueue
from meshbook.tensors.specs import Template

# Templates in `recent`. When it is full, those of the older generation are evicted, here and on the ranks, and `recent`
# takes its place. A complete training step of a large model has some thousands, a loop over `x[i]` one for each i.
_MAX_TEMPLATES = 8192


class TemplateCache:
    """Templates in two generations, and those of both by number.

    Attributes:
        recent: by kinds of operands; `plan_and_cache` adds to it. Replaced when it is full.
        by_number: those of both generations.
    """

    def __init__(self, queue: OpQueue) -> None:
        self.recent: dict[Any, Template] = {}
        self.by_number: dict[int, Template] = {}
        self._older: dict[Any, Template] = {}  # not used since `recent` was last replaced
        self._queue = queue

    def __len__(self) -> int:
        return len(self.recent) + len(self._older)

    def find_or_plan(self, key: Any, plan: Callable[..., Template], *args: Any, **kwargs: Any) -> Template:
        """Return the template with this key, from `plan(*args, **kwargs)` if there is none."""
        return self.recent.get(key) or self.plan_and_cache(key, plan, *args, **kwargs)

    def plan_and_cache(self, key: Any, plan: Callable[..., Template], *args: Any, **kwargs: Any) -> Template:
        """Return and cache a template that is not in `recent`: of the older generation, or planned."""
        lock = self._queue.lock  # a lock of its own could be taken in the other order, by a finalizer
        with lock:
            template = self._older.pop(key, None)
        if template is None:
            with defer_sigint():  # planning changes torch's modes
                template = plan(*args, **kwargs)
            if template.body:  # before another thread can find it and send an operation of it
                self._queue.add_template(template.body)
        with lock:
            if len(self.recent) >= _MAX_TEMPLATES:
                self.evict(old.number for old in self._older.values())
                self._older, self.recent = self.recent, {}
            self.recent[key] = template
            if template.number:
                self.by_number[template.number] = template
        return template

    def evict(self, numbers: Iterable[int]) -> None:
        """Drop templates that no further operation will use."""
        with self._queue.lock:
            evicted = list(numbers)
            for number in evicted:
                self.by_number.pop(number, None)
            self._queue.add_evictions(evicted)
