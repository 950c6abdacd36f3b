"""Steps that were seen: their operations, and names for the tensors in place of ids.

A `Book` tells whether operations are a step that it has; a `Shape` makes the one operation that stands for it, and
tells the ranks what that means.
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

from meshbook.rank.tensors.calls import FLOAT, MESH, TENSOR, Sent
from meshbook.rank.tensors.replay import Step, Tape
from meshbook.tensors import engine as engines
from meshbook.tensors.engine import Engine, Where
from meshbook.tensors.plan import Spec, Template

# Recordings that one function may have on a mesh, for as many shapes and branches; the one used longest ago goes.
_MAX_VARIANTS = 16


class Book:
    """Steps of an engine that were seen."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[tuple[int, ...], Shape] = {}  # by their operations' kinds; the one used last comes last
        self._counts: dict[int, tuple[int, int, int]] = {}

    def find(self, stream: list[int | float], wheres: list[Where]) -> Shape | None:
        """The step that these are, all of it and nothing more."""
        merge = self._merges()
        for kinds, shape in reversed(self.shapes.items()):
            if shape.merge == merge and shape.is_same(stream, wheres):
                self.shapes[kinds] = self.shapes.pop(kinds)
                return shape
        return None

    def add(self, stream: list[int | float], wheres: list[Where]) -> None:
        """A step, to be recorded when it comes again; unless other things than operations are among it."""
        merge = self._merges()
        try:
            kinds = tuple(self._kinds_of(stream))
            shape = Shape(self.engine, stream, wheres, [self.counts(kind) for kind in kinds], merge)
        except KeyError:
            return
        old = self.shapes.pop(kinds, None)
        if old is not None:
            old.drop()
        self.shapes[kinds] = shape
        while len(self.shapes) > _MAX_VARIANTS:
            self.shapes.pop(next(iter(self.shapes))).drop()

    def _merges(self) -> bool:
        """Whether all-reduces may be merged: merged sums have another order, unless they are of two parts."""
        return not torch.are_deterministic_algorithms_enabled() or all(size <= 2 for size in self.engine.axes.shape)

    def forget(self) -> None:
        for shape in self.shapes.values():
            shape.drop()
        self.shapes.clear()

    def counts(self, kind: int) -> tuple[int, int, int]:
        """How many tensors an operation takes and makes, and its floats.

        Raises:
            KeyError: nobody knows it any more, or it is one that comes once.
        """
        found = self._counts.get(kind)
        if found is None:
            if len(self._counts) > 1 << 15:
                self._counts.clear()
            template = self.engine.templates[kind]
            sent: Sent = pickle.loads(template.body)
            leaves = pytree.tree_leaves((sent.args, sent.kwargs))
            num_in = sum(leaf is TENSOR for leaf in leaves)
            num_floats = sum(leaf is FLOAT for leaf in leaves) + sent.seeded
            num_new = sum(isinstance(output, Spec) for output in template.outputs)
            found = self._counts[kind] = num_in, num_new, num_floats
        return found

    def _kinds_of(self, stream: list[int | float]) -> list[int]:
        """The operations of a stream.

        Raises:
            KeyError: see `counts`.
        """
        found: list[int] = []
        at = 0
        while at < len(stream):
            kind: Any = stream[at]
            at += 1 + sum(self.counts(kind))
            found.append(kind)
        return found


class Shape:
    """A step: its operations, with names for the tensors instead of ids.

    Attributes:
        num_tapes: times that it was told to the ranks.
        ids_of: of its numbers, the id of each tensor.
        made, results: of those ids, which the step makes, and which of them outlive it.
        merge: whether its all-reduces may be merged.
    """

    def __init__(
        self,
        engine: Engine,
        stream: list[int | float],
        wheres: list[Where],
        counts: Sequence[tuple[int, int, int]],  # see `Book.counts`
        merge: bool,
    ) -> None:
        self.tape: Template | None = None
        self.num_tapes = 0
        self.merge = merge
        self.num_ops = len(counts)
        self._engine, self._wheres, self._counts = engine, wheres, counts
        self._key = ""
        self._forget: Callable[[], Any] = lambda: None
        float_at: list[int] = []
        names: dict[Any, int] = {}
        self._kinds: list[Any] = []
        self._row: list[int] = []  # of each place for an id, which tensor is there
        first: list[int] = []  # of each tensor, where it comes first
        self._given: list[int] = []  # tensors that come from before
        self._made: list[int] = []
        at = 0
        for num_in, num_new, num_floats in counts:
            self._kinds.append(stream[at])
            for place in range(at + 1, at + 1 + num_in + num_new):
                name = names.setdefault(stream[place], len(names))
                if name == len(first):
                    first.append(place)
                    (self._given if place <= at + num_in else self._made).append(name)
                self._row.append(name)
            at += 1 + num_in + num_new
            float_at.extend(range(at, at + num_floats))
            at += num_floats
        if at != len(stream) or len(wheres) != self.num_ops:
            raise KeyError("the stream is not made of these operations")
        self._size = at
        self.ids_of, self._floats_of = _picker(first), _picker(float_at)
        self.made, self._given_of = _picker(self._made), _picker(self._given)
        self._live: list[int] = []  # names of results
        self.results = _picker(self._live)
        # How to make up all of its numbers from ids, kinds and floats.
        row, slots = iter(self._row), itertools.count(len(first) + self.num_ops)
        places: list[int] = []
        for number, (num_in, num_new, num_floats) in enumerate(counts):
            places.append(len(first) + number)
            places.extend(itertools.islice(row, num_in + num_new))
            places.extend(itertools.islice(slots, num_floats))
        self._all_of = _picker(places)

    # ---- whether it is this one

    def is_same(self, stream: list[int | float], wheres: list[Where]) -> bool:
        """Whether these are its operations, from its lines, and tensors follow the same pattern, none of them twice."""
        if len(stream) != self._size or len(wheres) != self.num_ops:
            return False
        own = self.ids_of(stream)
        if self._all_of((*own, *self._kinds, *self._floats_of(stream))) != tuple(stream):
            return False
        return len(set(own)) == len(own) and _same_lines(wheres, self._wheres)

    def again(self, own: tuple[Any, ...], stream: list[int | float]) -> list[int | float]:
        """The operation that stands for the step.

        Args:
            own: what `ids_of` gives.
        """
        assert self.tape is not None
        return [self.tape.number, *self._given_of(own), *self.results(own), *self._floats_of(stream)]

    # ---- what the ranks are told

    def make_tape(self, alive: set[int]) -> bool:
        """Tell the ranks the step, as one template; False: one of its operations is not known any more.

        Args:
            alive: names of tensors that outlive it.
        """
        engine, known = self._engine, self._engine.templates
        if not all(kind in known for kind in self._kinds):
            return False
        self.drop()
        self.num_tapes += 1
        self._live = sorted(alive | set(self._live))
        self.results = _picker(self._live)
        place = {name: at for at, name in enumerate([*self._given, *self._made])}
        steps, at, slot = [], 0, 0
        for kind, (num_in, num_new, num_floats) in zip(self._kinds, self._counts, strict=True):
            names = [place[name] for name in self._row[at : at + num_in + num_new]]
            steps.append(Step(kind, tuple(names[:num_in]), tuple(names[num_in:]), slot, num_floats))
            at, slot = at + num_in + num_new, slot + num_floats
        self._key = f"{engine.name}/{next(_keys)}"
        tape = Tape(
            key=self._key,
            num_inputs=len(self._given),
            steps=tuple(steps),
            bodies={kind: known[kind].body for kind in set(self._kinds)},
            results=tuple(place[name] for name in self._live),
            lines=tuple(map(engines.innermost, self._wheres)),
            merge=self.merge,
        )
        sent = Sent(
            number=next(engine.planner._numbers),
            function="meshbook::replay",
            args=(
                MESH,
                torch.device("cpu"),
                pickle.dumps(tape, 5),
                self._key,
                *[TENSOR] * len(self._given),
                *[FLOAT] * slot,
            ),
            kwargs={},
            outputs=(-1,) * len(self._live),
            returns="many",
            mutates=tuple(sorted(self._changed())),
            communicates=True,
            seeded=False,
        )
        body = pickle.dumps(sent, 5)
        self.tape = Template(sent.number, None, (), "list", body=body, name=sent.function, communicates=True)
        engine.add_template(body)
        forget = self._forget = weakref.finalize(self, _forget, weakref.ref(engine), self._key, sent.number)
        forget.atexit = False  # the ranks forget all of a client that ends
        return True

    def _changed(self) -> set[int]:
        """Which of the step's inputs it changes."""
        known = self._engine.templates
        place = {name: at for at, name in enumerate(self._given)}
        changed, at = set(), 0
        of: dict[int, int] = {}  # of views that the step makes, what they are views of
        for kind, (num_in, num_new, _) in zip(self._kinds, self._counts, strict=True):
            template, names = known[kind], self._row[at : at + num_in + num_new]
            if template.is_view and template.shares and num_in:
                of.update(dict.fromkeys(names[num_in:], of.get(names[0], names[0])))
            for index in template.mutates:
                for name in (names[index], of.get(names[index])):
                    if name in place:
                        changed.add(place[name])
            at += num_in + num_new
        return changed

    def drop(self) -> None:
        """The ranks may forget it."""
        if self.tape is not None:
            self._forget()
            self.tape = None


def _forget(engine_of: weakref.ref[Engine], key: str, tape: int) -> None:
    """A recording is not used any more. By a finalizer, too: any thread, at any moment."""
    engine = engine_of()
    if engine is None or not engine.is_open:
        return
    number = next(engine.planner._numbers)
    sent = Sent(number, "meshbook::forget_replay", (key,), {}, (), "none", (), False, False)
    engine.add_template(pickle.dumps(sent, 5))
    engine.put([([number], ())])
    engine.forget([number, tape])


_keys = itertools.count(1)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these places out of a row, as fast as Python can."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda row: tuple(row[place] for place in places)


def _same_lines(some: list[Where], others: list[Where]) -> bool:
    """Whether operations were issued by the same lines; who called those may be another."""
    return some == others or [where[:1] for where in some] == [where[:1] for where in others]
