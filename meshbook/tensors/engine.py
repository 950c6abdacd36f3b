"""Operations on their way to the ranks: in batches, in order, never far ahead, and what became of them.

One `Engine` per client and part of a mesh. `emit` takes an operation as numbers and does not wait; `wait` and `fetch`
do. A batch is a command like a cell: the ranks run it on their main threads, in order with the cells that this process
sends, and Stop ends it. Knows nothing of torch's dispatch (`remote`) or of shapes (`plan`).

Seams: operations wait from `hold` to `release`, which may put another in their place (`recording`); `add_template`,
`upload` and `next_id` serve whoever makes operations of his own.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
import queue
import secrets
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from meshbook.controller.console import Console
from meshbook.controller.presses import uninterrupted
from meshbook.controller.results import error_of
from meshbook.controller.session import Session, render
from meshbook.errors import CellInterrupted, Failure, MeshbookError, NotAttached, OperationFailed, RankLost
from meshbook.ids import Ranks, name_ranks
from meshbook.mesh import MeshAxes
from meshbook.rank.tensors.modes import Modes
from meshbook.rank.tensors.modes import now as modes_now
from meshbook.tensors.plan import Planner, Spec, Template
from meshbook.wire import messages

# In place of a template's number, before a count and so many ids: faults of theirs that the user knows are forgotten.
CLEAR = -1
# Operations in a batch, by how many batches the ranks have before them: few while they wait for work, more then.
_BATCHES = (48, 64, 128, 192, 256)
# Batches that the ranks have not acknowledged before Python waits for them: some 8,000 operations, a few train steps.
_MAX_AHEAD = 32
# Batches with which the ranks have enough to do: what comes next may wait for more.
_ENOUGH = 2
# Seconds after the last operation before a batch that is not full is sent all the same.
_IDLE_S = 0.005
# Operations that are held back at most; a longer step is sent as it goes.
_MAX_HELD = 50_000
# Recorded steps that travel in one message while the ranks have enough to do, and messages that they may have before
# them: a message costs each rank a quarter of a millisecond, and 8 of 4 steps are far enough ahead.
_STEPS_IN_ONE, _MAX_STEPS_AHEAD = 4, 8
# Ids that nobody holds any more are told to the ranks so many at a time: each word costs, each tensor is memory there.
_FREE_AT_ONCE = 16
# Faults whose lines are remembered.
_MAX_FAULTS = 1000
_MAX_USER_FRAMES = 3
_LOST_TOLD = 4  # lost ranks of which is said how they ended
# Code objects of which it is known whose they are, and lines that operations came from.
_MAX_CODES, _MAX_LINES = 4096, 4096
# Templates that are kept for sure; as many older ones go when there are more, here and on the ranks. A whole training
# step of a large model has some thousands, a loop over `x[i]` one for each i.
_MAX_TEMPLATES = 8192

# All that are alive, for who records without being told a mesh.
ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()

# Called on the user's thread once it is known what a fault, or a Stop, has left on the ranks of an engine.
AFTER_FAULT: list[Callable[[Engine], None]] = []

Where = tuple[tuple[CodeType, int], ...]  # code and instruction of the user's lines, innermost first
# An operation on its way: its template's number, ids of inputs, ids of outputs, floats; or 0, how many, and ids that
# nobody holds any more.
Issued = tuple[list[int | float], Where]

_encoder = msgspec.msgpack.Encoder()
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_getframe = sys._getframe
_is_deterministic = torch._C._get_deterministic_algorithms
# Whose code it is, by id: a code object's own hash goes through all of it. The user's own, or torch's or ours; and the
# user's with nothing of theirs behind it: a module, or a cell, which IPython runs.
_OTHERS, _USERS, _OUTERMOST = range(3)
_whose: dict[int, int] = {}
_kept: list[CodeType] = []  # so that these ids stay theirs
_CALL = torch.nn.Module._call_impl.__code__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_backward_now = torch._C._current_graph_task_id  # a number of its own for each call of backward()
# The last of those that operations came from, and the lines that called it.
_backward: tuple[int, Where] = (-1, ())
# By an instruction's address, which stays its own as long as its code is kept.
_lines: dict[int, tuple[CodeType, messages.Frame]] = {}


class Handle:
    """A tensor's life on the ranks: when it dies here, its id is freed there.

    An object of its own: torch may bring a tensor's Python object back to life after `__del__`. No `__init__` is
    called: one is made for every operation. The finalizer is C code, in a slot: a KeyboardInterrupt that comes in a
    finalizer in Python is dropped, and with it the Stop that somebody pressed.
    """

    __slots__ = ("__del__", "changes", "id", "spec")

    __del__: Callable[[], None]
    id: int
    spec: Spec  # what the tensor is like
    changes: list[int] | None  # of a view, and of what it is one of
    is_part = False  # a view that DTensor had to copy (`parts`)

    def family(self) -> list[int]:
        """How often it was changed, or any of its views: one count for all of them."""
        if self.changes is None:
            self.changes = [0]
        return self.changes


@dataclass
class Held:
    """Operations that wait for the end of a step.

    Attributes:
        first: how many operations that have not been sent are before them.
        broken: why they were sent before that; "" while they wait.
    """

    first: int = 0
    broken: str = ""


class Exchange(Protocol):
    """What becomes of held operations.

    Args:
        held: operations, in order.
        freed: ids that nobody holds any more, of which the ranks have not been told.

    Returns:
        The operation that stands for them, and the ids of them that the ranks then never hear of; None: they are sent
        as they are.
    """

    def __call__(self, held: list[Issued], freed: list[int]) -> tuple[Issued, set[int]] | None: ...


@dataclass
class _Batch:
    first: int
    wheres: list[Where]
    templates: list[bytes]
    freed: list[int]
    command: messages.RunOps
    ordinal: int = 0  # among all batches
    steps: list[Step] = field(default_factory=list)  # of optimizers, which end in it
    future: Future[Any] | None = None  # None: it is about to be sent


@dataclass
class Fault:
    """What ranks said of an operation that failed."""

    number: int
    ename: str
    evalue: str
    trace: str
    interrupted: bool = False
    secondary: bool = False  # another rank had the fault
    ranks: set[int] = field(default_factory=set)
    where: Where = ()
    told: bool = False  # to the user


class Step(Protocol):
    """A step of an optimizer, as the engine knows it."""

    serial: int

    def undo(self) -> None:
        """Bring the optimizer's state in Python back to before it. On the user's thread."""


class Engine:
    """The tensors of one client on one part of a mesh."""

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        assert session.axes is not None
        self.session, self.axes = session, axes
        ENGINES.add(self)
        self.ranks: Ranks = tuple(sorted(axes.ranks))
        self.planner = Planner(axes, self)
        self.cache: dict[Any, Template] = {}  # by kinds of operands; `learn` adds to it
        self._older: dict[Any, Template] = {}  # those that were not used since `cache` was last begun anew
        self.templates: dict[int, Template] = {}  # all of both, by number
        self._forgotten: list[int] = []  # numbers that ranks may forget once the next batch has run
        self.name = f"{session.connection.client}|{','.join(axes.names)}|{secrets.token_hex(3)}"
        self.next_id = itertools.count(1).__next__
        self.freed: deque[int] = deque()  # by finalizers, at any moment
        # How often tensors may have changed whose storage is not known here alone, such as a cell's: one family.
        self.others: list[int] = session.extras.setdefault("changes", [0])
        self.free = self.freed.append
        self.num_ops = self.num_batches = 0
        self._waiting: list[Issued] = []  # operations that have not been sent
        self._held: Held | None = None  # the last of them, where they wait for a step's end
        self._putting = threading.RLock()  # a finalizer may issue operations while one is put
        self._templates: list[bytes] = []
        self._uploads: list[messages.Upload] = []
        self._fed: list[tuple[messages.Rows, Future[Any]]] = []
        self._ahead: dict[str, _Batch] = {}
        self._changing = threading.RLock()  # to be entered by this name: a Stop in `with condition:` leaves it locked
        self._changed = threading.Condition(self._changing)
        self._sending = threading.RLock()
        self._faults: dict[tuple[int, str], Fault] = {}
        # What ranks said last of ids that have faults; `_changing` is held to write it.
        self._faulted: dict[int, Fault] = {}
        self._spared: dict[int, dict[int, int]] = {}  # id -> rank -> operations that were to change it and did not
        self._begun: set[int] = set()
        self._healed: dict[int, int] = {}  # id -> the batch in which it was overwritten
        self._half: dict[int, Fault] = {}  # changed on some ranks and not on others
        self._unsettled = False  # ranks may have come out of step: to be looked at before the next operation
        self._settling = False
        self._drain = False  # groups broke: they are formed anew once all batches have ended
        self.trouble = False  # any of the above
        self._step: Step | None = None  # of an optimizer, being issued
        self._step_began = (0, 0)  # operations before it that were not sent, and batches that were
        self._steps_ended: list[Step] = []  # ... and not sent
        self._open_steps: dict[int, Step] = {}  # of which is not known that all ranks have taken them
        self._ended: MeshbookError | None = None
        self._modes: Modes | None = ()  # that the ranks have been told; None: not known
        self._is_deterministic = False  # of these
        self._number = 1
        self._due = _BATCHES[0]
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # C code: a Stop leaves no lock of it taken
        session.before_call.append(_weak(self._before_call))
        session.ahead.append(_weak(self._calls_ahead))
        thread = threading.Thread(
            target=_send_when_idle, args=(weakref.ref(self), self._woken), name="meshbook-tensors", daemon=True
        )
        thread.start()

    # ---- operations

    def emit(self, numbers: list[int | float], where: Where) -> None:
        """An operation: its template's number, ids of inputs, ids of outputs, floats. Waits only when too far ahead.

        Raises:
            RankLost, NotAttached: nobody is left to run it.
        """
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        if self.trouble:
            self._look_out(numbers)
        # All of them are looked at once per batch: it takes as long as half an operation.
        if not self._waiting or _is_deterministic() is not self._is_deterministic:
            self.follow_modes()
        if len(self.freed) >= _FREE_AT_ONCE and self._held is None:
            self._free_ids()
        with self._putting:
            self._waiting.append((numbers, where))  # one step: a Stop leaves no operation without its line
            size = len(self._waiting)
        if size >= self._due:
            self.flush()
        elif size == 1:
            self._woken.put(None)

    def follow_modes(self) -> None:
        """Have the ranks do what comes now as torch is set here."""
        modes = modes_now()
        if modes == self._modes:
            return
        key = ("set_modes", modes)
        template = self.cache.get(key) or self.learn(key, self.planner.plan_none, "set_modes", (modes,))
        with uninterrupted():
            self._modes, self._is_deterministic = modes, _is_deterministic()
            self.put([([template.number], here())])

    def put(self, issued: Iterable[Issued]) -> None:
        """Operations for the next batch, which is not sent for their sake."""
        with self._putting:
            self._waiting += issued

    def _free_ids(self) -> None:
        with uninterrupted():
            ids = _drained(self.freed)
            if ids:
                self.put([([0, len(ids), *ids], ())])

    def new_handle(self) -> Handle:
        """Of a tensor that there will be: with an id that no other has, and no spec yet."""
        handle = Handle()
        handle.id = made = self.next_id()
        handle.__del__ = partial(self.free, made)
        handle.changes = None
        return handle

    def add_template(self, body: bytes) -> None:
        """What ranks must know before operations of this template come."""
        with self._putting:
            self._templates.append(body)

    def learn(self, key: Any, plan: Callable[..., Template], *args: Any) -> Template:
        """The template of a kind of operation that is not in `cache`: an older one, or what `plan(*args)` makes."""
        with self._putting:
            template = self._older.pop(key, None)
        if template is None:
            with uninterrupted():  # torch's modes are others meanwhile
                template = plan(*args)
            if template.body:  # before anybody can find it and send an operation of it
                self.add_template(template.body)
        with self._putting:
            if len(self.cache) >= _MAX_TEMPLATES:
                self.forget(old.number for old in self._older.values())
                self._older, self.cache = self.cache, {}
            self.cache[key] = template
            if template.number:
                self.templates[template.number] = template
        return template

    def forget(self, numbers: Iterable[int]) -> None:
        """Templates of which no operation will be issued any more."""
        with self._putting:
            for number in numbers:
                self.templates.pop(number, None)
                self._forgotten.append(number)

    def upload(self, tensor: torch.Tensor, placements: Any) -> Handle:
        """A handle to a tensor that the ranks get with the next batch; each keeps its part. Copies, does not wait.

        Args:
            placements: torch's, one per axis; None: all of it on every rank, for the per-rank view.
        """
        handle = self.new_handle()
        payload = self.session.dump((tensor.detach(), placements), self.ranks)
        with self._sending:
            # It is bound before its batch; what comes before it stays before it. A step that is held back stays so.
            if self._waiting and self._held is None:
                self.flush()
            self._uploads.append(messages.Upload(id=handle.id, payload=payload))
        self._woken.put(None)
        return handle

    def feed(self, tensors: Sequence[torch.Tensor], placements: Sequence[Any]) -> tuple[list[Handle], Future[Any]]:
        """Handles to tensors that ranks get with the next batch, and the end of that; each keeps its own rows, without
        a copy. Does not wait. Any thread.

        What a rank cannot take is told, like an operation's failure, where it is used.

        Args:
            placements: torch's, for each tensor: at most one axis cuts it, along dim 0.
        """
        self._check()
        handles = [self.new_handle() for _ in tensors]
        payload = self.session.dump((tuple(tensors), tuple(placements)), self.ranks)
        rows, done = messages.Rows(ids=tuple(handle.id for handle in handles), payload=payload), Future[Any]()
        with self._putting:
            self._fed.append((rows, done))
        self._woken.put(None)
        return handles, done

    # ---- steps that are held back

    def hold(self, held: Held) -> bool:
        """Let operations wait from here on, until `release`. Whoever needs a value of them sends them before that.

        Returns:
            False: others are held already, and nothing is done.
        """
        if self._held is not None:
            return False
        if self._is_due_as_steps():
            self.flush()
        with self._putting:
            held.first, self._held = len(self._waiting), held
            self._due = held.first + _MAX_HELD
        return True

    def release(self, held: Held, exchange: Exchange | None) -> None:
        """Operations wait no longer. Harmless for what was never held.

        Args:
            exchange: asked what becomes of them, if they have not been sent; None: they are sent as they are.
        """
        with uninterrupted():
            try:
                with self._putting:
                    if exchange is not None and self._held is held:
                        self._exchange(held.first, exchange)
            finally:
                with self._putting:
                    if self._held is held:
                        self._held, self._due = None, self._size_of_next()
        if exchange is not None and self._is_due_as_steps():
            self._keep_near(_MAX_STEPS_AHEAD)
            self.flush()
        elif self._uploads or self._fed or not self.has_enough:
            self._woken.put(None)

    def _exchange(self, first: int, exchange: Exchange) -> None:
        last = len(self._waiting)
        freed = _drained(self.freed)
        try:
            found = exchange(self._waiting[first:last], freed)
            if found is not None:
                self._waiting[first:last] = [found[0]]
                freed = [id for id in freed if id not in found[1]]
        finally:
            self.freed.extend(freed)

    def _break_hold(self) -> None:
        """All that waits is about to be sent."""
        held = self._held
        if held is None:
            return
        num_held = len(self._waiting) - held.first
        if num_held == 0:
            held.first, self._due = 0, _MAX_HELD
            return
        where = describe(here()).strip().replace("\n", " ")
        held.broken = f"more than {_MAX_HELD:,} operations" if num_held >= _MAX_HELD else where or "a value"
        self._held = None

    def _is_due_as_steps(self) -> bool:
        """Whether recorded steps are to be sent now; an acknowledgement will see to it otherwise."""
        return bool(self._waiting) and (not self.has_enough or len(self._waiting) >= _STEPS_IN_ONE)

    # ---- batches

    def flush(self) -> None:
        """Send what there is. Waits while the ranks are too far behind.

        Raises:
            RankLost: a rank is gone; so is whatever it held.
        """
        if not self._waiting and not self._uploads and not self._fed and not self.freed:
            return
        if self._step is not None:  # goes in one piece, so that a Stop finds all of it or nothing
            return
        self._keep_near()
        self._send(None)

    def pause(self) -> None:
        """Python may wait for something else now: ranks that have little to do get what there is."""
        if self._waiting and not self.has_enough and self._held is None:
            self.flush()

    def _before_call(self) -> None:
        self.others[0] += 1  # by whatever is called
        if self.is_open and not self.session.lost:  # else whoever uses these tensors is told, and cells go on
            self.flush()

    def _keep_near(self, limit: int = _MAX_AHEAD) -> None:
        self._check()
        if self._drain:
            limit = 1
        if len(self._ahead) >= limit and threading.current_thread() is not self.session.connection.thread:
            if threading.current_thread() is threading.main_thread() and self.session.is_free:
                self._wait_for_oldest(limit)
            with self._changing:
                while len(self._ahead) >= limit and self._ended is None:
                    self._changed.wait(1.0)
            self._check()
            self._drain = self._drain and bool(self._ahead)

    def _wait_for_oldest(self, limit: int) -> None:
        """Wait as for a cell, so that Stop reaches ranks that do not get on.

        Raises:
            CellInterrupted: Stop.
        """
        while len(self._ahead) >= limit and self._ended is None:
            batch = next(iter(self._ahead.values()), None)
            if batch is None or batch.future is None:
                return
            sink = Console(self.ranks, echo=True)
            finished = self.session.attend(batch.command, batch.future, sink=sink)
            if self.session.was_stopped(batch.command.call):
                error = error_of(finished, "an operation on tensors")
                if not isinstance(error, RankLost):
                    raise CellInterrupted((), self.ranks, summary="operations on tensors were stopped")
            with self._changing:  # the acknowledgement is noted by the thread that listens
                self._changed.wait_for(lambda: batch.command.call not in self._ahead, 5.0)  # noqa: B023

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        if self.session.ended is not None:
            self.session.check()
        lost = [rank for rank in self.session.info.ranks if rank.state == "dead" and rank.rank in self.ranks]
        if lost:
            how = "; ".join(
                f"rank {rank.rank} (pid {rank.pid} on {rank.host}) {rank.exit}" for rank in lost[:_LOST_TOLD]
            )
            more = f", and {len(lost) - _LOST_TOLD} more ended" if len(lost) > _LOST_TOLD else ""
            self._ended = RankLost(
                f"{how}{more}. With {'it' if len(lost) == 1 else 'them'} a part of every tensor of this mesh is gone: "
                "make them anew on a new mesh (%mesh restart)",
                ranks=[rank.rank for rank in lost],
                survivors=self.session.living(self.ranks),
            )
            raise self._ended

    def _send(self, fetch: messages.Fetch | None, **handlers: Any) -> tuple[messages.RunOps, Future[Any]] | None:
        """Make up a batch and send it, in one piece whatever happens."""
        with uninterrupted(), self._sending:
            with self._putting:
                self._break_hold()
                self._free_ids()
                if not self._waiting and not self._uploads and not self._fed and fetch is None:
                    return None  # templates that came, and those to be forgotten, go with the next batch
                waiting, self._waiting = self._waiting, []
                templates, self._templates = self._templates, []
                forgotten, self._forgotten = self._forgotten, []
                fed, self._fed = self._fed, []
                steps, self._steps_ended = self._steps_ended, []
            uploads, self._uploads = self._uploads, []
            issued, lines = zip(*waiting, strict=True) if waiting else ((), ())
            wheres = list(lines)
            words = [numbers for numbers in issued if numbers[0] <= 0]
            freed = [id for word in words if not word[0] for id in word[2:]]
            command = None
            try:
                command = messages.RunOps(
                    call=self.session.connection.next_call(),
                    ranks=self.ranks,
                    engine=self.name,
                    first=self._number,
                    ops=_encoder.encode(list(itertools.chain.from_iterable(issued))),
                    templates=tuple(templates),
                    uploads=tuple(uploads),
                    fed=tuple(rows for rows, _ in fed),
                    fetch=fetch,
                    forget=tuple(forgotten),
                    issued=_issued(wheres if fetch is None else [*wheres, here()]),
                )
                self._ahead[command.call] = _Batch(
                    self._number, wheres, templates, freed, command, self.num_batches, steps
                )
                self._number += len(waiting)
                self.num_ops += len(waiting) - len(words)
                self.num_batches += 1
                future = self.session.connection.request(command, **handlers)
                self._ahead[command.call].future = future
            except BaseException:
                if command is not None:
                    self._ahead.pop(command.call, None)
                with self._putting:
                    self._templates[:0] = templates
                    self._forgotten[:0] = forgotten
                    self._waiting[:0] = waiting
                    self._steps_ended[:0] = steps
                    if self._held is not None:
                        self._held.first += len(waiting)
                    self._uploads[:0] = uploads
                    self._fed[:0] = fed
                raise
            if self._held is None:
                self._due = self._size_of_next()
            call = command.call
            future.add_done_callback(lambda done: self._acknowledged(call, done))
            for _, arrived in fed:
                future.add_done_callback(partial(_pass_on, arrived))
            return command, future

    def _acknowledged(self, call: str, done: Future[Any]) -> None:
        """A batch has ended on every rank. Called by the thread that listens."""
        batch = self._ahead.get(call)
        if batch is None:
            return
        try:
            finished: messages.CallFinished = done.result()
        except MeshbookError as error:
            self._ended = error
        else:
            self._take_note(batch, finished)
        with self._changing:
            del self._ahead[call]
            if self._held is None:
                self._due = self._size_of_next()
            self._changed.notify_all()
        if self._waiting and not self.has_enough:  # held back while they had
            self._woken.put(None)

    def _size_of_next(self) -> int:
        return _BATCHES[min(len(self._ahead), len(_BATCHES) - 1)]

    def _take_note(self, batch: _Batch, finished: messages.CallFinished) -> None:
        for part in finished.parts:
            for told in (part.outcome.answer or {}).get("faults", ()):
                self._fault(batch, part.ranks, told)
        error = error_of(finished, "an operation on tensors")
        if isinstance(error, RankLost):
            self._ended = render(error)
        elif error is not None:  # stopped, perhaps before it began: what it was to tell the ranks is told again
            with self._putting:
                self._templates[:0] = batch.templates
            self.freed.extend(batch.freed)
            self._modes = None
            self._unsettled = True
        else:
            self._note_faulted(batch, finished.parts)
            self._check_in_step(batch, finished.parts)
        if error is None and not self._faulted:
            for step in batch.steps:
                self._open_steps.pop(step.serial, None)
        if any(part.outcome.groups_broken for part in finished.parts):
            self._drain = True
        self.trouble = bool(self._unsettled or self._faulted or self._half)

    def _check_in_step(self, batch: _Batch, parts: Sequence[messages.Part]) -> None:
        """After a batch without a fault all ranks of a group have begun as many collectives. Where they have not, the
        next one would take another's numbers."""
        answers = [part.outcome.answer or {} for part in parts]
        if len(parts) == 1 or any(answer.keys() & {"faults", "faulted", "poison"} for answer in answers):
            return
        met = {rank: answer.get("met", []) for part, answer in zip(parts, answers, strict=True) for rank in part.ranks}
        how = out_of_step(self.axes, met)
        if how is not None and self._ended is None:
            lines = describe(batch.wheres[-1]) if batch.wheres else ""
            self._ended = OperationFailed(
                (),
                summary=f"operations on tensors left the ranks out of step: {how}. Their numbers may be wrong, and the "
                f"next collective would wait for ever: start the mesh anew, %mesh restart"
                + (f"\nin the batch that ends with:\n{lines}" if lines else ""),
            )

    def _note_faulted(self, batch: _Batch, parts: Sequence[messages.Part]) -> None:
        """What ranks have no values for, as of the end of a batch."""
        told = [(part.ranks, of) for part in parts for of in (part.outcome.answer or {}).get("faulted", ())]
        with self._changing:
            self._healed = {id: ordinal for id, ordinal in self._healed.items() if ordinal > batch.ordinal}
            faulted: dict[int, Fault] = {}
            spared: dict[int, dict[int, int]] = {}
            begun: set[int] = set()
            for ranks, of in told:
                fault = self._fault(batch, ranks, of)
                for id in (*of["lost"], *of["spared"]):
                    known = faulted.get(id)
                    if id not in self._healed and (known is None or (known.secondary and not fault.secondary)):
                        faulted[id] = fault
                for id, count in of["spared"].items():
                    spared.setdefault(id, {}).update(dict.fromkeys(ranks, count))
                begun.update(of["begun"])
            self._faulted, self._spared, self._begun = faulted, spared, begun

    def _fault(self, batch: _Batch | None, ranks: Sequence[int], told: dict[str, Any]) -> Fault:
        key = number, _ = told["number"], told["ename"]
        fault = self._faults.get(key)
        if fault is None:
            fault = Fault(number, told["ename"], told["evalue"], told["trace"], told["interrupted"], told["secondary"])
            while len(self._faults) >= _MAX_FAULTS:
                self._faults.pop(next(iter(self._faults)))
            self._faults[key] = fault
        fault.ranks.update(ranks)
        if batch is not None and batch.first <= number < batch.first + len(batch.wheres):
            fault.where = batch.wheres[number - batch.first]
        return fault

    # ---- after a fault, or a Stop

    def _look_out(self, numbers: Sequence[int | float]) -> None:
        """Before an operation is issued: raise what is known of its operands, unless it overwrites them.

        Raises:
            OperationFailed: ranks have no value for one of them, or not the same.
        """
        if self._step is not None or self._settling:
            return
        if self._unsettled:
            self.settle()
        template = self.templates.get(int(numbers[0]))
        overwritten = template.mutates if template is not None and template.overwrites else ()
        healed: list[int] = []
        for place, id in enumerate(numbers[1:]):
            if id.__class__ is int and (id in self._faulted or id in self._half):
                if place not in overwritten:
                    self._refuse(int(id))
                healed.append(int(id))
        if healed:
            self._heal(healed)

    def look_at(self, ids: Iterable[int]) -> None:
        """Raise what is known of these tensors, as an operation on them would.

        Raises:
            OperationFailed: ranks have no value for one of them, or not the same.
        """
        if not self.trouble or self._step is not None or self._settling:
            return
        if self._unsettled:
            self.settle()
        for id in ids:
            if id in self._faulted or id in self._half:
                self._refuse(id)

    def _refuse(self, id: int) -> NoReturn:
        fault = self._half.get(id)
        if fault is None:
            raise self._failure(self._faulted[id])
        lines = describe(fault.where)
        issued = f" The operation was issued here:\n{lines}" if lines else ""
        raise OperationFailed(
            (Failure(tuple(sorted(fault.ranks)), fault.ename, fault.evalue),),
            summary="this tensor was changed on some ranks and not on others, when a fault or a Stop came between "
            f"({fault.ename}: {fault.evalue}). meshbook.recover(model, optimizer) compares what the ranks have, "
            f"restores what one of them has whole, and says what it could not.{issued}",
        )

    def _heal(self, ids: Iterable[int]) -> None:
        """The next batch leaves these without a fault."""
        with self._changing:
            for id in ids:
                self._healed[id] = self.num_batches
                self._faulted.pop(id, None)
                self._half.pop(id, None)
            self.trouble = bool(self._unsettled or self._faulted or self._half)

    def settle(self) -> None:
        """Ask the ranks how far they have come, after a fault that the user knows or a Stop: what was not changed on
        any of them is as it was; what was on some is to be told. Blocks.

        Raises:
            RankLost, CellInterrupted: as a cell.
        """
        self._settling = True
        try:
            answers = self.state(())
        finally:
            self._settling = False
        with uninterrupted():
            self._settled([set(answer["done"]) for answer in answers.values()])

    def _settled(self, done: list[set[int]]) -> None:
        """
        Args:
            done: the steps of optimizers that each rank has taken.
        """
        with self._changing:
            self._unsettled = False
            whole: list[int] = []
            for id, fault in self._faulted.items():
                counts = self._spared.get(id)
                if counts is None or not (fault.told or fault.secondary or fault.interrupted):
                    continue
                if id not in self._begun and len({counts.get(rank, 0) for rank in self.ranks}) == 1:
                    whole.append(id)
                else:
                    self._half[id] = fault
        self.clear(whole)
        for serial, step in reversed(list(self._open_steps.items())):
            if step in self._steps_ended:
                continue
            del self._open_steps[serial]
            if not any(serial in some for some in done):
                step.undo()
        for forget in AFTER_FAULT:
            forget(self)

    def state(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Which steps of optimizers each rank has taken, and hashes of its own pieces of these tensors. What it says of
        faults is noted. Blocks."""
        answers = self.fetch(messages.Fetch(how="state", ids=tuple(ids)))
        with self._changing:  # the acknowledgement is noted by the thread that listens
            self._changed.wait_for(lambda: not self._ahead, 30.0)
        return answers

    def clear(self, ids: Sequence[int]) -> None:
        """Have the ranks forget the faults of tensors that kept their values."""
        if not ids:
            return
        self.put([([CLEAR, len(ids), *ids], ())])
        self._heal(ids)

    def is_lost(self, id: int) -> bool:
        """Whether ranks are known to have no value of that id."""
        return id in self._faulted and id not in self._spared

    def faults_of(self, ids: Iterable[int]) -> dict[int, tuple[Fault, dict[int, int], bool]]:
        """Of those of these tensors that have one: the fault, the ranks that kept an earlier value and how many
        operations each left out, and whether one of those had begun."""
        return {
            id: (fault, self._spared.get(id, {}), id in self._begun)
            for id in ids
            if (fault := self._half.get(id) or self._faulted.get(id)) is not None
        }

    # ---- steps of optimizers

    def begin_step(self, step: Step) -> None:
        """What is issued from here to `end_step` is run by all ranks or by none, and goes to them in one piece."""
        with self._putting:
            self._step, self._step_began = step, (len(self._waiting), self.num_batches)

    def end_step(self, step: Step) -> None:
        with self._putting:
            self._open_steps[step.serial] = step
            self._steps_ended.append(step)
            self._step = None
        self._woken.put(None)

    def send_if_due(self) -> None:
        """Send what there is, if it is enough for a batch. Waits like `flush`."""
        if len(self._waiting) >= self._due:
            self.flush()

    @property
    def is_in_step(self) -> bool:
        """Whether a step of an optimizer is being issued."""
        return self._step is not None

    def drop_step(self) -> bool:
        """The step that is being issued did not come to its end: take back what was issued of it.

        Returns:
            False if some of it has been sent.
        """
        with self._putting:
            self._step = None
            first, num_batches = self._step_began
            if num_batches != self.num_batches:
                return False
            for numbers, _ in self._waiting[first:]:
                if not numbers[0]:
                    self.freed.extend(numbers[2:])  # type: ignore[arg-type]
            del self._waiting[first:]
            self._modes = None  # perhaps among it
            return True

    def _calls_ahead(self) -> list[str]:
        return list(self._ahead)

    # ---- waiting

    def wait(self) -> dict[int, dict[str, Any]]:
        """Wait until the ranks have run everything that was issued.

        Raises:
            OperationFailed: an operation without a result failed; others tell it where their result is used.
            RankLost, CellInterrupted: as a cell.
        """
        return self.fetch(messages.Fetch(how="nothing"))

    def fetch(self, fetch: messages.Fetch) -> dict[int, dict[str, Any]]:
        """What ranks answer once they have run everything before: rank -> {"value": object}. Blocks; Stop works.

        Raises:
            OperationFailed: what is asked for could not be computed.
            RankLost, CellInterrupted: as a cell.
        """
        self.look_at((fetch.id,))
        self._keep_near()
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._sending:
            sent = self._send(fetch, on_output=inbox.put)
            assert sent is not None
            command, future = sent
        # What is said unasked of ranks that do not get on comes by this way.
        finished = self.session.attend(command, future, inbox=inbox, sink=Console(self.ranks, echo=True))
        error = error_of(finished, "an operation on tensors")
        if error is None and self.session.was_stopped(command.call):  # answered before the Stop was there: a loop ends
            error = CellInterrupted((), self.ranks, summary="an operation on tensors was stopped as it ended")
        if error is not None:
            if isinstance(error, RankLost):
                self._ended = error
            raise render(error)
        answers: dict[int, dict[str, Any]] = {}
        poisons: dict[tuple[int, str], list[tuple[int, dict[str, Any]]]] = {}
        for part in finished.parts:
            answer = part.outcome.answer or {}
            for rank in part.ranks:
                if "poison" in answer:
                    told = answer["poison"]
                    poisons.setdefault((told["number"], told["ename"]), []).append((rank, told))
                else:
                    answers[rank] = dict(answer)
                    if part.outcome.value is not None and part.outcome.value.payload is not None:
                        answers[rank]["value"] = self.session.load(part.outcome.value.payload)
        if poisons:
            with self._changing:  # the line that issued it is noted with the acknowledgement, which has come by now
                self._changed.wait_for(lambda: command.call not in self._ahead, 5.0)
            found = [self._fault(None, [rank for rank, _ in told], told[0][1]) for told in poisons.values()]
            raise self._failure(min(found, key=lambda fault: (fault.secondary, fault.interrupted, fault.number)))
        return answers

    def _failure(self, fault: Fault) -> OperationFailed:
        """The error that tells of a fault, or of the one that it is the consequence of."""
        causes = [other for other in self._faults.values() if not (other.secondary or other.interrupted or other.told)]
        if fault.secondary and causes:
            fault = min(causes, key=lambda other: other.number)
        others = [other for other in causes if other is not fault]
        for other in (fault, *others):  # what they have left as it was can be used again
            other.told = True
        self._unsettled = self.trouble = True
        failure = Failure(
            tuple(sorted(fault.ranks)), fault.ename, fault.evalue, tuple(fault.trace.rstrip().splitlines())
        )
        lines = describe(fault.where)
        issued = f"\nissued here:\n{lines}" if lines else ""
        trace = f"\non {name_ranks(failure.ranks)}:\n{fault.trace.rstrip()}" if fault.trace else ""
        more = "".join(
            f"\nand {name_ranks(sorted(other.ranks))}: {other.ename}: {other.evalue}\n{describe(other.where[:1])}"
            for other in others[:3]
        )
        return OperationFailed(
            (failure,), summary=f"{name_ranks(failure.ranks)}: {fault.ename}: {fault.evalue}{issued}{trace}{more}"
        )

    @property
    def has_enough(self) -> bool:
        """Whether the ranks have enough to do for now."""
        return len(self._ahead) >= _ENOUGH

    @property
    def is_open(self) -> bool:
        """Whether operations may be issued."""
        return self._ended is None and self.session.ended is None and not self.session.connection.closed

    def close(self) -> None:
        self._ended = self._ended or NotAttached("these tensors were let go of")


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def here(depth: int = 2) -> Where:
    """The user's lines that lead to this operation, innermost first: code and instruction, which are cheap to keep.
    The module, or cell, that they are in is the last; three at most.

    The dearest part of an operation: a frame is asked as little as can be. All operations of a backward() have the
    lines that called it, but for those of a hook, or a function's own backward.
    """
    global _backward
    frame: FrameType | None = _getframe(depth)
    found: list[tuple[CodeType, int]] = []
    known, backward = _whose, None
    while frame is not None:
        code = frame.f_code
        try:
            whose = known[id(code)]
        except KeyError:
            whose = _get_to_know(code)
        if whose:
            found.append((code, frame.f_lasti))
            if whose == _OUTERMOST or len(found) == _MAX_USER_FRAMES:
                break
        elif code is _BACKWARD:
            if not found and (now := _backward_now()) >= 0:
                last, lines = _backward
                if last == now:
                    return lines
                backward = now
        elif code is _CALL and (frame := frame.f_back) is None:  # its caller is torch's too
            break
        frame = frame.f_back
    lines = tuple(found)
    if backward is not None:
        _backward = (backward, lines)
    return lines


def _get_to_know(code: CodeType) -> int:
    """Whose code this is, from now on known."""
    if len(_kept) >= _MAX_CODES:  # of cells that were run long ago
        _whose.clear()
        _kept.clear()
    _kept.append(code)
    if code.co_filename.startswith((_TORCH, _OURS)):
        whose = _OTHERS
    else:
        whose = _OUTERMOST if code.co_name.startswith(("<module>", "<cell line")) else _USERS
    _whose[id(code)] = whose
    return whose


def describe(where: Where) -> str:
    """Lines as a traceback shows them, outermost first."""
    shown = []
    for code, instruction in reversed(where):
        line = _number(code, instruction)
        text = linecache.getline(code.co_filename, line).strip()
        shown.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}')
    return "\n".join(shown)


def _issued(wheres: Iterable[Where]) -> bytes:
    """The lines of a batch's operations, for who looks at the ranks while they run it; 0.2 us per operation."""
    places: dict[int, int] = {}
    lines: list[messages.Frame] = []
    row: list[int] = []
    place, last = 0, None
    for where in wheres:
        if where and where is not last:  # not only ids that nobody holds any more, and not the same backward() again
            last = where
            code, instruction = where[0]
            address = id(code) + instruction  # its own: a code object has its instructions in it
            try:
                place = places[address]
            except KeyError:
                place = places[address] = len(lines)
                lines.append(_line(code, instruction))
        row.append(place)
    if not lines:
        return b""
    cells = {file: cell for file in {line.file for line in lines} if (cell := _cell_of(file)) is not None}
    return _encoder.encode(messages.Issued(lines=tuple(lines), places=tuple(row), cells=cells))


def innermost(where: Where) -> messages.Frame | None:
    """The user's innermost line of those that led to an operation."""
    return _line(*where[0]) if where else None


def _line(code: CodeType, instruction: int) -> messages.Frame:
    address = id(code) + instruction
    known = _lines.get(address)
    if known is None:
        if len(_lines) >= _MAX_LINES:  # of cells that were run long ago
            _lines.clear()
        frame = messages.Frame(file=code.co_filename, line=_number(code, instruction), function=code.co_name)
        known = _lines[address] = code, frame
    return known[1]


def _cell_of(file: str) -> str | None:
    """How people know the cell of this file name, where this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return None if number is None else f"cell {number}"


def _number(code: CodeType, instruction: int) -> int:
    """The number of the line that an instruction is of."""
    return next(
        (number for start, stop, number in code.co_lines() if start <= instruction < stop and number is not None),
        code.co_firstlineno,
    )


# ---------------------------------------------------------------------------------------------------------------------


def _drained(ids: deque[int]) -> list[int]:
    found: list[int] = []
    take, keep = ids.popleft, found.append
    try:
        for _ in range(len(ids)):
            keep(take())
    except IndexError:  # somebody else drains them too
        pass
    return found


def _pass_on(other: Future[Any], done: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        other.set_result(done.result())
    else:
        other.set_exception(error)


def _weak(method: Callable[[], Any]) -> Callable[[], Any]:
    """A method whose object may go; nothing is done then."""
    held = weakref.WeakMethod(method)

    def call() -> Any:
        alive = held()
        return alive() if alive is not None else None

    return call


def _send_when_idle(engine_of: weakref.ref[Engine], woken: queue.SimpleQueue[None]) -> None:
    """The thread that sends a batch which nobody fills: it must not keep the engine alive."""
    while True:
        try:
            woken.get(timeout=5.0)
        except queue.Empty:
            engine = engine_of()
            if engine is None or engine.session.connection.closed:
                return
            del engine
            continue
        time.sleep(_IDLE_S)
        while not woken.empty():
            woken.get()
        engine = engine_of()
        if engine is None:
            return
        try:
            if engine._held is None:  # else `release` wakes this thread
                engine.flush()
        except MeshbookError:  # told to whoever waits or goes on
            pass
        except Exception as error:  # without this thread nothing would be sent any more while Python is idle
            warnings.warn(
                f"operations on tensors could not be sent in the background ({type(error).__name__}: {error}); they "
                "are sent with the next one, or when somebody waits for a value",
                stacklevel=1,
            )
        del engine


def out_of_step(axes: MeshAxes, met: Mapping[int, Sequence[int]]) -> str | None:
    """Which ranks of one group have begun unlike numbers of collectives in a batch, in words; None: none.

    Args:
        met: how many each rank has begun, by axis; empty: none at all.
    """
    for axis, name in enumerate(axes.names):
        step = math.prod(axes.shape[axis + 1 :])
        groups: dict[int, list[int]] = {}
        for place, rank in enumerate(axes.ranks):
            groups.setdefault(place - place // step % axes.shape[axis] * step, []).append(rank)
        for ranks in groups.values():
            counts = {rank: met[rank][axis] if met[rank] else 0 for rank in ranks if rank in met}
            if len(set(counts.values())) > 1:
                told = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
                return f"of the collectives along {name}, {told}"
    return None
