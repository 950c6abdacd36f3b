"""Operations on their way to the ranks: in batches, in order, never far ahead, and what became of them.

One `TensorEngine` per client and part of a mesh. `emit` takes an operation as numbers and does not wait; `wait` and
`fetch` do. A batch is a command like a cell: the ranks run it on their main threads, in order with the cells that this
process sends, and Stop ends it. Knows nothing of torch's dispatch (`remote`) or of shapes (`plan`).

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
from meshbook.controller.results import error_from
from meshbook.controller.session import Session, render_error
from meshbook.controller.sigint import defer_sigint
from meshbook.errors import CellInterrupted, Failure, MeshbookError, NotAttached, OperationFailed, RankLost
from meshbook.ids import Ranks, name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors.modes import Modes
from meshbook.rank.tensors.modes import non_default_modes as modes_now
from meshbook.tensors.plan import Planner, Template, TensorSpec
from meshbook.wire import messages

# In place of a template's number, before a count and so many ids: faults of theirs that the user knows are forgotten.
CLEAR_FAULTS = -1
# Operations in a batch, by how many batches the ranks have before them: few while they wait for work, more then.
_BATCH_SIZES = (48, 64, 128, 192, 256)
# Batches that the ranks have not acknowledged before Python waits for them: some 8,000 operations, a few train steps.
_MAX_IN_FLIGHT = 32
# Batches with which the ranks have enough to do: what comes next may wait for more.
_SATURATED_BATCHES = 2
# Seconds after the last operation before a batch that is not full is sent all the same.
_IDLE_FLUSH_S = 0.005
# Operations that are held back at most; a longer step is sent as it goes.
_MAX_HELD_OPS = 50_000
# Recorded steps that travel in one message while the ranks have enough to do, and messages that they may have before
# them: a message costs each rank a quarter of a millisecond, and 8 of 4 steps are far enough ahead.
_STEPS_PER_BATCH, _MAX_STEP_BATCHES_IN_FLIGHT = 4, 8
# Ids that nobody holds any more are told to the ranks so many at a time: each word costs, each tensor is memory there.
_FREE_BATCH_SIZE = 16
# Faults whose lines are remembered.
_MAX_FAULTS = 1000
_MAX_USER_FRAMES = 3
_MAX_LOST_SHOWN = 4  # lost ranks of which is said how they ended
# Code objects of which it is known whose they are, and lines that operations came from.
_MAX_CACHED_CODES, _MAX_CACHED_FRAMES = 4096, 4096
# Templates that are kept for sure; as many older ones go when there are more, here and on the ranks. A whole training
# step of a large model has some thousands, a loop over `x[i]` one for each i.
_MAX_TEMPLATES = 8192

# All that are alive, for who records without being told a mesh.
ENGINES: weakref.WeakSet[TensorEngine] = weakref.WeakSet()

# Called on the user's thread once it is known what a fault, or a Stop, has left on the ranks of an engine.
FAULT_CALLBACKS: list[Callable[[TensorEngine], None]] = []

CallSite = tuple[tuple[CodeType, int], ...]  # code and instruction of the user's lines, innermost first
# An operation on its way: its template's number, ids of inputs, ids of outputs, floats; or 0, how many, and ids that
# nobody holds any more.
PendingOp = tuple[list[int | float], CallSite]

_encoder = msgspec.msgpack.Encoder()
_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_MESHBOOK_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_getframe = sys._getframe
_is_deterministic = torch._C._get_deterministic_algorithms
# Whose code it is, by id: a code object's own hash goes through all of it. The user's own, or torch's or ours; and the
# user's with nothing of theirs behind it: a module, or a cell, which IPython runs.
_LIBRARY_CODE, _USER_CODE, _OUTERMOST_USER_CODE = range(3)
_code_kinds: dict[int, int] = {}
_known_codes: list[CodeType] = []  # so that these ids stay theirs
_MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
_RUN_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
_current_graph_task_id = torch._C._current_graph_task_id  # a number of its own for each call of backward()
# The last of those that operations came from, and the lines that called it.
_last_backward: tuple[int, CallSite] = (-1, ())
# By an instruction's address, which stays its own as long as its code is kept.
_frame_cache: dict[int, tuple[CodeType, messages.Frame]] = {}


class TensorHandle:
    """A tensor's life on the ranks: when it dies here, its id is freed there.

    An object of its own: torch may bring a tensor's Python object back to life after `__del__`. No `__init__` is
    called: one is made for every operation. The finalizer is C code, in a slot: a KeyboardInterrupt that comes in a
    finalizer in Python is dropped, and with it the Stop that somebody pressed.
    """

    __slots__ = ("__del__", "id", "spec", "version_counter")

    __del__: Callable[[], None]
    id: int
    spec: TensorSpec  # what the tensor is like
    version_counter: list[int] | None  # of a view, and of what it is one of
    is_functional_view = False  # a view that DTensor had to copy (`parts`)

    def get_version_counter(self) -> list[int]:
        """How often it was changed, or any of its views: one count for all of them."""
        if self.version_counter is None:
            self.version_counter = [0]
        return self.version_counter


@dataclass
class HeldOps:
    """Operations that wait for the end of a step.

    Attributes:
        start: how many operations that have not been sent are before them.
        break_reason: why they were sent before that; "" while they wait.
    """

    start: int = 0
    break_reason: str = ""


class OpRewriter(Protocol):
    """What becomes of held operations.

    Args:
        held: operations, in order.
        freed: ids that nobody holds any more, of which the ranks have not been told.

    Returns:
        The operation that stands for them, and the ids of them that the ranks then never hear of; None: they are sent
        as they are.
    """

    def __call__(self, ops: list[PendingOp], freed: list[int]) -> tuple[PendingOp, set[int]] | None: ...


@dataclass
class _Batch:
    first_op: int
    call_sites: list[CallSite]
    templates: list[bytes]
    freed: list[int]
    command: messages.RunOps
    ordinal: int = 0  # among all batches
    finished_steps: list[UndoableStep] = field(default_factory=list)  # of optimizers, which end in it
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
    call_site: CallSite = ()
    is_reported: bool = False  # to the user


class UndoableStep(Protocol):
    """A step of an optimizer, as the engine knows it."""

    serial: int

    def undo(self) -> None:
        """Bring the optimizer's state in Python back to before it. On the user's thread."""


class TensorEngine:
    """The tensors of one client on one part of a mesh."""

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        assert session.axes is not None
        self.session, self.axes = session, axes
        ENGINES.add(self)
        self.ranks: Ranks = tuple(sorted(axes.ranks))
        self.planner = Planner(axes, self)
        self.cache: dict[Any, Template] = {}  # by kinds of operands; `learn` adds to it
        self._old_cache: dict[Any, Template] = {}  # those that were not used since `cache` was last begun anew
        self.templates: dict[int, Template] = {}  # all of both, by number
        self._evicted: list[int] = []  # numbers that ranks may forget once the next batch has run
        self.name = f"{session.connection.client_id}|{','.join(axes.names)}|{secrets.token_hex(3)}"
        self.next_id = itertools.count(1).__next__
        self.freed_ids: deque[int] = deque()  # by finalizers, at any moment
        # How often tensors may have changed whose storage is not known here alone, such as a cell's: one family.
        self.foreign_version_counter: list[int] = session.extras.setdefault("changes", [0])
        self.free_id = self.freed_ids.append
        self.num_ops = self.num_batches = 0
        self._pending_ops: list[PendingOp] = []  # operations that have not been sent
        self._held_ops: HeldOps | None = None  # the last of them, where they wait for a step's end
        self._queue_lock = threading.RLock()  # a finalizer may issue operations while one is put
        self._pending_templates: list[bytes] = []
        self._pending_uploads: list[messages.TensorUpload] = []
        self._pending_feeds: list[tuple[messages.ShardedUpload, Future[Any]]] = []
        self._in_flight: dict[str, _Batch] = {}
        self._state_lock = threading.RLock()  # to be entered by this name: a Stop in `with condition:` leaves it locked
        self._state_changed = threading.Condition(self._state_lock)
        self._send_lock = threading.RLock()
        self._faults: dict[tuple[int, str], Fault] = {}
        # What ranks said last of ids that have faults; `_changing` is held to write it.
        self._fault_by_id: dict[int, Fault] = {}
        self._skipped_writes: dict[
            int, dict[int, int]
        ] = {}  # id -> rank -> operations that were to change it and did not
        self._started_writes: set[int] = set()
        self._overwritten_in: dict[int, int] = {}  # id -> the batch in which it was overwritten
        self._half_written: dict[int, Fault] = {}  # changed on some ranks and not on others
        self._needs_resync = False  # ranks may have come out of step: to be looked at before the next operation
        self._is_resyncing = False
        self._must_drain = False  # groups broke: they are formed anew once all batches have ended
        self.needs_fault_check = False  # any of the above
        self._current_step: UndoableStep | None = None  # of an optimizer, being issued
        self._step_start = (0, 0)  # operations before it that were not sent, and batches that were
        self._finished_steps: list[UndoableStep] = []  # ... and not sent
        self._unconfirmed_steps: dict[int, UndoableStep] = {}  # of which is not known that all ranks have taken them
        self._fatal_error: MeshbookError | None = None
        self._sent_modes: Modes | None = ()  # that the ranks have been told; None: not known
        self._sent_deterministic = False  # of these
        self._next_op_number = 1
        self._flush_threshold = _BATCH_SIZES[0]
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()  # C code: a Stop leaves no lock of it taken
        session.before_call_hooks.append(_weak_callback(self._before_call))
        session.in_flight_calls.append(_weak_callback(self._in_flight_calls))
        thread = threading.Thread(
            target=_send_when_idle, args=(weakref.ref(self), self._wakeups), name="meshbook-tensors", daemon=True
        )
        thread.start()

    # ---- operations

    def emit(self, numbers: list[int | float], call_site: CallSite) -> None:
        """An operation: its template's number, ids of inputs, ids of outputs, floats. Waits only when too far ahead.

        Raises:
            RankLost, NotAttached: nobody is left to run it.
        """
        if self._fatal_error is not None:
            raise self._fatal_error.with_traceback(None)
        if self.needs_fault_check:
            self._check_operands(numbers)
        # All of them are looked at once per batch: it takes as long as half an operation.
        if not self._pending_ops or _is_deterministic() is not self._sent_deterministic:
            self.sync_modes()
        if len(self.freed_ids) >= _FREE_BATCH_SIZE and self._held_ops is None:
            self._enqueue_frees()
        with self._queue_lock:
            self._pending_ops.append((numbers, call_site))  # one step: a Stop leaves no operation without its line
            size = len(self._pending_ops)
        if size >= self._flush_threshold:
            self.flush()
        elif size == 1:
            self._wakeups.put(None)

    def sync_modes(self) -> None:
        """Have the ranks do what comes now as torch is set here."""
        modes = modes_now()
        if modes == self._sent_modes:
            return
        key = ("set_modes", modes)
        template = self.cache.get(key) or self.plan_and_cache(
            key, self.planner.plan_void_function, "set_modes", (modes,)
        )
        with defer_sigint():
            self._sent_modes, self._sent_deterministic = modes, _is_deterministic()
            self.enqueue([([template.number], capture_call_site())])

    def enqueue(self, ops: Iterable[PendingOp]) -> None:
        """Operations for the next batch, which is not sent for their sake."""
        with self._queue_lock:
            self._pending_ops += ops

    def _enqueue_frees(self) -> None:
        with defer_sigint():
            ids = _drain_ids(self.freed_ids)
            if ids:
                self.enqueue([([0, len(ids), *ids], ())])

    def new_handle(self) -> TensorHandle:
        """Of a tensor that there will be: with an id that no other has, and no spec yet."""
        handle = TensorHandle()
        handle.id = new_id = self.next_id()
        handle.__del__ = partial(self.free_id, new_id)
        handle.version_counter = None
        return handle

    def add_template(self, body: bytes) -> None:
        """What ranks must know before operations of this template come."""
        with self._queue_lock:
            self._pending_templates.append(body)

    def plan_and_cache(self, key: Any, plan: Callable[..., Template], *args: Any) -> Template:
        """The template of a kind of operation that is not in `cache`: an older one, or what `plan(*args)` makes."""
        with self._queue_lock:
            template = self._old_cache.pop(key, None)
        if template is None:
            with defer_sigint():  # torch's modes are others meanwhile
                template = plan(*args)
            if template.body:  # before anybody can find it and send an operation of it
                self.add_template(template.body)
        with self._queue_lock:
            if len(self.cache) >= _MAX_TEMPLATES:
                self.evict(old.number for old in self._old_cache.values())
                self._old_cache, self.cache = self.cache, {}
            self.cache[key] = template
            if template.number:
                self.templates[template.number] = template
        return template

    def evict(self, numbers: Iterable[int]) -> None:
        """Templates of which no operation will be issued any more."""
        with self._queue_lock:
            for number in numbers:
                self.templates.pop(number, None)
                self._evicted.append(number)

    def upload(self, tensor: torch.Tensor, placements: Any) -> TensorHandle:
        """A handle to a tensor that the ranks get with the next batch; each keeps its part. Copies, does not wait.

        Args:
            placements: torch's, one per axis; None: all of it on every rank, for the per-rank view.
        """
        handle = self.new_handle()
        payload = self.session.dump((tensor.detach(), placements), self.ranks)
        with self._send_lock:
            # It is bound before its batch; what comes before it stays before it. A step that is held back stays so.
            if self._pending_ops and self._held_ops is None:
                self.flush()
            self._pending_uploads.append(messages.TensorUpload(id=handle.id, payload=payload))
        self._wakeups.put(None)
        return handle

    def feed(
        self, tensors: Sequence[torch.Tensor], placements: Sequence[Any]
    ) -> tuple[list[TensorHandle], Future[Any]]:
        """Handles to tensors that ranks get with the next batch, and the end of that; each keeps its own rows, without
        a copy. Does not wait. Any thread.

        What a rank cannot take is told, like an operation's failure, where it is used.

        Args:
            placements: torch's, for each tensor: at most one axis cuts it, along dim 0.
        """
        self._check_open()
        handles = [self.new_handle() for _ in tensors]
        payload = self.session.dump((tuple(tensors), tuple(placements)), self.ranks)
        rows, acknowledged = (
            messages.ShardedUpload(ids=tuple(handle.id for handle in handles), payload=payload),
            Future[Any](),
        )
        with self._queue_lock:
            self._pending_feeds.append((rows, acknowledged))
        self._wakeups.put(None)
        return handles, acknowledged

    # ---- steps that are held back

    def hold(self, held: HeldOps) -> bool:
        """Let operations wait from here on, until `release`. Whoever needs a value of them sends them before that.

        Returns:
            False: others are held already, and nothing is done.
        """
        if self._held_ops is not None:
            return False
        if self._should_send_steps():
            self.flush()
        with self._queue_lock:
            held.start, self._held_ops = len(self._pending_ops), held
            self._flush_threshold = held.start + _MAX_HELD_OPS
        return True

    def release(self, held: HeldOps, rewriter: OpRewriter | None) -> None:
        """Operations wait no longer. Harmless for what was never held.

        Args:
            rewriter: asked what becomes of them, if they have not been sent; None: they are sent as they are.
        """
        with defer_sigint():
            try:
                with self._queue_lock:
                    if rewriter is not None and self._held_ops is held:
                        self._rewrite_held_ops(held.start, rewriter)
            finally:
                with self._queue_lock:
                    if self._held_ops is held:
                        self._held_ops, self._flush_threshold = None, self._next_batch_size()
        if rewriter is not None and self._should_send_steps():
            self._apply_backpressure(_MAX_STEP_BATCHES_IN_FLIGHT)
            self.flush()
        elif self._pending_uploads or self._pending_feeds or not self.is_saturated:
            self._wakeups.put(None)

    def _rewrite_held_ops(self, start: int, rewriter: OpRewriter) -> None:
        stop = len(self._pending_ops)
        freed = _drain_ids(self.freed_ids)
        try:
            replacement = rewriter(self._pending_ops[start:stop], freed)
            if replacement is not None:
                self._pending_ops[start:stop] = [replacement[0]]
                freed = [id for id in freed if id not in replacement[1]]
        finally:
            self.freed_ids.extend(freed)

    def _end_hold_early(self) -> None:
        """All that waits is about to be sent."""
        held = self._held_ops
        if held is None:
            return
        num_held = len(self._pending_ops) - held.start
        if num_held == 0:
            held.start, self._flush_threshold = 0, _MAX_HELD_OPS
            return
        reason = format_call_site(capture_call_site()).strip().replace("\n", " ")
        held.break_reason = (
            f"more than {_MAX_HELD_OPS:,} operations" if num_held >= _MAX_HELD_OPS else reason or "a value"
        )
        self._held_ops = None

    def _should_send_steps(self) -> bool:
        """Whether recorded steps are to be sent now; an acknowledgement will see to it otherwise."""
        return bool(self._pending_ops) and (not self.is_saturated or len(self._pending_ops) >= _STEPS_PER_BATCH)

    # ---- batches

    def flush(self) -> None:
        """Send what there is. Waits while the ranks are too far behind.

        Raises:
            RankLost: a rank is gone; so is whatever it held.
        """
        if not self._pending_ops and not self._pending_uploads and not self._pending_feeds and not self.freed_ids:
            return
        if self._current_step is not None:  # goes in one piece, so that a Stop finds all of it or nothing
            return
        self._apply_backpressure()
        self._send_batch(None)

    def flush_if_idle(self) -> None:
        """Python may wait for something else now: ranks that have little to do get what there is."""
        if self._pending_ops and not self.is_saturated and self._held_ops is None:
            self.flush()

    def _before_call(self) -> None:
        self.foreign_version_counter[0] += 1  # by whatever is called
        if self.is_open and not self.session.lost:  # else whoever uses these tensors is told, and cells go on
            self.flush()

    def _apply_backpressure(self, limit: int = _MAX_IN_FLIGHT) -> None:
        self._check_open()
        if self._must_drain:
            limit = 1
        if len(self._in_flight) >= limit and threading.current_thread() is not self.session.connection.thread:
            if threading.current_thread() is threading.main_thread() and self.session.is_idle:
                self._wait_for_oldest_batch(limit)
            with self._state_lock:
                while len(self._in_flight) >= limit and self._fatal_error is None:
                    self._state_changed.wait(1.0)
            self._check_open()
            self._must_drain = self._must_drain and bool(self._in_flight)

    def _wait_for_oldest_batch(self, limit: int) -> None:
        """Wait as for a cell, so that Stop reaches ranks that do not get on.

        Raises:
            CellInterrupted: Stop.
        """
        while len(self._in_flight) >= limit and self._fatal_error is None:
            batch = next(iter(self._in_flight.values()), None)
            if batch is None or batch.future is None:
                return
            sink = Console(self.ranks, echo=True)
            finished = self.session.wait_foreground(batch.command, batch.future, on_output=sink)
            if self.session.was_interrupted(batch.command.call):
                error = error_from(finished, "an operation on tensors")
                if not isinstance(error, RankLost):
                    raise CellInterrupted((), self.ranks, summary="operations on tensors were stopped")
            with self._state_lock:  # the acknowledgement is noted by the thread that listens
                self._state_changed.wait_for(lambda: batch.command.call not in self._in_flight, 5.0)  # noqa: B023

    def _check_open(self) -> None:
        if self._fatal_error is not None:
            raise self._fatal_error.with_traceback(None)
        if self.session.ended is not None:
            self.session.check_attached()
        lost = [rank for rank in self.session.info.ranks if rank.state == "dead" and rank.rank in self.ranks]
        if lost:
            exits = "; ".join(
                f"rank {rank.rank} (pid {rank.pid} on {rank.host}) {rank.exit}" for rank in lost[:_MAX_LOST_SHOWN]
            )
            more = f", and {len(lost) - _MAX_LOST_SHOWN} more ended" if len(lost) > _MAX_LOST_SHOWN else ""
            self._fatal_error = RankLost(
                f"{exits}{more}. With {'it' if len(lost) == 1 else 'them'} a part of every tensor of this mesh is "
                "gone: make them anew on a new mesh (%mesh restart)",
                ranks=[rank.rank for rank in lost],
                survivors=self.session.living(self.ranks),
            )
            raise self._fatal_error

    def _send_batch(self, fetch: messages.Fetch | None, **handlers: Any) -> tuple[messages.RunOps, Future[Any]] | None:
        """Make up a batch and send it, in one piece whatever happens."""
        with defer_sigint(), self._send_lock:
            with self._queue_lock:
                self._end_hold_early()
                self._enqueue_frees()
                if not self._pending_ops and not self._pending_uploads and not self._pending_feeds and fetch is None:
                    return None  # templates that came, and those to be forgotten, go with the next batch
                pending, self._pending_ops = self._pending_ops, []
                templates, self._pending_templates = self._pending_templates, []
                evicted, self._evicted = self._evicted, []
                fed, self._pending_feeds = self._pending_feeds, []
                steps, self._finished_steps = self._finished_steps, []
            uploads, self._pending_uploads = self._pending_uploads, []
            ops, sites = zip(*pending, strict=True) if pending else ((), ())
            call_sites = list(sites)
            control_ops = [numbers for numbers in ops if numbers[0] <= 0]
            freed = [id for control_op in control_ops if not control_op[0] for id in control_op[2:]]
            command = None
            try:
                command = messages.RunOps(
                    call=self.session.connection.next_call_id(),
                    ranks=self.ranks,
                    engine=self.name,
                    first_op=self._next_op_number,
                    ops=_encoder.encode(list(itertools.chain.from_iterable(ops))),
                    templates=tuple(templates),
                    uploads=tuple(uploads),
                    sharded_uploads=tuple(rows for rows, _ in fed),
                    fetch=fetch,
                    evicted_templates=tuple(evicted),
                    call_sites=_encode_call_sites(call_sites if fetch is None else [*call_sites, capture_call_site()]),
                )
                self._in_flight[command.call] = _Batch(
                    self._next_op_number, call_sites, templates, freed, command, self.num_batches, steps
                )
                self._next_op_number += len(pending)
                self.num_ops += len(pending) - len(control_ops)
                self.num_batches += 1
                future = self.session.connection.request(command, **handlers)
                self._in_flight[command.call].future = future
            except BaseException:
                if command is not None:
                    self._in_flight.pop(command.call, None)
                with self._queue_lock:
                    self._pending_templates[:0] = templates
                    self._evicted[:0] = evicted
                    self._pending_ops[:0] = pending
                    self._finished_steps[:0] = steps
                    if self._held_ops is not None:
                        self._held_ops.start += len(pending)
                    self._pending_uploads[:0] = uploads
                    self._pending_feeds[:0] = fed
                raise
            if self._held_ops is None:
                self._flush_threshold = self._next_batch_size()
            call = command.call
            future.add_done_callback(lambda done: self._batch_acknowledged(call, done))
            for _, acknowledged in fed:
                future.add_done_callback(partial(_copy_outcome, acknowledged))
            return command, future

    def _batch_acknowledged(self, call: str, done: Future[Any]) -> None:
        """A batch has ended on every rank. Called by the thread that listens."""
        batch = self._in_flight.get(call)
        if batch is None:
            return
        try:
            finished: messages.CallFinished = done.result()
        except MeshbookError as error:
            self._fatal_error = error
        else:
            self._process_batch_result(batch, finished)
        with self._state_lock:
            del self._in_flight[call]
            if self._held_ops is None:
                self._flush_threshold = self._next_batch_size()
            self._state_changed.notify_all()
        if self._pending_ops and not self.is_saturated:  # held back while they had
            self._wakeups.put(None)

    def _next_batch_size(self) -> int:
        return _BATCH_SIZES[min(len(self._in_flight), len(_BATCH_SIZES) - 1)]

    def _process_batch_result(self, batch: _Batch, finished: messages.CallFinished) -> None:
        for part in finished.outcomes:
            for report in (part.outcome.reply or {}).get("faults", ()):
                self._register_fault(batch, part.ranks, report)
        error = error_from(finished, "an operation on tensors")
        if isinstance(error, RankLost):
            self._fatal_error = render_error(error)
        elif error is not None:  # stopped, perhaps before it began: what it was to tell the ranks is told again
            with self._queue_lock:
                self._pending_templates[:0] = batch.templates
            self.freed_ids.extend(batch.freed)
            self._sent_modes = None
            self._needs_resync = True
        else:
            self._update_faulted_ids(batch, finished.outcomes)
            self._check_collective_counts(batch, finished.outcomes)
        if error is None and not self._fault_by_id:
            for step in batch.finished_steps:
                self._unconfirmed_steps.pop(step.serial, None)
        if any(part.outcome.groups_broken for part in finished.outcomes):
            self._must_drain = True
        self.needs_fault_check = bool(self._needs_resync or self._fault_by_id or self._half_written)

    def _check_collective_counts(self, batch: _Batch, parts: Sequence[messages.OutcomeGroup]) -> None:
        """After a batch without a fault all ranks of a group have begun as many collectives. Where they have not, the
        next one would take another's numbers."""
        answers = [part.outcome.reply or {} for part in parts]
        if len(parts) == 1 or any(answer.keys() & {"faults", "faulted", "poison"} for answer in answers):
            return
        collective_counts = {
            rank: answer.get("met", []) for part, answer in zip(parts, answers, strict=True) for rank in part.ranks
        }
        mismatch = describe_collective_mismatch(self.axes, collective_counts)
        if mismatch is not None and self._fatal_error is None:
            lines = format_call_site(batch.call_sites[-1]) if batch.call_sites else ""
            self._fatal_error = OperationFailed(
                (),
                summary=f"operations on tensors left the ranks out of step: {mismatch}. Their numbers may be wrong, "
                f"and the next collective would wait for ever: start the mesh anew, %mesh restart"
                + (f"\nin the batch that ends with:\n{lines}" if lines else ""),
            )

    def _update_faulted_ids(self, batch: _Batch, parts: Sequence[messages.OutcomeGroup]) -> None:
        """What ranks have no values for, as of the end of a batch."""
        reports = [(part.ranks, report) for part in parts for report in (part.outcome.reply or {}).get("faulted", ())]
        with self._state_lock:
            self._overwritten_in = {
                id: ordinal for id, ordinal in self._overwritten_in.items() if ordinal > batch.ordinal
            }
            fault_by_id: dict[int, Fault] = {}
            skipped_writes: dict[int, dict[int, int]] = {}
            started_writes: set[int] = set()
            for ranks, report in reports:
                fault = self._register_fault(batch, ranks, report)
                for id in (*report["lost"], *report["spared"]):
                    known = fault_by_id.get(id)
                    if id not in self._overwritten_in and (known is None or (known.secondary and not fault.secondary)):
                        fault_by_id[id] = fault
                for id, count in report["spared"].items():
                    skipped_writes.setdefault(id, {}).update(dict.fromkeys(ranks, count))
                started_writes.update(report["begun"])
            self._fault_by_id, self._skipped_writes, self._started_writes = fault_by_id, skipped_writes, started_writes

    def _register_fault(self, batch: _Batch | None, ranks: Sequence[int], report: dict[str, Any]) -> Fault:
        key = number, _ = report["number"], report["ename"]
        fault = self._faults.get(key)
        if fault is None:
            fault = Fault(
                number, report["ename"], report["evalue"], report["trace"], report["interrupted"], report["secondary"]
            )
            while len(self._faults) >= _MAX_FAULTS:
                self._faults.pop(next(iter(self._faults)))
            self._faults[key] = fault
        fault.ranks.update(ranks)
        if batch is not None and batch.first_op <= number < batch.first_op + len(batch.call_sites):
            fault.call_site = batch.call_sites[number - batch.first_op]
        return fault

    # ---- after a fault, or a Stop

    def _check_operands(self, numbers: Sequence[int | float]) -> None:
        """Before an operation is issued: raise what is known of its operands, unless it overwrites them.

        Raises:
            OperationFailed: ranks have no value for one of them, or not the same.
        """
        if self._current_step is not None or self._is_resyncing:
            return
        if self._needs_resync:
            self.resync()
        template = self.templates.get(int(numbers[0]))
        overwritten = template.mutates if template is not None and template.overwrites else ()
        overwritten_ids: list[int] = []
        for position, id in enumerate(numbers[1:]):
            if id.__class__ is int and (id in self._fault_by_id or id in self._half_written):
                if position not in overwritten:
                    self._raise_fault(int(id))
                overwritten_ids.append(int(id))
        if overwritten_ids:
            self._mark_overwritten(overwritten_ids)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise what is known of these tensors, as an operation on them would.

        Raises:
            OperationFailed: ranks have no value for one of them, or not the same.
        """
        if not self.needs_fault_check or self._current_step is not None or self._is_resyncing:
            return
        if self._needs_resync:
            self.resync()
        for id in ids:
            if id in self._fault_by_id or id in self._half_written:
                self._raise_fault(id)

    def _raise_fault(self, id: int) -> NoReturn:
        fault = self._half_written.get(id)
        if fault is None:
            raise self._operation_failed(self._fault_by_id[id])
        lines = format_call_site(fault.call_site)
        issued = f" The operation was issued here:\n{lines}" if lines else ""
        raise OperationFailed(
            (Failure(tuple(sorted(fault.ranks)), fault.ename, fault.evalue),),
            summary="this tensor was changed on some ranks and not on others, when a fault or a Stop came between "
            f"({fault.ename}: {fault.evalue}). meshbook.recover(model, optimizer) compares what the ranks have, "
            f"restores what one of them has whole, and says what it could not.{issued}",
        )

    def _mark_overwritten(self, ids: Iterable[int]) -> None:
        """The next batch leaves these without a fault."""
        with self._state_lock:
            for id in ids:
                self._overwritten_in[id] = self.num_batches
                self._fault_by_id.pop(id, None)
                self._half_written.pop(id, None)
            self.needs_fault_check = bool(self._needs_resync or self._fault_by_id or self._half_written)

    def resync(self) -> None:
        """Ask the ranks how far they have come, after a fault that the user knows or a Stop: what was not changed on
        any of them is as it was; what was on some is to be told. Blocks.

        Raises:
            RankLost, CellInterrupted: as a cell.
        """
        self._is_resyncing = True
        try:
            answers = self.fetch_state(())
        finally:
            self._is_resyncing = False
        with defer_sigint():
            self._apply_resync([set(answer["done"]) for answer in answers.values()])

    def _apply_resync(self, steps_taken: list[set[int]]) -> None:
        """
        Args:
            steps_taken: the steps of optimizers that each rank has taken.
        """
        with self._state_lock:
            self._needs_resync = False
            unchanged_ids: list[int] = []
            for id, fault in self._fault_by_id.items():
                counts = self._skipped_writes.get(id)
                if counts is None or not (fault.is_reported or fault.secondary or fault.interrupted):
                    continue
                if id not in self._started_writes and len({counts.get(rank, 0) for rank in self.ranks}) == 1:
                    unchanged_ids.append(id)
                else:
                    self._half_written[id] = fault
        self.clear_faults(unchanged_ids)
        for serial, step in reversed(list(self._unconfirmed_steps.items())):
            if step in self._finished_steps:
                continue
            del self._unconfirmed_steps[serial]
            if not any(serial in taken for taken in steps_taken):
                step.undo()
        for callback in FAULT_CALLBACKS:
            callback(self)

    def fetch_state(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Which steps of optimizers each rank has taken, and hashes of its own pieces of these tensors. What it says of
        faults is noted. Blocks."""
        answers = self.fetch(messages.Fetch(mode="state", ids=tuple(ids)))
        with self._state_lock:  # the acknowledgement is noted by the thread that listens
            self._state_changed.wait_for(lambda: not self._in_flight, 30.0)
        return answers

    def clear_faults(self, ids: Sequence[int]) -> None:
        """Have the ranks forget the faults of tensors that kept their values."""
        if not ids:
            return
        self.enqueue([([CLEAR_FAULTS, len(ids), *ids], ())])
        self._mark_overwritten(ids)

    def is_lost(self, id: int) -> bool:
        """Whether ranks are known to have no value of that id."""
        return id in self._fault_by_id and id not in self._skipped_writes

    def faults_of(self, ids: Iterable[int]) -> dict[int, tuple[Fault, dict[int, int], bool]]:
        """Of those of these tensors that have one: the fault, the ranks that kept an earlier value and how many
        operations each left out, and whether one of those had begun."""
        return {
            id: (fault, self._skipped_writes.get(id, {}), id in self._started_writes)
            for id in ids
            if (fault := self._half_written.get(id) or self._fault_by_id.get(id)) is not None
        }

    # ---- steps of optimizers

    def begin_step(self, step: UndoableStep) -> None:
        """What is issued from here to `end_step` is run by all ranks or by none, and goes to them in one piece."""
        with self._queue_lock:
            self._current_step, self._step_start = step, (len(self._pending_ops), self.num_batches)

    def end_step(self, step: UndoableStep) -> None:
        with self._queue_lock:
            self._unconfirmed_steps[step.serial] = step
            self._finished_steps.append(step)
            self._current_step = None
        self._wakeups.put(None)

    def flush_if_full(self) -> None:
        """Send what there is, if it is enough for a batch. Waits like `flush`."""
        if len(self._pending_ops) >= self._flush_threshold:
            self.flush()

    @property
    def is_in_optimizer_step(self) -> bool:
        """Whether a step of an optimizer is being issued."""
        return self._current_step is not None

    def cancel_step(self) -> bool:
        """The step that is being issued did not come to its end: take back what was issued of it.

        Returns:
            False if some of it has been sent.
        """
        with self._queue_lock:
            self._current_step = None
            first, num_batches = self._step_start
            if num_batches != self.num_batches:
                return False
            for numbers, _ in self._pending_ops[first:]:
                if not numbers[0]:
                    self.freed_ids.extend(numbers[2:])  # type: ignore[arg-type]
            del self._pending_ops[first:]
            self._sent_modes = None  # perhaps among it
            return True

    def _in_flight_calls(self) -> list[str]:
        return list(self._in_flight)

    # ---- waiting

    def wait(self) -> dict[int, dict[str, Any]]:
        """Wait until the ranks have run everything that was issued.

        Raises:
            OperationFailed: an operation without a result failed; others tell it where their result is used.
            RankLost, CellInterrupted: as a cell.
        """
        return self.fetch(messages.Fetch(mode="nothing"))

    def fetch(self, fetch: messages.Fetch) -> dict[int, dict[str, Any]]:
        """What ranks answer once they have run everything before: rank -> {"value": object}. Blocks; Stop works.

        Raises:
            OperationFailed: what is asked for could not be computed.
            RankLost, CellInterrupted: as a cell.
        """
        self.check_ids((fetch.id,))
        self._apply_backpressure()
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._send_lock:
            sent = self._send_batch(fetch, on_output=inbox.put)
            assert sent is not None
            command, future = sent
        # What is said unasked of ranks that do not get on comes by this way.
        finished = self.session.wait_foreground(command, future, inbox=inbox, on_output=Console(self.ranks, echo=True))
        error = error_from(finished, "an operation on tensors")
        if error is None and self.session.was_interrupted(
            command.call
        ):  # answered before the Stop was there: a loop ends
            error = CellInterrupted((), self.ranks, summary="an operation on tensors was stopped as it ended")
        if error is not None:
            if isinstance(error, RankLost):
                self._fatal_error = error
            raise render_error(error)
        answers: dict[int, dict[str, Any]] = {}
        poisons: dict[tuple[int, str], list[tuple[int, dict[str, Any]]]] = {}
        for part in finished.outcomes:
            answer = part.outcome.reply or {}
            for rank in part.ranks:
                if "poison" in answer:
                    report = answer["poison"]
                    poisons.setdefault((report["number"], report["ename"]), []).append((rank, report))
                else:
                    answers[rank] = dict(answer)
                    if part.outcome.value is not None and part.outcome.value.payload is not None:
                        answers[rank]["value"] = self.session.load(part.outcome.value.payload)
        if poisons:
            with self._state_lock:  # the line that issued it is noted with the acknowledgement, which has come by now
                self._state_changed.wait_for(lambda: command.call not in self._in_flight, 5.0)
            found = [
                self._register_fault(None, [rank for rank, _ in report], report[0][1]) for report in poisons.values()
            ]
            raise self._operation_failed(
                min(found, key=lambda fault: (fault.secondary, fault.interrupted, fault.number))
            )
        return answers

    def _operation_failed(self, fault: Fault) -> OperationFailed:
        """The error that tells of a fault, or of the one that it is the consequence of."""
        causes = [
            other for other in self._faults.values() if not (other.secondary or other.interrupted or other.is_reported)
        ]
        if fault.secondary and causes:
            fault = min(causes, key=lambda other: other.number)
        others = [other for other in causes if other is not fault]
        for other in (fault, *others):  # what they have left as it was can be used again
            other.is_reported = True
        self._needs_resync = self.needs_fault_check = True
        failure = Failure(
            tuple(sorted(fault.ranks)), fault.ename, fault.evalue, tuple(fault.trace.rstrip().splitlines())
        )
        lines = format_call_site(fault.call_site)
        issued = f"\nissued here:\n{lines}" if lines else ""
        trace = f"\non {name_ranks(failure.ranks)}:\n{fault.trace.rstrip()}" if fault.trace else ""
        more = "".join(
            f"\nand {name_ranks(sorted(other.ranks))}: {other.ename}: {other.evalue}\n"
            f"{format_call_site(other.call_site[:1])}"
            for other in others[:3]
        )
        return OperationFailed(
            (failure,), summary=f"{name_ranks(failure.ranks)}: {fault.ename}: {fault.evalue}{issued}{trace}{more}"
        )

    @property
    def is_saturated(self) -> bool:
        """Whether the ranks have enough to do for now."""
        return len(self._in_flight) >= _SATURATED_BATCHES

    @property
    def is_open(self) -> bool:
        """Whether operations may be issued."""
        return self._fatal_error is None and self.session.ended is None and not self.session.connection.closed

    def close(self) -> None:
        self._fatal_error = self._fatal_error or NotAttached("these tensors were let go of")


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def capture_call_site(depth: int = 2) -> CallSite:
    """The user's lines that lead to this operation, innermost first: code and instruction, which are cheap to keep.
    The module, or cell, that they are in is the last; three at most.

    The dearest part of an operation: a frame is asked as little as can be. All operations of a backward() have the
    lines that called it, but for those of a hook, or a function's own backward.
    """
    global _last_backward
    frame: FrameType | None = _getframe(depth)
    found: list[tuple[CodeType, int]] = []
    code_kinds, backward = _code_kinds, None
    while frame is not None:
        code = frame.f_code
        try:
            kind = code_kinds[id(code)]
        except KeyError:
            kind = _classify_code(code)
        if kind:
            found.append((code, frame.f_lasti))
            if kind == _OUTERMOST_USER_CODE or len(found) == _MAX_USER_FRAMES:
                break
        elif code is _RUN_BACKWARD_CODE:
            if not found and (now := _current_graph_task_id()) >= 0:
                last, lines = _last_backward
                if last == now:
                    return lines
                backward = now
        elif code is _MODULE_CALL_CODE and (frame := frame.f_back) is None:  # its caller is torch's too
            break
        frame = frame.f_back
    lines = tuple(found)
    if backward is not None:
        _last_backward = (backward, lines)
    return lines


def _classify_code(code: CodeType) -> int:
    """Whose code this is, from now on known."""
    if len(_known_codes) >= _MAX_CACHED_CODES:  # of cells that were run long ago
        _code_kinds.clear()
        _known_codes.clear()
    _known_codes.append(code)
    if code.co_filename.startswith((_TORCH_DIR, _MESHBOOK_DIR)):
        kind = _LIBRARY_CODE
    else:
        kind = _OUTERMOST_USER_CODE if code.co_name.startswith(("<module>", "<cell line")) else _USER_CODE
    _code_kinds[id(code)] = kind
    return kind


def format_call_site(call_site: CallSite) -> str:
    """Lines as a traceback shows them, outermost first."""
    shown = []
    for code, instruction in reversed(call_site):
        line = _line_number(code, instruction)
        text = linecache.getline(code.co_filename, line).strip()
        shown.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}')
    return "\n".join(shown)


def _encode_call_sites(call_sites: Iterable[CallSite]) -> bytes:
    """The lines of a batch's operations, for who looks at the ranks while they run it; 0.2 us per operation."""
    index_by_address: dict[int, int] = {}
    frames: list[messages.Frame] = []
    frame_indices: list[int] = []
    frame_index, last = 0, None
    for call_site in call_sites:
        if (
            call_site and call_site is not last
        ):  # not only ids that nobody holds any more, and not the same backward() again
            last = call_site
            code, instruction = call_site[0]
            address = id(code) + instruction  # its own: a code object has its instructions in it
            try:
                frame_index = index_by_address[address]
            except KeyError:
                frame_index = index_by_address[address] = len(frames)
                frames.append(_frame_of(code, instruction))
        frame_indices.append(frame_index)
    if not frames:
        return b""
    cells = {file: cell for file in {line.file for line in frames} if (cell := _cell_label(file)) is not None}
    return _encoder.encode(
        messages.BatchCallSites(lines=tuple(frames), line_indices=tuple(frame_indices), cell_labels=cells)
    )


def innermost_frame(call_site: CallSite) -> messages.Frame | None:
    """The user's innermost line of those that led to an operation."""
    return _frame_of(*call_site[0]) if call_site else None


def _frame_of(code: CodeType, instruction: int) -> messages.Frame:
    address = id(code) + instruction
    known = _frame_cache.get(address)
    if known is None:
        if len(_frame_cache) >= _MAX_CACHED_FRAMES:  # of cells that were run long ago
            _frame_cache.clear()
        frame = messages.Frame(file=code.co_filename, line=_line_number(code, instruction), function=code.co_name)
        known = _frame_cache[address] = code, frame
    return known[1]


def _cell_label(file: str) -> str | None:
    """How people know the cell of this file name, where this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return None if number is None else f"cell {number}"


def _line_number(code: CodeType, instruction: int) -> int:
    """The number of the line that an instruction is of."""
    return next(
        (number for start, stop, number in code.co_lines() if start <= instruction < stop and number is not None),
        code.co_firstlineno,
    )


# ---------------------------------------------------------------------------------------------------------------------


def _drain_ids(ids: deque[int]) -> list[int]:
    found: list[int] = []
    popleft, append = ids.popleft, found.append
    try:
        for _ in range(len(ids)):
            append(popleft())
    except IndexError:  # somebody else drains them too
        pass
    return found


def _copy_outcome(target: Future[Any], source: Future[Any]) -> None:
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


def _weak_callback(method: Callable[[], Any]) -> Callable[[], Any]:
    """A method whose object may go; nothing is done then."""
    reference = weakref.WeakMethod(method)

    def call() -> Any:
        alive = reference()
        return alive() if alive is not None else None

    return call


def _send_when_idle(engine_of: weakref.ref[TensorEngine], wakeups: queue.SimpleQueue[None]) -> None:
    """The thread that sends a batch which nobody fills: it must not keep the engine alive."""
    while True:
        try:
            wakeups.get(timeout=5.0)
        except queue.Empty:
            engine = engine_of()
            if engine is None or engine.session.connection.closed:
                return
            del engine
            continue
        time.sleep(_IDLE_FLUSH_S)
        while not wakeups.empty():
            wakeups.get()
        engine = engine_of()
        if engine is None:
            return
        try:
            if engine._held_ops is None:  # else `release` wakes this thread
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


def describe_collective_mismatch(axes: MeshAxes, collective_counts: Mapping[int, Sequence[int]]) -> str | None:
    """Which ranks of one group have begun unlike numbers of collectives in a batch, in words; None: none.

    Args:
        collective_counts: how many each rank has begun, by axis; empty: none at all.
    """
    for axis, name in enumerate(axes.names):
        step = math.prod(axes.shape[axis + 1 :])
        groups: dict[int, list[int]] = {}
        for position, rank in enumerate(axes.ranks):
            groups.setdefault(position - position // step % axes.shape[axis] * step, []).append(rank)
        for ranks in groups.values():
            counts = {
                rank: collective_counts[rank][axis] if collective_counts[rank] else 0
                for rank in ranks
                if rank in collective_counts
            }
            if len(set(counts.values())) > 1:
                counts_text = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
                return f"of the collectives along {name}, {counts_text}"
    return None
