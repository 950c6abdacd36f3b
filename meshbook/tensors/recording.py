"""Repeated steps become one message, and on the ranks one straight-line function: `@meshbook.record`, and by itself.

The step's Python runs every time, as always: so its optimizers count, its schedules advance, its `if`s decide. What it
issues waits in the engine's stream, and is compared with what was issued before. The same operations on the same
pattern of tensors, from the same lines: in their place one operation says "again", with the tensors and numbers of this
time. Anything else: they are sent as they are. So a recording never gives what the step would not have given; it saves
the ranks' work (DTensor's 5 to 20 us per operation, and a collective per gradient), not Python's, which runs ahead.

A decorated step is a call of its function. Without a decorator, what lies between two *boundaries* is taken for a step:
the end of an optimizer's step, a value that is waited for, a batch of a feed, a cell or a call to the ranks. Where
those are far apart, a loop is looked for in the operations themselves.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from meshbook.errors import MeshbookError
from meshbook.tensors import engine as engines
from meshbook.tensors.engine import Engine, Watcher, Where
from meshbook.tensors.steps import Book, Part, Shape

P = ParamSpec("P")
T = TypeVar("T")

# Operations that are held back at most; a longer step is sent as it goes.
_MAX_OPS = 50_000
# Steps that travel in one message while the ranks have enough to do, and messages that they may have before them: a
# message costs each rank a quarter of a millisecond, and 8 of 4 steps are far enough ahead.
_STEPS_IN_ONE, _MAX_AHEAD = 4, 8
# Calls in a row that could not be held to their end, after which the function is not held any more.
_MAX_BROKEN = 3
# Times that one sequence of operations is recorded anew, because other tensors outlive it or their pattern is another.
_MAX_TAPES = 3
# Nobody asked for these to be recorded: seen so often before they are held back, and of so many operations.
_SEEN_ENOUGH, _MIN_OPS, _MAX_LOGGED = 2, 16, 20_000
# Sequences that are counted.
_MAX_COUNTED = 64
# Operations without a boundary among which a loop is looked for, then twice as many, and so on; operations of a loop's
# step at least: shorter ones are taken several times. Loops within the steps of an optimizer, over layers say, are left
# alone.
_LOOK_FOR_LOOP, _MIN_LOOP = 256, 64
# Operations that are held back before they are compared with the step they should be.
_LOOK_EVERY = 48


class _Record:
    """`meshbook.record`: what can be said of recording."""

    @overload
    def __call__(self, function: Callable[P, T], /) -> Recorded[P, T]: ...

    @overload
    def __call__(
        self, function: None = None, /, *, enabled: bool = True
    ) -> Callable[[Callable[P, T]], Recorded[P, T]]: ...

    def __call__(self, function: Any = None, /, *, enabled: bool = True) -> Any:
        """Decorator: a step on remote tensors that is sent as one message from its second call on.

        The function runs as always, values that it computes in Python included; the ranks' side of it is compared with
        what was recorded, operation by operation, before anything is sent. Where it differs (another shape, another
        branch, a tensor that is new) it runs operation by operation and is recorded anew.

        Does not wait: results are RemoteTensors on their way. Numbers equal those without recording up to the order in
        which merged all-reduces sum, a rounding of the last bits; with up to two ranks, without collectives, or under
        torch.use_deterministic_algorithms, bit for bit.

        Args:
            enabled: False leaves the function alone.

        Returns:
            The function, with `.stats()` (how its calls were carried out) and `.forget()`.
        """
        if function is None:
            return lambda found: Recorded(found, enabled)
        return Recorded(function, enabled)

    def auto(self, enabled: bool = True) -> None:
        """Whether steps that repeat are recorded without a decorator too, on all meshes of this process. They are,
        unless MESHBOOK_AUTO_RECORD=0 is set when it starts. Does not wait; what is known stays known."""
        _auto.enabled = enabled
        for engine in list(engines.ENGINES):
            if isinstance(engine.watcher, Recorder):
                engine.watcher.start(enabled)


def _is_wanted(environment: Mapping[str, str]) -> bool:
    return environment.get("MESHBOOK_AUTO_RECORD", "1").strip().lower() not in ("0", "off", "false", "no")


@dataclass
class _Auto:
    enabled: bool


_auto = _Auto(_is_wanted(os.environ))
record = _Record()


@dataclass
class Stats:
    """How the calls of a recorded function, or the steps of a mesh, were carried out."""

    one_by_one: int = 0
    recorded: int = 0  # calls that made a recording
    replayed: int = 0
    broken: int = 0  # asked for a value in the middle
    num_ops: int = 0  # of the last call


class Recorded(Generic[P, T]):
    """A function whose repeated calls are one message each."""

    def __init__(self, function: Callable[P, T], enabled: bool) -> None:
        self._function, self._enabled = function, enabled
        self._books: dict[str, Book] = {}  # by engine: a mesh that was started anew has other templates
        self._stats = Stats()
        self._broken_in_a_row = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        engine = self._engine_of(args, kwargs) if self._enabled else None
        if engine is None or self._broken_in_a_row >= _MAX_BROKEN:
            return self._function(*args, **kwargs)
        recorder = engine.watcher
        if not isinstance(recorder, Recorder) or recorder.to_its_end:
            return self._function(*args, **kwargs)
        recorder.begin()
        done = False
        try:
            result = self._function(*args, **kwargs)
            done = True
        finally:
            recorder.end(self._settle if done else None)
        return result

    def stats(self) -> Stats:
        return self._stats

    def forget(self) -> None:
        """Drop what was recorded; the next calls record anew."""
        for book in self._books.values():
            book.forget()
        self._books.clear()
        self._broken_in_a_row = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        stats = self._stats
        return f"<recorded {self.__name__}: {stats.replayed} of its calls in one message, {stats.num_ops} operations>"  # type: ignore[attr-defined]

    # ----

    def _engine_of(self, args: Any, kwargs: Any) -> Engine | None:
        """The engine of its tensors; None: of several, or that nobody can tell, so that nothing is held."""
        found = [engine for engine in list(engines.ENGINES) if engine.is_open]
        if len(found) < 2:
            return found[0] if found else None
        return _among((args, kwargs), found) or _among(_named_by(self._function), found)

    def _settle(self, recorder: Recorder) -> None:
        """The function has ended: one message, or all that it issued."""
        stats = self._stats
        if recorder.broken:
            stats.broken += 1
            self._broken_in_a_row += 1
            if self._broken_in_a_row == _MAX_BROKEN:
                warnings.warn(
                    f"{self.__name__}() asks for a value before it ends ({recorder.broken}), so it is not held to its "  # type: ignore[attr-defined]
                    "end any more; return the tensor and read it outside, and it can be recorded as one",
                    stacklevel=4,
                )
            return
        self._broken_in_a_row = 0
        stats.num_ops = recorder.num_ops
        if not recorder.num_ops:
            return
        book = self._books.get(recorder.engine.name)
        if book is None:
            self._books = {name: kept for name, kept in self._books.items() if kept.engine.is_open}
            book = self._books[recorder.engine.name] = Book(recorder.engine)
        found = recorder.replace(book)
        if found is None:
            book.add(*recorder.issued())
        if found == "recorded":
            stats.recorded += 1
        elif found == "replayed":
            stats.replayed += 1
        else:
            stats.one_by_one += 1


# ---------------------------------------------------------------------------------------------------------------------
# What waits in the stream


class Recorder(Watcher):
    """Looks at what is issued between two boundaries, on its way out of an engine's stream.

    The *region* is what was issued since the last boundary: what of it has been sent is logged, what waits is the end
    of the stream, from `_words` on. It waits (`held`) as long as it may be a known step, and is replaced as a whole or
    not at all. Whoever sends, for whatever reason, sends all there is: order is kept, and nothing is lost.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.broken = ""  # why a function's call was not held to its end
        self.stats = Stats()
        self._words = self._ops = 0  # of the stream, before the region
        self._log: list[Part] = []
        self._logged = 0
        self._auto = False
        self._book = Book(engine)
        self._counted: dict[int, int] = {}  # by hash
        self._expected: Shape | None = None
        self._matched = 0
        self._step_length = 0  # operations from a boundary to the end of an optimizer's step
        self.start(_auto.enabled)

    def start(self, auto: bool) -> None:
        """Look for steps that repeat, or leave that; what is known stays known."""
        with self.engine._putting:
            self._auto = auto
            if not self.to_its_end:
                self._open()

    # ---- a function's call

    def begin(self) -> None:
        self.boundary()
        if self.engine._wheres and self._is_due():
            self.engine.flush()
        with self.engine._putting:
            self._open()
            self.broken = ""
            self.held = self.to_its_end = True

    def end(self, settle: Callable[[Recorder], None] | None) -> None:
        """
        Args:
            settle: says what becomes of what was issued; None: it is sent as it is.
        """
        try:
            with self.engine._putting:
                if settle is not None:
                    settle(self)
        finally:
            with self.engine._putting:
                self.to_its_end = False
                self._open()
        if settle is not None:
            self._send_if_due()

    @property
    def num_ops(self) -> int:
        """Operations of the region that wait."""
        return len(self.engine._wheres) - self._ops

    def issued(self) -> tuple[list[int | float], list[Where]]:
        """The region, where none of it was sent."""
        return self.engine._stream[self._words :], self.engine._wheres[self._ops :]

    def replace(self, book: Book) -> str | None:
        """One operation in place of the region, if it is a step of the book.

        Returns:
            "replayed"; "recorded", where ranks are told the step for the first time; "kept", where it is known and
            cannot be recorded; None: it is no step of the book.
        """
        stream, wheres = self.issued()
        shape = book.find(stream, wheres)
        if shape is None:
            return None
        engine = self.engine
        freed = engines._drained(engine.freed)
        found = "kept"
        try:
            own = shape.ids_of(stream)
            made = set(shape.made(own))
            alive = made.difference(freed)
            if shape.tape is not None and alive.issubset(shape.results(own)):
                found = "replayed"
            elif shape.num_tapes < _MAX_TAPES and shape.make_tape({own.index(id) for id in alive}):
                found = "recorded"
            if found != "kept":
                again, results = shape.again(own, stream), shape.results(own)
                engine._stream[self._words : self._words + len(stream)] = again
                engine._wheres[self._ops : self._ops + len(wheres)] = wheres[-1:]
                made.difference_update(results)  # ids which the ranks will never hear of
                freed = [id for id in freed if id not in made]
        finally:
            engine.freed.extend(freed)
        return found

    # ---- by itself

    def holds(self) -> bool:
        engine = self.engine
        with engine._putting:
            if self.rest:
                part = self._part()
                left = self.rest - len(part.kinds) if part is not None else 0
                if left > 0:  # what lets go of ids was counted too
                    engine._due = len(engine._wheres) + left
                    return True
                self._open()
                return False
            if not self.held:
                return False
            count = self.num_ops
            if count <= _MAX_OPS and (self.to_its_end or self._is_on_track(count)):
                ahead = _LOOK_EVERY
                expected = self._expected
                if expected is not None and expected.is_loop:
                    if count == expected.num_ops and self._settle():
                        self._open()
                        return not self._is_due()
                    ahead = min(ahead, expected.num_ops - count) or ahead
                engine._due = len(engine._wheres) + ahead
                return True
            if self.to_its_end:
                self.broken = f"more than {_MAX_OPS:,} operations"
            self._let_go()
            return False

    def before_send(self, waits: bool) -> None:
        if self.to_its_end:
            if self.held and self.num_ops:
                where = engines.describe(engines.here()).strip().replace("\n", " ")
                self.broken = where or "a value"
                self._let_go()
        elif self._auto:
            if waits:
                self._close()
            elif self.held and self._settle():
                self._open()
            elif self.num_ops:
                self._keep_log()
        if self._auto and not self.to_its_end and self._logged >= self._look_at:
            self._look_for_loop()
        self._words = self._ops = 0
        if self.held:
            self.engine._due = _LOOK_EVERY

    def stepped(self) -> None:
        """An optimizer has made a step."""
        self._step_length = self._logged + self.num_ops
        self.boundary()

    def boundary(self) -> None:
        if self.to_its_end or not self._auto:
            return
        with self.engine._putting:
            self._close()
        if self.held:
            self._send_if_due()

    def _close(self) -> None:
        """The region ends here."""
        if (self.num_ops or self._log) and not (self.held and self._settle()):
            self._learn()
        self._open()

    def _open(self) -> None:
        """A region begins here."""
        engine = self.engine
        self._words, self._ops = len(engine._stream), len(engine._wheres)
        self._log, self._logged = [], 0
        self._look_at = max(_LOOK_FOR_LOOP, 2 * self._step_length)
        self._expected, self._matched, self.rest = None, 0, 0
        self.held = self._auto and bool(self._book.shapes)
        engine._due = len(engine._wheres) + _LOOK_EVERY if self.held else engine._size_of_next()

    def _let_go(self) -> None:
        """What is issued from here to the next boundary is sent as always."""
        self.held = False
        self.engine._due = self.engine._size_of_next()

    def _settle(self) -> bool:
        """Replace the region, if it is a step that is known."""
        if not self.num_ops or self._log:
            return False
        self.stats.num_ops = self.num_ops
        found = self.replace(self._book)
        if found in ("recorded", "replayed"):
            setattr(self.stats, found, getattr(self.stats, found) + 1)
            self._words, self._ops = len(self.engine._stream), len(self.engine._wheres)
        return found is not None

    def _is_on_track(self, count: int) -> bool:
        """Whether so many operations are the first ones of a known step."""
        stream, expected = self.engine._stream, self._expected
        if expected is None or not expected.has(stream, self._words, self._matched, count):
            expected = self._expected = self._book.beginning(stream, self._words, count)
        self._matched = count
        return expected is not None

    def _keep_log(self) -> None:
        """A part of the region is sent as it is."""
        if self._logged > _MAX_LOGGED:
            return
        if self.held:
            self._let_go()
        if (part := self._part()) is None:
            self._log, self._logged = [], _MAX_LOGGED + 1  # no step
        else:
            self._log.append(part)
            self._logged += len(part.kinds)

    def _learn(self) -> None:
        """The region was sent as it is, or will be: if it comes again and again it is a step."""
        self.stats.one_by_one += 1
        if not _MIN_OPS <= self._logged + self.num_ops <= _MAX_LOGGED or (part := self._part()) is None:
            return
        parts = [*self._log, part]
        kinds = tuple(itertools.chain.from_iterable(part.kinds for part in parts))
        if len(kinds) < _MIN_OPS:
            return
        key = hash(kinds)
        count = self._counted.pop(key, 0) + 1
        self._counted[key] = count
        while len(self._counted) > _MAX_COUNTED:
            self._counted.pop(next(iter(self._counted)))
        if not _SEEN_ENOUGH <= count < _SEEN_ENOUGH + _MAX_TAPES or not self._book.is_safe(kinds):
            return
        self._book.add(*self._book.part(parts, 0, len(kinds)))

    def _part(self) -> Part | None:
        """What waits of the region; None: an operation of ours is among it, which is no part of a step."""
        stream, wheres = self.issued() if self._words else (self.engine._stream, self.engine._wheres)
        try:
            return Part(stream, wheres, self._book.kinds_of(stream))
        except KeyError:
            return None

    def _look_for_loop(self) -> None:
        """Find what repeats at the end of the log, without boundaries to go by: from the operation that comes least
        often to where it comes again."""
        self._look_at = 2 * self._logged
        book = self._book
        row = [kind for part in self._log for kind in part.kinds]
        often = {kind: count for kind, count in collections.Counter(row).items() if count >= 3}
        if not often:
            return
        least = min(often.values()) + 1  # the last round may not be over yet
        start = next(kind for kind in row if 0 < often.get(kind, 0) <= least)
        places = [at for at, kind in enumerate(row) if kind == start]
        end, length = places[-1], places[-1] - places[-2]
        first = end - length * -(-_MIN_LOOP // length)
        if first < length or row[first:end] != row[first - length : end - length]:
            return
        kinds = row[first:end]
        if tuple(kinds) not in book.shapes and book.is_safe(kinds):
            book.add(*book.part(self._log, first, end), is_loop=True)
        self.rest = (end - len(row)) % length
        if self.rest == 0:
            self._open()

    def _send_if_due(self) -> None:
        if self.engine._wheres and self._is_due():
            self.engine._keep_near(_MAX_AHEAD)
            self.engine.flush()

    def _is_due(self) -> bool:
        """Whether what was issued is to be sent now; an acknowledgement will see to it otherwise."""
        return not self.engine.has_enough or len(self.engine._wheres) >= _STEPS_IN_ONE


# ---------------------------------------------------------------------------------------------------------------------
# Whose step it is


def _among(things: Any, found: list[Engine]) -> Engine | None:
    """The one engine whose tensors are among these: as they are, as parameters, or as attributes."""
    own = {id(tensor._spec.engine) for tensor in _near(things) if hasattr(tensor, "_spec")}
    matching = [engine for engine in found if id(engine) in own]
    return matching[0] if len(matching) == 1 else None


def _near(things: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(things):
        is_plain = isinstance(leaf, (torch.Tensor, ModuleType, type)) or not hasattr(leaf, "__dict__")
        for thing in (leaf, *(() if is_plain else vars(leaf).values())):
            yield from thing.parameters() if isinstance(thing, torch.nn.Module) else (thing,)


def _named_by(function: Callable[..., Any]) -> list[Any]:
    """What the function's own code names, around it and in its module."""
    try:
        names = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function of Python's, or a name that has no value yet
        return []
    return [*names.nonlocals.values(), *names.globals.values()]


def _stepped(*_: Any) -> None:
    """An optimizer has made a step."""
    for engine in list(engines.ENGINES):
        if isinstance(engine.watcher, Recorder):
            with contextlib.suppress(MeshbookError):  # it may be another's; whoever uses its tensors is told
                engine.watcher.stepped()


register_optimizer_step_post_hook(_stepped)
