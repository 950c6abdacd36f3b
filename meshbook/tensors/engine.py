"""The queue of tensor operations to the ranks: batched, ordered, bounded in flight, with the faults they report.

One `TensorEngine` per client and mesh or slice. `emit` queues an operation, encoded as numbers, and does not wait;
`wait` and `fetch` do. A batch is a command like a cell: the ranks run it on their main threads, in order with the cells
that this process sends, and an interrupt ends it. Knows nothing of torch's dispatch (`remote`) or of shapes (`plan`).

Extension points: operations are held from `hold` to `release`, which may replace them (`recording`); `add_template`,
`upload` and `next_id` serve modules that build their own operations.
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

from meshbook.controller.call_errors import error_from, render_error
from meshbook.controller.console import Console
from meshbook.controller.session import Session
from meshbook.controller.sigint import defer_sigint
from meshbook.errors import CellInterrupted, Failure, MeshbookError, NotAttached, OperationFailed, RankLost
from meshbook.ids import Ranks, name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors.modes import Modes
from meshbook.rank.tensors.modes import non_default_modes as modes_now
from meshbook.tensors.plan import Planner, Template, TensorSpec
from meshbook.wire import messages

# In place of a template number, before a count and that many ids: clears the reported faults of these ids.
CLEAR_FAULTS = -1
# Operations per batch, by the number of batches in flight: small while the ranks wait for work, larger after that.
_BATCH_SIZES = (48, 64, 128, 192, 256)
# Unacknowledged batches before Python waits: some 8,000 operations, a few training steps.
_MAX_IN_FLIGHT = 32
# Batches in flight that keep the ranks busy: further operations may wait.
_SATURATED_BATCHES = 2
# Seconds after the last operation before a batch that is not full is sent.
_IDLE_FLUSH_S = 0.005
# Maximum of held operations; a longer step is sent as it is issued.
_MAX_HELD_OPS = 50_000
# Recorded steps per message while the ranks are saturated, and the maximum of such messages in flight: a message costs
# each rank a quarter of a millisecond, and 8 messages of 4 steps are far enough ahead.
_STEPS_PER_BATCH, _MAX_STEP_BATCHES_IN_FLIGHT = 4, 8
# Freed ids are sent in groups of this size: each message costs time, each unfreed tensor memory on the ranks.
_FREE_BATCH_SIZE = 16
# Faults whose call sites are stored.
_MAX_FAULTS = 1000
_MAX_USER_FRAMES = 3
_MAX_LOST_SHOWN = 4  # lost ranks whose exit is described
# Cached kinds of code objects, and cached frames of operations.
_MAX_CACHED_CODES, _MAX_CACHED_FRAMES = 4096, 4096
# Templates in `cache`. When it is full, those of `_old_cache` are evicted, here and on the ranks, and `cache` takes its
# place. A complete training step of a large model has some thousands, a loop over `x[i]` one for each i.
_MAX_TEMPLATES = 8192

# All live engines, for a recording that names no mesh.
ENGINES: weakref.WeakSet[TensorEngine] = weakref.WeakSet()

# Called on the user's thread once `resync` has determined what a fault or an interrupt left on an engine's ranks.
FAULT_CALLBACKS: list[Callable[[TensorEngine], None]] = []

CallSite = tuple[tuple[CodeType, int], ...]  # code and instruction offset of the user's frames, innermost first
# A queued operation: template number, input ids, output ids, floats; or 0, a count, and that many ids to free.
PendingOp = tuple[list[int | float], CallSite]

_encoder = msgspec.msgpack.Encoder()
_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_MESHBOOK_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_getframe = sys._getframe
_is_deterministic = torch._C._get_deterministic_algorithms
# Kinds of code objects, by id, because hashing a code object goes through all of it. Code of torch or Meshbook; the
# user's; the user's outermost, which no user code calls: a module, or a cell, which IPython runs.
_LIBRARY_CODE, _USER_CODE, _OUTERMOST_USER_CODE = range(3)
_code_kinds: dict[int, int] = {}
_known_codes: list[CodeType] = []  # keeps them alive, so that their ids stay unique
_MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
_RUN_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
_current_graph_task_id = torch._C._current_graph_task_id  # a distinct number for each call of backward()
# The last backward() that issued operations, and its call site.
_last_backward: tuple[int, CallSite] = (-1, ())
# By instruction address, which is unique while the cache keeps the code alive.
_frame_cache: dict[int, tuple[CodeType, messages.Frame]] = {}


class TensorHandle:
    """A reference to a tensor on the ranks: its id is freed there when the handle is garbage-collected.

    A separate object, because torch may resurrect a tensor's Python object after `__del__`. It has no `__init__`,
    because one is created per operation. The finalizer is C code, in a slot: Python drops a KeyboardInterrupt that is
    raised in a finalizer written in Python, and the user's interrupt would be lost.
    """

    __slots__ = ("__del__", "id", "spec", "version_counter")

    __del__: Callable[[], None]
    id: int
    spec: TensorSpec
    version_counter: list[int] | None  # shared by a tensor and its views
    is_functional_view = False  # a view that DTensor had to copy (`functional_views`)

    def get_version_counter(self) -> list[int]:
        """Return the count of in-place changes, shared by the tensor and all its views."""
        if self.version_counter is None:
            self.version_counter = [0]
        return self.version_counter


@dataclass
class HeldOps:
    """Operations that are held back until the end of a step.

    Attributes:
        start: number of unsent operations before them.
        break_reason: why they were sent before `release`; "" while they are held.
    """

    start: int = 0
    break_reason: str = ""


class OpRewriter(Protocol):
    """Replaces held operations by one.

    Args:
        ops: operations, in order.
        freed: freed ids that have not been sent to the ranks.

    Returns:
        The operation that replaces them, and those of the freed ids that are never sent to the ranks; None: the
        operations are sent unchanged.
    """

    def __call__(self, ops: list[PendingOp], freed: list[int]) -> tuple[PendingOp, set[int]] | None: ...


@dataclass
class _Batch:
    first_op: int
    call_sites: list[CallSite]
    templates: list[bytes]
    freed: list[int]
    command: messages.RunOps
    ordinal: int = 0  # index among all batches
    finished_steps: list[UndoableStep] = field(default_factory=list)  # optimizer steps that end in it
    future: Future[Any] | None = None  # None: not sent yet


@dataclass
class Fault:
    """A failed operation, as the ranks reported it."""

    number: int
    ename: str
    evalue: str
    trace: str
    interrupted: bool = False
    secondary: bool = False  # caused by a fault of another rank
    ranks: set[int] = field(default_factory=set)
    call_site: CallSite = ()
    is_reported: bool = False  # to the user


class UndoableStep(Protocol):
    """An optimizer step, as the engine sees it."""

    serial: int

    def undo(self) -> None:
        """Restore the optimizer's Python state to before the step. Runs on the user's thread."""


class TensorEngine:
    """The remote tensors of one client on one mesh or slice."""

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        assert session.axes is not None
        self.session, self.axes = session, axes
        ENGINES.add(self)
        self.ranks: Ranks = tuple(sorted(axes.ranks))
        self.planner = Planner(axes, self)
        self.cache: dict[Any, Template] = {}  # by kinds of operands; `plan_and_cache` adds to it
        self._old_cache: dict[Any, Template] = {}  # templates not used since `cache` was last emptied
        self.templates: dict[int, Template] = {}  # those of both caches, by number
        self._evicted: list[int] = []  # numbers that ranks may forget after the next batch
        self.name = f"{session.connection.client_id}|{','.join(axes.names)}|{secrets.token_hex(3)}"
        self.next_id = itertools.count(1).__next__
        self.freed_ids: deque[int] = deque()  # appended to by finalizers, at any moment
        # One version counter for all tensors whose storage code outside this engine can change, such as a cell's.
        self.foreign_version_counter: list[int] = session.extras.setdefault("changes", [0])
        self.free_id = self.freed_ids.append
        self.num_ops = self.num_batches = 0
        self._pending_ops: list[PendingOp] = []  # not sent yet
        self._held_ops: HeldOps | None = None  # the last of the pending ones, while they wait for the end of a step
        self._queue_lock = threading.RLock()  # reentrant: a finalizer may issue operations while one is appended
        self._pending_templates: list[bytes] = []
        self._pending_uploads: list[messages.TensorUpload] = []
        self._pending_feeds: list[tuple[messages.ShardedUpload, Future[Any]]] = []
        self._in_flight: dict[str, _Batch] = {}
        self._state_lock = threading.RLock()  # acquire by this name: an interrupt in `with condition:` leaves it locked
        self._state_changed = threading.Condition(self._state_lock)
        self._send_lock = threading.RLock()
        self._faults: dict[tuple[int, str], Fault] = {}
        # Latest fault reports of the ranks, by id; writers hold `_state_lock`.
        self._fault_by_id: dict[int, Fault] = {}
        # id -> rank -> skipped operations that would have changed it
        self._skipped_writes: dict[int, dict[int, int]] = {}
        self._started_writes: set[int] = set()
        self._overwritten_in: dict[int, int] = {}  # id -> ordinal of the batch that overwrote it
        self._half_written: dict[int, Fault] = {}  # changed on some ranks and not on others
        self._needs_resync = False  # the ranks may be out of sync: query them before the next operation
        self._is_resyncing = False
        self._must_drain = False  # process groups broke: form them again once all batches have ended
        self.needs_fault_check = False  # any of the above
        self._current_step: UndoableStep | None = None  # the optimizer step that is being issued
        self._step_start = (0, 0)  # at its start: number of unsent operations, number of sent batches
        self._finished_steps: list[UndoableStep] = []  # issued and not sent
        self._unconfirmed_steps: dict[int, UndoableStep] = {}  # not known to be taken by all ranks
        self._fatal_error: MeshbookError | None = None
        self._sent_modes: Modes | None = ()  # last sent to the ranks; None: unknown
        self._sent_deterministic = False  # deterministic algorithms, as last sent
        self._next_op_number = 1
        self._flush_threshold = _BATCH_SIZES[0]
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()  # C code: an interrupt leaves no lock of it held
        session.before_call_hooks.append(_weak_callback(self._before_call))
        session.foreground.in_flight.append(_weak_callback(self._in_flight_calls))
        thread = threading.Thread(
            target=_send_when_idle, args=(weakref.ref(self), self._wakeups), name="meshbook-tensors", daemon=True
        )
        thread.start()

    # ---- operations

    def emit(self, numbers: list[int | float], call_site: CallSite) -> None:
        """Queue an operation: template number, input ids, output ids, floats. Waits only when too far ahead.

        Raises:
            RankLost, NotAttached: the operation can no longer run.
        """
        if self._fatal_error is not None:
            raise self._fatal_error.with_traceback(None)
        if self.needs_fault_check:
            self._check_operands(numbers)
        # All modes are compared only once per batch: the comparison takes half as long as an operation.
        if not self._pending_ops or _is_deterministic() is not self._sent_deterministic:
            self.sync_modes()
        if len(self.freed_ids) >= _FREE_BATCH_SIZE and self._held_ops is None:
            self._enqueue_frees()
        with self._queue_lock:
            self._pending_ops.append((numbers, call_site))  # atomic: an interrupt leaves no operation without call site
            size = len(self._pending_ops)
        if size >= self._flush_threshold:
            self.flush()
        elif size == 1:
            self._wakeups.put(None)

    def sync_modes(self) -> None:
        """Send torch's modes of this process to the ranks, if they have changed."""
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
        """Add operations to the next batch without triggering its sending."""
        with self._queue_lock:
            self._pending_ops += ops

    def _enqueue_frees(self) -> None:
        with defer_sigint():
            ids = _drain_ids(self.freed_ids)
            if ids:
                self.enqueue([([0, len(ids), *ids], ())])

    def new_handle(self) -> TensorHandle:
        """Return a handle, with a new id and no spec, for a tensor that an operation will create."""
        handle = TensorHandle()
        handle.id = new_id = self.next_id()
        handle.__del__ = partial(self.free_id, new_id)
        handle.version_counter = None
        return handle

    def add_template(self, body: bytes) -> None:
        """Queue the body of a template, which ranks need before operations that use it."""
        with self._queue_lock:
            self._pending_templates.append(body)

    def plan_and_cache(self, key: Any, plan: Callable[..., Template], *args: Any) -> Template:
        """Return and cache a template that is not in `cache`: from the old cache, or from `plan(*args)`."""
        with self._queue_lock:
            template = self._old_cache.pop(key, None)
        if template is None:
            with defer_sigint():  # planning changes torch's modes
                template = plan(*args)
            if template.body:  # before another thread can find it and send an operation of it
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
        """Drop templates that no further operation will use."""
        with self._queue_lock:
            for number in numbers:
                self.templates.pop(number, None)
                self._evicted.append(number)

    def upload(self, tensor: torch.Tensor, placements: Any) -> TensorHandle:
        """Queue a copy of a tensor for the next batch; return its handle. Each rank stores its part. Does not wait.

        Args:
            placements: torch's, one per axis; None: all of it on every rank, for the per-rank view.
        """
        handle = self.new_handle()
        payload = self.session.transfer.dump((tensor.detach(), placements), self.ranks)
        with self._send_lock:
            # An upload is bound before its batch runs, so earlier operations go first. Held operations stay held.
            if self._pending_ops and self._held_ops is None:
                self.flush()
            self._pending_uploads.append(messages.TensorUpload(id=handle.id, payload=payload))
        self._wakeups.put(None)
        return handle

    def feed(
        self, tensors: Sequence[torch.Tensor], placements: Sequence[Any]
    ) -> tuple[list[TensorHandle], Future[Any]]:
        """Queue tensors for the next batch. Each rank stores its own rows, without a copy. Does not wait. Any thread.

        A rank that cannot store them reports it like a failed operation, where the tensors are used.

        Args:
            placements: torch's, for each tensor: at most one axis shards it, along dim 0.

        Returns:
            The handles, and a future of the end of that batch.
        """
        self._check_open()
        handles = [self.new_handle() for _ in tensors]
        payload = self.session.transfer.dump((tuple(tensors), tuple(placements)), self.ranks)
        rows, acknowledged = (
            messages.ShardedUpload(ids=tuple(handle.id for handle in handles), payload=payload),
            Future[Any](),
        )
        with self._queue_lock:
            self._pending_feeds.append((rows, acknowledged))
        self._wakeups.put(None)
        return handles, acknowledged

    # ---- held steps

    def hold(self, held: HeldOps) -> bool:
        """Hold operations back from here until `release`. Code that needs a value of them sends them earlier.

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
        """Stop holding operations back. Does nothing if `held` was never held.

        Args:
            rewriter: replaces the operations, if they have not been sent; None: they are sent unchanged.
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
        """End a hold because everything pending is about to be sent; record the reason."""
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
        """Whether to send recorded steps now; otherwise an acknowledgement triggers it."""
        return bool(self._pending_ops) and (not self.is_saturated or len(self._pending_ops) >= _STEPS_PER_BATCH)

    # ---- batches

    def flush(self) -> None:
        """Send everything pending. Waits while the ranks are too far behind.

        Raises:
            RankLost: a rank has exited; its data is lost.
        """
        if not self._pending_ops and not self._pending_uploads and not self._pending_feeds and not self.freed_ids:
            return
        if self._current_step is not None:  # sent in one piece, so that an interrupt finds all of it or nothing
            return
        self._apply_backpressure()
        self._send_batch(None)

    def flush_if_idle(self) -> None:
        """Send pending operations if the ranks have little to do, since Python may now wait for something else."""
        if self._pending_ops and not self.is_saturated and self._held_ops is None:
            self.flush()

    def _before_call(self) -> None:
        self.foreign_version_counter[0] += 1  # the call may change them
        if self.is_open and not self.session.lost:  # else using these tensors raises, and cells still run
            self.flush()

    def _apply_backpressure(self, limit: int = _MAX_IN_FLIGHT) -> None:
        self._check_open()
        if self._must_drain:
            limit = 1
        if len(self._in_flight) >= limit and threading.current_thread() is not self.session.connection.thread:
            if threading.current_thread() is threading.main_thread() and self.session.foreground.is_idle:
                self._wait_for_oldest_batch(limit)
            with self._state_lock:
                while len(self._in_flight) >= limit and self._fatal_error is None:
                    self._state_changed.wait(1.0)
            self._check_open()
            self._must_drain = self._must_drain and bool(self._in_flight)

    def _wait_for_oldest_batch(self, limit: int) -> None:
        """Wait as for a cell, so that an interrupt reaches stalled ranks.

        Raises:
            CellInterrupted: an interrupt.
        """
        while len(self._in_flight) >= limit and self._fatal_error is None:
            batch = next(iter(self._in_flight.values()), None)
            if batch is None or batch.future is None:
                return
            sink = Console(self.ranks, echo=True)
            finished = self.session.foreground.wait(batch.command, batch.future, on_output=sink)
            if self.session.foreground.was_interrupted(batch.command.call):
                error = error_from(finished, "an operation on tensors")
                if not isinstance(error, RankLost):
                    raise CellInterrupted((), self.ranks, summary="operations on tensors were stopped")
            with self._state_lock:  # the connection's thread records the acknowledgement
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
        """Build and send a batch; after any exception everything is pending again."""
        with defer_sigint(), self._send_lock:
            with self._queue_lock:
                self._end_hold_early()
                self._enqueue_frees()
                if not self._pending_ops and not self._pending_uploads and not self._pending_feeds and fetch is None:
                    return None  # new templates and evictions go with the next batch
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
        """Record that a batch has ended on every rank. Called by the connection's thread."""
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
        if self._pending_ops and not self.is_saturated:  # they were held back while the ranks were saturated
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
        elif error is not None:  # interrupted, perhaps before it began: send its templates, frees and modes again
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
        """Fail if ranks of one group began different numbers of collectives in a batch without a fault.

        The next collective would match a different one on other ranks, and receive its data.
        """
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
        """Update the ids that have no value on some ranks, as of the end of a batch."""
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

    # ---- after a fault or an interrupt

    def _check_operands(self, numbers: Sequence[int | float]) -> None:
        """Before an operation is issued: raise the known fault of an operand, unless the operation overwrites it.

        Raises:
            OperationFailed: ranks have no value for an operand, or different ones.
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
        """Raise the known fault of any of these tensors, as an operation on them would.

        Raises:
            OperationFailed: ranks have no value for one of them, or different ones.
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
        """Drop the faults of ids that the next batch overwrites or clears."""
        with self._state_lock:
            for id in ids:
                self._overwritten_in[id] = self.num_batches
                self._fault_by_id.pop(id, None)
                self._half_written.pop(id, None)
            self.needs_fault_check = bool(self._needs_resync or self._fault_by_id or self._half_written)

    def resync(self) -> None:
        """Query the progress of the ranks after an interrupt, or a fault that was reported to the user. Blocks.

        Tensors that no rank changed keep their values; those that some ranks changed are recorded as half-written.

        Raises:
            RankLost, CellInterrupted: as for a cell.
        """
        self._is_resyncing = True
        try:
            answers = self.fetch_state(())
        finally:
            self._is_resyncing = False
        with defer_sigint():
            self._apply_resync([set(answer["done"]) for answer in answers.values()])

    def _apply_resync(self, steps_taken: list[set[int]]) -> None:
        """Update faults from the state of the ranks, and undo optimizer steps that no rank has taken.

        Args:
            steps_taken: the optimizer steps that each rank has taken.
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
        """Return the optimizer steps that each rank has taken, and hashes of its pieces of these tensors. Blocks.

        The faults that the ranks report are recorded.
        """
        answers = self.fetch(messages.Fetch(mode="state", ids=tuple(ids)))
        with self._state_lock:  # the connection's thread records the acknowledgement
            self._state_changed.wait_for(lambda: not self._in_flight, 30.0)
        return answers

    def clear_faults(self, ids: Sequence[int]) -> None:
        """Have the ranks drop the faults of tensors that kept their values."""
        if not ids:
            return
        self.enqueue([([CLEAR_FAULTS, len(ids), *ids], ())])
        self._mark_overwritten(ids)

    def is_lost(self, id: int) -> bool:
        """Whether ranks are known to have no value for this id."""
        return id in self._fault_by_id and id not in self._skipped_writes

    def faults_of(self, ids: Iterable[int]) -> dict[int, tuple[Fault, dict[int, int], bool]]:
        """Return the faults of those of these tensors that have one, by id.

        Returns:
            For each id: the fault; for each rank that retained an earlier value, the number of operations it skipped;
            whether any of those operations had begun.
        """
        return {
            id: (fault, self._skipped_writes.get(id, {}), id in self._started_writes)
            for id in ids
            if (fault := self._half_written.get(id) or self._fault_by_id.get(id)) is not None
        }

    # ---- optimizer steps

    def begin_step(self, step: UndoableStep) -> None:
        """Begin an optimizer step: up to `end_step`, operations run on all ranks or none, and are sent in one piece."""
        with self._queue_lock:
            self._current_step, self._step_start = step, (len(self._pending_ops), self.num_batches)

    def end_step(self, step: UndoableStep) -> None:
        with self._queue_lock:
            self._unconfirmed_steps[step.serial] = step
            self._finished_steps.append(step)
            self._current_step = None
        self._wakeups.put(None)

    def flush_if_full(self) -> None:
        """Send pending operations if they fill a batch. Waits like `flush`."""
        if len(self._pending_ops) >= self._flush_threshold:
            self.flush()

    @property
    def is_in_optimizer_step(self) -> bool:
        """Whether an optimizer step is being issued."""
        return self._current_step is not None

    def cancel_step(self) -> bool:
        """Remove the operations of an optimizer step that did not complete.

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
            self._sent_modes = None  # a mode change may be among the removed operations
            return True

    def _in_flight_calls(self) -> list[str]:
        return list(self._in_flight)

    # ---- waiting

    def wait(self) -> dict[int, dict[str, Any]]:
        """Wait until the ranks have run everything that was issued.

        Raises:
            OperationFailed: an operation without a result failed; other failures are raised where the result is used.
            RankLost, CellInterrupted: as for a cell.
        """
        return self.fetch(messages.Fetch(mode="nothing"))

    def fetch(self, fetch: messages.Fetch) -> dict[int, dict[str, Any]]:
        """Return what ranks reply after running everything before: rank -> {"value": object}. Blocks; interruptible.

        Raises:
            OperationFailed: the requested value could not be computed.
            RankLost, CellInterrupted: as for a cell.
        """
        self.check_ids((fetch.id,))
        self._apply_backpressure()
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._send_lock:
            sent = self._send_batch(fetch, on_output=inbox.put)
            assert sent is not None
            command, future = sent
        # Notices about stalled ranks arrive through this inbox too.
        finished = self.session.foreground.wait(command, future, inbox=inbox, on_output=Console(self.ranks, echo=True))
        error = error_from(finished, "an operation on tensors")
        # The reply may arrive before the interrupt takes effect: raise all the same, so that a loop ends.
        if error is None and self.session.foreground.was_interrupted(command.call):
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
                        answers[rank]["value"] = self.session.transfer.load(part.outcome.value.payload)
        if poisons:
            with self._state_lock:  # the call site is recorded with the acknowledgement, which has arrived by now
                self._state_changed.wait_for(lambda: command.call not in self._in_flight, 5.0)
            found = [
                self._register_fault(None, [rank for rank, _ in report], report[0][1]) for report in poisons.values()
            ]
            raise self._operation_failed(
                min(found, key=lambda fault: (fault.secondary, fault.interrupted, fault.number))
            )
        return answers

    def _operation_failed(self, fault: Fault) -> OperationFailed:
        """Return the error that reports a fault, or the fault that caused it."""
        causes = [
            other for other in self._faults.values() if not (other.secondary or other.interrupted or other.is_reported)
        ]
        if fault.secondary and causes:
            fault = min(causes, key=lambda other: other.number)
        others = [other for other in causes if other is not fault]
        for other in (fault, *others):  # tensors that they left unchanged can be used again
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
        """Whether the ranks have enough work for now."""
        return len(self._in_flight) >= _SATURATED_BATCHES

    @property
    def is_open(self) -> bool:
        """Whether operations may be issued."""
        return self._fatal_error is None and self.session.ended is None and not self.session.connection.closed

    def close(self) -> None:
        self._fatal_error = self._fatal_error or NotAttached("these tensors were let go of")


# ---------------------------------------------------------------------------------------------------------------------
# Call sites


def capture_call_site(depth: int = 2) -> CallSite:
    """Return the user's frames that led to this operation, innermost first, as code and instruction offset.

    At most three frames; the module or cell is the last. Code and offset are cheap to store. This is the most expensive
    part of an operation, so frames are accessed as little as possible. All operations of a backward() get its call
    site, except those of a hook or of a custom function's own backward.
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
    """Return the kind of a code object, and cache it."""
    if len(_known_codes) >= _MAX_CACHED_CODES:  # mostly of cells that ran long ago
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
    """Format a call site like a traceback, outermost frame first."""
    shown = []
    for code, instruction in reversed(call_site):
        line = _line_number(code, instruction)
        text = linecache.getline(code.co_filename, line).strip()
        shown.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}')
    return "\n".join(shown)


def _encode_call_sites(call_sites: Iterable[CallSite]) -> bytes:
    """Encode the call sites of a batch, for inspection of the ranks while they run it; 0.2 us per operation."""
    index_by_address: dict[int, int] = {}
    frames: list[messages.Frame] = []
    frame_indices: list[int] = []
    frame_index, last = 0, None
    for call_site in call_sites:
        # Skip operations that only free ids, and those of the same backward() as the last one.
        if call_site and call_site is not last:
            last = call_site
            code, instruction = call_site[0]
            address = id(code) + instruction  # unique: a code object contains its instructions
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
    """Return the innermost user frame of a call site."""
    return _frame_of(*call_site[0]) if call_site else None


def _frame_of(code: CodeType, instruction: int) -> messages.Frame:
    address = id(code) + instruction
    known = _frame_cache.get(address)
    if known is None:
        if len(_frame_cache) >= _MAX_CACHED_FRAMES:  # mostly of cells that ran long ago
            _frame_cache.clear()
        frame = messages.Frame(file=code.co_filename, line=_line_number(code, instruction), function=code.co_name)
        known = _frame_cache[address] = code, frame
    return known[1]


def _cell_label(file: str) -> str | None:
    """Return the label of the cell that has this file name, if this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return None if number is None else f"cell {number}"


def _line_number(code: CodeType, instruction: int) -> int:
    """Return the line number of an instruction."""
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
    except IndexError:  # another thread drains them too
        pass
    return found


def _copy_outcome(target: Future[Any], source: Future[Any]) -> None:
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


def _weak_callback(method: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a method so that it does nothing once its object no longer exists."""
    reference = weakref.WeakMethod(method)

    def call() -> Any:
        alive = reference()
        return alive() if alive is not None else None

    return call


def _send_when_idle(engine_of: weakref.ref[TensorEngine], wakeups: queue.SimpleQueue[None]) -> None:
    """Send batches that are not full after a short idle time, in a thread that does not keep the engine alive."""
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
        except MeshbookError:  # raised where the user waits or issues the next operation
            pass
        except Exception as error:  # without this thread nothing would be sent while Python is idle
            warnings.warn(
                f"operations on tensors could not be sent in the background ({type(error).__name__}: {error}); they "
                "are sent with the next one, or when somebody waits for a value",
                stacklevel=1,
            )
        del engine


def describe_collective_mismatch(axes: MeshAxes, collective_counts: Mapping[int, Sequence[int]]) -> str | None:
    """Describe which ranks of one group began different numbers of collectives in a batch; None: none.

    Args:
        collective_counts: for each rank, how many it has begun, by axis; empty: none at all.
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
