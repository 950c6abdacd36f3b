"""`@meshbook.record`: a step that is repeated becomes one message, and on the ranks one straight-line function.

The function's Python runs in every call, as always: so its optimizers count, its schedules advance, its `if`s decide.
What it issues is held back and compared, at its end, with what it issued before. The same operations on the same
pattern of tensors: one message says "again", with the tensors and numbers of this time. Anything else: they are sent as
they are, one by one. So a recording never gives what the function would not have given; it saves the ranks' work
(DTensor's 5 to 20 us per operation, and a collective per gradient), not Python's, which runs ahead of them.

A function that asks for a value while it runs (`.item()`, `if loss > 3`) is not held back from there on.
"""

from __future__ import annotations

import functools
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy
from torch.utils import _pytree as pytree

from meshbook.rank.tensors.calls import FLOAT, MESH, TENSOR, Sent
from meshbook.rank.tensors.replay import Step, Tape
from meshbook.tensors import engine as engines
from meshbook.tensors.engine import Engine, Where
from meshbook.tensors.plan import Spec, Template

P = ParamSpec("P")
T = TypeVar("T")

Issued = tuple[list[int | float], Where]

# Operations that are held back at most; a longer function is sent as it goes.
_MAX_OPS = 50_000
# Recordings that one function may have, for as many shapes and branches; the one used longest ago goes first.
_MAX_VARIANTS = 16
# Steps that travel in one message, and messages that the ranks may have before them, while they have enough to do: a
# message costs each rank a quarter of a millisecond, and 8 of 4 steps are far enough ahead.
_STEPS_IN_ONE, _ENOUGH, _MAX_AHEAD = 4, 2, 8
# Calls in a row that could not be held to their end, after which the function is not held any more.
_MAX_BROKEN = 3


@overload
def record(function: Callable[P, T], /) -> Recorded[P, T]: ...


@overload
def record(function: None = None, /, *, enabled: bool = True) -> Callable[[Callable[P, T]], Recorded[P, T]]: ...


def record(function: Any = None, /, *, enabled: bool = True) -> Any:
    """Decorator: a step on remote tensors that is sent as one message from its second call on.

    The function runs as always, values that it computes in Python included; the ranks' side of it is compared with what
    was recorded, operation by operation, before anything is sent. Where it differs (another shape, another branch, a
    tensor that is new) it runs operation by operation and is recorded anew.

    Does not wait: results are RemoteTensors on their way. Numbers equal those without recording up to the order in
    which merged all-reduces sum, a rounding of the last bits; with one rank, or without collectives, bit for bit.

    Args:
        enabled: False leaves the function alone.

    Returns:
        The function, with `.stats()` (how its calls were carried out) and `.forget()`.
    """
    if function is None:
        return lambda found: Recorded(found, enabled)
    return Recorded(function, enabled)


@dataclass
class Stats:
    """How the calls of a recorded function were carried out."""

    one_by_one: int = 0
    recorded: int = 0  # calls that made a recording
    replayed: int = 0
    broken: int = 0  # asked for a value in the middle
    num_ops: int = 0  # of the last call


class Recorded(Generic[P, T]):
    """A function whose repeated calls are one message each."""

    def __init__(self, function: Callable[P, T], enabled: bool) -> None:
        self._function, self._enabled = function, enabled
        self._seen: dict[Any, _Shape] = {}  # by the operations' kinds and pattern
        self._stats = Stats()
        self._broken_in_a_row = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        engine = self._engine_of(args, kwargs)
        if engine is None or not self._enabled or _holding.active or self._broken_in_a_row >= _MAX_BROKEN:
            return self._function(*args, **kwargs)
        hold = _Hold(engine)
        with hold:
            result = self._function(*args, **kwargs)
            self._settle(hold)
        return result

    def stats(self) -> Stats:
        return self._stats

    def forget(self) -> None:
        """Drop what was recorded; the next calls record anew."""
        for shape in self._seen.values():
            shape.drop()
        self._seen.clear()
        self._broken_in_a_row = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        stats = self._stats
        return f"<recorded {self.__name__}: {stats.replayed} of its calls in one message, {stats.num_ops} operations>"  # type: ignore[attr-defined]

    # ----

    def _engine_of(self, args: Any, kwargs: Any) -> Engine | None:
        """The engine of its tensors; None: of several, so that nothing can be held."""
        found = [engine for engine in list(engines.ENGINES) if _is_open(engine)]
        return found[0] if len(found) == 1 else _among((args, kwargs), found)

    def _settle(self, hold: _Hold) -> None:
        """The function has ended: one message, or all that it issued."""
        stats = self._stats
        if hold.broken:
            stats.broken += 1
            self._broken_in_a_row += 1
            if self._broken_in_a_row == _MAX_BROKEN:
                warnings.warn(
                    f"{self.__name__}() asks for a value before it ends ({hold.broken}), so it runs operation by "  # type: ignore[attr-defined]
                    "operation; return the tensor and read it outside, and it can be recorded",
                    stacklevel=3,
                )
            return
        self._broken_in_a_row = 0
        stats.num_ops = len(hold.issued)
        if not hold.issued:
            return
        # Another engine's templates have the same numbers and are others: a mesh that was started anew.
        kinds = (hold.engine.name, *[int(numbers[0]) for numbers, _ in hold.issued])
        shape = self._seen.get(kinds)
        ids, floats = _split(hold.engine, hold.issued, shape)
        if shape is not None and not shape.fits(ids):
            shape = None
        if shape is None:  # seen for the first time
            self._remember(kinds, _Shape(hold.engine, hold.issued, ids))
            stats.one_by_one += 1
            return
        self._seen[kinds] = self._seen.pop(kinds)  # used last
        freed = hold.take_freed()
        alive = shape.alive(ids, freed)
        if shape.tape is None or not alive <= set(shape.results):
            if shape.num_tapes >= _MAX_BROKEN:
                stats.one_by_one += 1
                hold.give_back(freed)
                return
            shape.make_tape(hold, alive)
            stats.recorded += 1
        else:
            stats.replayed += 1
        hold.replace(shape.again(ids, floats), freed, shape.gone(ids, freed))

    def _remember(self, kinds: Any, shape: _Shape) -> None:
        old = self._seen.pop(kinds, None)
        if old is not None:
            old.drop()
        self._seen[kinds] = shape
        while len(self._seen) > _MAX_VARIANTS:
            self._seen.pop(next(iter(self._seen))).drop()


class _Holding(threading.local):
    active = False


_holding = _Holding()


class _Hold:
    """While it lasts, what this thread issues is kept here. Whatever would send it is told first, and all goes on
    operation by operation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.issued: list[Issued] = []
        self.broken = ""  # why it was given up
        self._owner = threading.get_ident()
        self._on = False

    def __enter__(self) -> None:
        engine = self.engine
        if self._is_due():
            engine.flush()
        engine._sending.acquire()
        engine.before_batch.append(self._give_up)
        engine.emit = self._keep  # type: ignore[method-assign]
        engine.freed.append(0)  # nobody's id: something to send, so that whoever sends comes by here
        self._on = _holding.active = True

    def _keep(self, numbers: list[int | float], where: Where) -> None:
        if threading.get_ident() != self._owner:
            with self.engine._sending:  # waits until the step has been sent
                Engine.emit(self.engine, numbers, where)
            return
        self.issued.append((numbers, where))
        if len(self.issued) >= _MAX_OPS:
            self._end(f"more than {_MAX_OPS:,} operations")

    def _give_up(self) -> None:
        if self._on and threading.get_ident() == self._owner:
            where = engines.describe(engines.here()).strip().replace("\n", " ")
            self._end(where or "a value")

    def _end(self, broken: str = "") -> None:
        if not self._on:
            return
        self._on = _holding.active = False
        engine = self.engine
        self.broken = broken
        del engine.emit
        engine.before_batch.remove(self._give_up)
        engine.put(self.issued)
        engine._sending.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()
        if error is None and self._is_due():
            self.engine._keep_near(_MAX_AHEAD)
            self.engine.flush()

    def _is_due(self) -> bool:
        """Whether what was issued is to be sent now; an acknowledgement will see to it otherwise."""
        return len(self.engine._ahead) < _ENOUGH or len(self.engine._wheres) >= _STEPS_IN_ONE

    def take_freed(self) -> list[int]:
        """Ids that nobody holds any more."""
        return engines._drained(self.engine.freed)

    def give_back(self, freed: list[int]) -> None:
        self.engine.freed.extend(freed)

    def replace(self, numbers: list[int | float], freed: list[int], unknown: set[int]) -> None:
        """One operation in place of all of them; ids that the ranks will never hear of need not be freed there."""
        where = self.issued[-1][1]
        self.issued = [(numbers, where)]
        self.engine.freed.extend(id for id in freed if id not in unknown)


@dataclass
class _Shape:
    """What a function issued, with names for the tensors instead of ids.

    Attributes:
        num_ids: ids of each operation, inputs and outputs.
        first: where in the row of all ids each tensor comes first.
        inverse: which tensor is at each place of that row.
        is_made: of each tensor, whether an operation of the step makes it.
    """

    engine: Engine
    issued: list[Issued]
    ids: Any
    num_ids: list[int] = field(default_factory=list)
    num_ins: list[int] = field(default_factory=list)
    tape: Template | None = None
    key: str = ""
    results: list[int] = field(default_factory=list)  # tensors that outlive the step
    num_tapes: int = 0

    def __post_init__(self) -> None:
        known = self.engine.templates
        for numbers, _ in self.issued:
            template = known[int(numbers[0])]
            self.num_ins.append(_num_tensors(template.body))
            self.num_ids.append(self.num_ins[-1] + _num_new(template))
        names: dict[int, int] = {}
        self.first, inverse, self.is_made = [], [], []
        at = 0
        row = self.ids.tolist()
        for count, num_in in zip(self.num_ids, self.num_ins, strict=True):
            for place in range(count):
                id = row[at]
                if id not in names:
                    names[id] = len(names)
                    self.first.append(at)
                    self.is_made.append(place >= num_in)
                inverse.append(names[id])
                at += 1
        self._first, self._inverse = (
            numpy.asarray(self.first, dtype=numpy.int64),
            numpy.asarray(inverse, dtype=numpy.int64),
        )
        self._made = [name for name, made in enumerate(self.is_made) if made]
        self._given = [name for name, made in enumerate(self.is_made) if not made]
        self._where = [where for _, where in self.issued]
        self._kinds = [int(numbers[0]) for numbers, _ in self.issued]
        self._row = inverse
        self._floats_of = [
            len(numbers) - 1 - count for (numbers, _), count in zip(self.issued, self.num_ids, strict=True)
        ]
        self.issued = []

    def fits(self, ids: Any) -> bool:
        """Whether tensors follow the same pattern, none of them twice."""
        if len(ids) != len(self._inverse):
            return False
        own = ids[self._first]
        return bool((own[self._inverse] == ids).all()) and len(numpy.unique(own)) == len(own)

    def alive(self, ids: Any, freed: list[int]) -> set[int]:
        """Tensors made by the step that somebody still holds."""
        own, gone = ids[self._first].tolist(), set(freed)
        return {name for name in self._made if own[name] not in gone}

    def gone(self, ids: Any, freed: list[int]) -> set[int]:
        """Ids of tensors that were made in the step and have never been sent."""
        own, results = ids[self._first].tolist(), set(self.results)
        return {own[name] for name in self._made if name not in results}

    def again(self, ids: Any, floats: list[float]) -> list[int | float]:
        """The operation that stands for the step."""
        assert self.tape is not None
        own = ids[self._first].tolist()
        return [self.tape.number, *(own[name] for name in self._given), *(own[name] for name in self.results), *floats]

    def make_tape(self, hold: _Hold, alive: set[int]) -> None:
        """Tell the ranks the step, as one template."""
        self.drop()
        self.num_tapes += 1
        self.results = sorted(alive | set(self.results))
        engine, known = self.engine, self.engine.templates
        place = {name: at for at, name in enumerate([*self._given, *self._made])}
        steps, at, slot = [], 0, 0
        for kind, count, num_in, num_floats in zip(
            self._kinds, self.num_ids, self.num_ins, self._floats_of, strict=True
        ):
            names = [place[name] for name in self._row[at : at + count]]
            steps.append(Step(kind, tuple(names[:num_in]), tuple(names[num_in:]), slot, num_floats))
            at, slot = at + count, slot + num_floats
        self.key = f"{engine.name}/{next(_keys)}"
        tape = Tape(
            key=self.key,
            num_inputs=len(self._given),
            steps=tuple(steps),
            bodies={kind: known[kind].body for kind in set(self._kinds)},
            results=tuple(place[name] for name in self.results),
            lines=tuple(engines.innermost(where) for where in self._where),
        )
        number = next(engine.planner._numbers)
        import torch

        sent = Sent(
            number=number,
            function="meshbook::replay",
            args=(
                MESH,
                torch.device("cpu"),
                pickle.dumps(tape, 5),
                self.key,
                [TENSOR] * len(self._given),
                [FLOAT] * slot,
            ),
            kwargs={},
            outputs=(-1,) * len(self.results),
            returns="many",
            mutates=tuple(sorted(self._changed(known))),
            communicates=True,
            seeded=False,
        )
        body = pickle.dumps(sent, 5)
        self.tape = Template(number, None, (), "list", body=body, name="meshbook::replay", communicates=True)
        engine.add_template(body)

    def _changed(self, known: dict[int, Template]) -> set[int]:
        """Which of the step's inputs it changes."""
        place = {name: at for at, name in enumerate(self._given)}
        changed, at = set(), 0
        for kind, count in zip(self._kinds, self.num_ids, strict=True):
            for index in known[kind].mutates:
                name = self._row[at + index]
                if name in place:
                    changed.add(place[name])
            at += count
        return changed

    def drop(self) -> None:
        """The ranks may forget it."""
        if self.tape is not None:
            _forget(self.engine, self.key)
            self.engine.forget([self.tape.number])
            self.tape = None


def _count() -> Any:
    import itertools

    return itertools.count(1)


_keys = _count()


def _forget(engine: Engine, key: str) -> None:
    number = next(engine.planner._numbers)
    sent = Sent(number, "meshbook::forget_replay", (key,), {}, (), "none", (), False, False)
    engine.add_template(pickle.dumps(sent, 5))
    engine.put([([number], ())])
    engine.forget([number])


def _num_new(template: Template) -> int:
    return sum(isinstance(output, Spec) for output in template.outputs)


@functools.lru_cache(maxsize=4096)
def _num_tensors(body: bytes) -> int:
    sent: Sent = pickle.loads(body)
    return sum(leaf is TENSOR for leaf in pytree.tree_leaves((sent.args, sent.kwargs)))


def _split(engine: Engine, issued: list[Issued], shape: _Shape | None) -> tuple[Any, list[float]]:
    """All ids, in a row, and all floats."""
    row: list[int | float] = []
    floats: list[float] = []
    if shape is None:
        known = engine.templates
        for numbers, _ in issued:
            template = known[int(numbers[0])]
            end = 1 + _num_tensors(template.body) + _num_new(template)
            row += numbers[1:end]
            floats += numbers[end:]
    else:
        for (numbers, _), count in zip(issued, shape.num_ids, strict=True):
            if len(numbers) == count + 1:
                row += numbers[1:]
            else:
                row += numbers[1 : count + 1]
                floats += numbers[count + 1 :]
    return numpy.array(row, dtype=numpy.int64), floats


def _is_open(engine: Engine) -> bool:
    return engine._ended is None and engine.session.ended is None and not engine.session.connection.closed


def _among(things: Any, found: list[Engine]) -> Engine | None:
    """The one engine whose tensors are among these."""
    own = {id(leaf._spec.engine) for leaf in pytree.tree_leaves(things) if hasattr(leaf, "_spec")}
    matching = [engine for engine in found if id(engine) in own]
    return matching[0] if len(matching) == 1 else None
