"""Recorded steps: their operations, with names for the tensors in place of ids.

A `TraceCache` finds the recorded step that operations repeat; a `StepTrace` makes the one operation that replays it,
and sends its recording to the ranks.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshbook.rank.tensors.operators import FLOAT, MESH, TENSOR, TemplateMessage
from meshbook.rank.tensors.replay import RecordedOp, RecordedStep
from meshbook.tensors.call_sites import CallSite, innermost_frame
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.specs import TensorSpec
from meshbook.wire.pickler import dump_message

# Traces that one function may have on a mesh, for different shapes and branches; the least recently used is evicted.
_MAX_VARIANTS = 16


class TraceCache:
    """Recorded steps of an engine."""

    def __init__(self, engine: TensorEngine) -> None:
        self.engine = engine
        self.traces: dict[tuple[int, ...], StepTrace] = {}  # by their template numbers; the one used last comes last
        self._arities: dict[int, tuple[int, int, int]] = {}

    def find(self, stream: list[int | float], call_sites: list[CallSite]) -> StepTrace | None:
        """Return the step that consists of exactly these operations, or None."""
        can_merge = self._can_merge()
        for numbers, trace in reversed(self.traces.items()):
            if trace.can_merge == can_merge and trace.is_same(stream, call_sites):
                self.traces[numbers] = self.traces.pop(numbers)
                return trace
        return None

    def add(self, stream: list[int | float], call_sites: list[CallSite]) -> None:
        """Add a step, to be recorded when it repeats; ignored if it contains anything but operations."""
        can_merge = self._can_merge()
        try:
            numbers = tuple(self._template_numbers_of(stream))
            trace = StepTrace(self.engine, stream, call_sites, [self.arity_of(number) for number in numbers], can_merge)
        except KeyError:
            return
        old = self.traces.pop(numbers, None)
        if old is not None:
            old.evict()
        self.traces[numbers] = trace
        while len(self.traces) > _MAX_VARIANTS:
            self.traces.pop(next(iter(self.traces))).evict()

    def _can_merge(self) -> bool:
        """Whether all-reduces may be merged: this changes the order of summation, except of two terms."""
        return not torch.are_deterministic_algorithms_enabled() or all(size <= 2 for size in self.engine.axes.shape)

    def clear(self) -> None:
        for trace in self.traces.values():
            trace.evict()
        self.traces.clear()

    def arity_of(self, number: int) -> tuple[int, int, int]:
        """Return how many tensors an operation takes and makes, and its number of floats.

        Raises:
            KeyError: its template has been evicted, or is used only once.
        """
        found = self._arities.get(number)
        if found is None:
            if len(self._arities) > 1 << 15:
                self._arities.clear()
            template = self.engine.templates.by_number[number]
            message: TemplateMessage = pickle.loads(template.body)
            leaves = pytree.tree_leaves((message.args, message.kwargs))
            num_in = sum(leaf is TENSOR for leaf in leaves)
            num_floats = sum(leaf is FLOAT for leaf in leaves) + message.seeded
            num_new = sum(isinstance(output, TensorSpec) for output in template.outputs)
            found = self._arities[number] = num_in, num_new, num_floats
        return found

    def _template_numbers_of(self, stream: list[int | float]) -> list[int]:
        """Return the template numbers of a stream of operations.

        Raises:
            KeyError: see `arity_of`.
        """
        found: list[int] = []
        at = 0
        while at < len(stream):
            number: Any = stream[at]
            at += 1 + sum(self.arity_of(number))
            found.append(number)
        return found


class StepTrace:
    """A step: its operations, with names for the tensors instead of ids.

    Attributes:
        num_recordings: how often it was sent to the ranks.
        ids_of: picks the id of each tensor from the step's numbers.
        created_ids, result_ids: pick from those ids the ones that the step makes, and those of them that outlive it.
        can_merge: whether its all-reduces may be merged.
    """

    def __init__(
        self,
        engine: TensorEngine,
        stream: list[int | float],
        call_sites: list[CallSite],
        arities: Sequence[tuple[int, int, int]],  # see `TraceCache.arity_of`
        can_merge: bool,
    ) -> None:
        self.recording: int | None = None  # the template number of its recording
        self.num_recordings = 0
        self.can_merge = can_merge
        self.num_ops = len(arities)
        self._num_calls = self._first_call = 0  # of its recordings; the first since the ranks last began anew
        self._num_disturbances = 0  # then
        self._engine, self._call_sites, self._arities = engine, call_sites, arities
        self._key = ""
        self._finalizer: Callable[[], Any] = lambda: None
        float_at: list[int] = []
        names: dict[Any, int] = {}
        self._template_numbers: list[Any] = []
        self._tensor_slots: list[int] = []  # for each position of an id, the name of its tensor
        first: list[int] = []  # for each tensor, its first position
        self._inputs: list[int] = []  # tensors from before the step
        self._created: list[int] = []
        at = 0
        for num_in, num_new, num_floats in arities:
            self._template_numbers.append(stream[at])
            for position in range(at + 1, at + 1 + num_in + num_new):
                name = names.setdefault(stream[position], len(names))
                if name == len(first):
                    first.append(position)
                    (self._inputs if position <= at + num_in else self._created).append(name)
                self._tensor_slots.append(name)
            at += 1 + num_in + num_new
            float_at.extend(range(at, at + num_floats))
            at += num_floats
        if at != len(stream) or len(call_sites) != self.num_ops:
            raise KeyError("the stream is not made of these operations")
        self._size = at
        self.ids_of, self._floats_of = _make_picker(first), _make_picker(float_at)
        self.created_ids, self._input_ids = _make_picker(self._created), _make_picker(self._inputs)
        self._live_names: list[int] = []  # names of results
        self.result_ids = _make_picker(self._live_names)
        # Rebuilds the complete stream from ids, template numbers and floats.
        row, slots = iter(self._tensor_slots), itertools.count(len(first) + self.num_ops)
        positions: list[int] = []
        for number, (num_in, num_new, num_floats) in enumerate(arities):
            positions.append(len(first) + number)
            positions.extend(itertools.islice(row, num_in + num_new))
            positions.extend(itertools.islice(slots, num_floats))
        self._rebuild_stream = _make_picker(positions)

    # ---- comparison

    def is_same(self, stream: list[int | float], call_sites: list[CallSite]) -> bool:
        """Whether these are its operations, issued by the same lines, with the same pattern of distinct tensors."""
        if len(stream) != self._size or len(call_sites) != self.num_ops:
            return False
        ids = self.ids_of(stream)
        if self._rebuild_stream((*ids, *self._template_numbers, *self._floats_of(stream))) != tuple(stream):
            return False
        return len(set(ids)) == len(ids) and _have_same_lines(call_sites, self._call_sites)

    def replay_op(self, ids: tuple[Any, ...], stream: list[int | float]) -> list[int | float]:
        """Return the operation that replays the step.

        Args:
            ids: the result of `ids_of`.
        """
        assert self.recording is not None
        num_disturbances = self._engine.sender.num_disturbances
        if num_disturbances != self._num_disturbances:
            self._num_disturbances, self._first_call = num_disturbances, self._num_calls
        calls = float(self._first_call), float(self._num_calls)
        self._num_calls += 1
        return [self.recording, *self._input_ids(ids), *self.result_ids(ids), *calls, *self._floats_of(stream)]

    # ---- recording on the ranks

    def make_recording(self, alive: set[int]) -> bool:
        """Send the step to the ranks, as one template; False: a template of its operations has been evicted.

        Args:
            alive: names of tensors that outlive it.
        """
        engine, templates = self._engine, self._engine.templates.by_number
        if not all(number in templates for number in self._template_numbers):
            return False
        self.evict()
        self.num_recordings += 1
        self._first_call = self._num_calls
        self._live_names = sorted(alive | set(self._live_names))
        self.result_ids = _make_picker(self._live_names)
        index_of_name = {name: at for at, name in enumerate([*self._inputs, *self._created])}
        ops, at, slot = [], 0, 0
        for number, (num_in, num_new, num_floats) in zip(self._template_numbers, self._arities, strict=True):
            names = [index_of_name[name] for name in self._tensor_slots[at : at + num_in + num_new]]
            ops.append(RecordedOp(number, tuple(names[:num_in]), tuple(names[num_in:]), slot, num_floats))
            at, slot = at + num_in + num_new, slot + num_floats
        self._key = f"{engine.name}/{next(_keys)}"
        recorded = RecordedStep(
            key=self._key,
            num_inputs=len(self._inputs),
            ops=tuple(ops),
            template_bodies={number: templates[number].body for number in set(self._template_numbers)},
            results=tuple(index_of_name[name] for name in self._live_names),
            frames=tuple(map(innermost_frame, self._call_sites)),
            can_merge=self.can_merge,
        )
        message = TemplateMessage(
            number=engine.planner.next_number(),
            function="meshbook::replay",
            args=(
                MESH,
                torch.device("cpu"),
                dump_message(recorded),
                self._key,
                *[TENSOR] * len(self._inputs),
                *[FLOAT] * (2 + slot),  # see `replay`
            ),
            kwargs={},
            outputs=(-1,) * len(self._live_names),
            returns="many",
            mutates=tuple(sorted(self._mutated_inputs())),
            communicates=True,
            seeded=False,
        )
        self.recording = message.number
        engine.queue.add_template(dump_message(message))
        finalizer = self._finalizer = weakref.finalize(
            self, _evict_recording, weakref.ref(engine), self._key, message.number
        )
        finalizer.atexit = False  # the ranks drop everything of a client that exits
        return True

    def _mutated_inputs(self) -> set[int]:
        """Return the indices of the step's inputs that it changes."""
        templates = self._engine.templates.by_number
        index_of_name = {name: at for at, name in enumerate(self._inputs)}
        mutated, at = set(), 0
        base_of: dict[int, int] = {}  # the base of each view that the step makes
        for number, (num_in, num_new, _) in zip(self._template_numbers, self._arities, strict=True):
            template, names = templates[number], self._tensor_slots[at : at + num_in + num_new]
            if template.is_view and template.shares_storage and num_in:
                base_of.update(dict.fromkeys(names[num_in:], base_of.get(names[0], names[0])))
            for index in template.mutates:
                for name in (names[index], base_of.get(names[index])):
                    if name in index_of_name:
                        mutated.add(index_of_name[name])
            at += num_in + num_new
        return mutated

    def evict(self) -> None:
        """Let the ranks drop the recording."""
        if self.recording is not None:
            self._finalizer()
            self.recording = None


def _evict_recording(engine_of: weakref.ref[TensorEngine], key: str, recording: int) -> None:
    """Evict a recording that is no longer used. Also a finalizer: any thread, at any moment."""
    engine = engine_of()
    if engine is None or not engine.is_open:
        return
    template = engine.planner.plan_rank_function("forget_replay", (key,))
    engine.queue.add_template(template.body)
    engine.queue.extend([([template.number], ())])
    engine.templates.evict([template.number, recording])


_keys = itertools.count(1)


def _make_picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks these positions of a sequence, as fast as Python can."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda row: tuple(row[position] for position in positions)


def _have_same_lines(some: list[CallSite], others: list[CallSite]) -> bool:
    """Whether operations were issued by the same lines; the callers of these may differ."""
    return some == others or [call_site[:1] for call_site in some] == [call_site[:1] for call_site in others]
