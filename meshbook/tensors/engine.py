"""The remote tensors of one client on one mesh: their operations are queued here, and their values are fetched.

One `TensorEngine` per client and mesh or slice. `emit` queues an operation, encoded as numbers, and does not wait;
`wait` and `fetch` do. A batch is a command like a cell: the ranks run it on their main threads, in order with the cells
that this process sends, and an interrupt ends it. Knows nothing of torch's dispatch (`dispatch`) or of shapes (`plan`).

Its parts: `queue` (what waits to be sent), `templates`, `sender` (batches in flight), `faults`.
"""

from __future__ import annotations

import functools
import itertools
import queue
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from meshbook.controller.call_errors import error_from, render_error
from meshbook.controller.console import Console
from meshbook.controller.session import Session
from meshbook.controller.sigint import defer_sigint
from meshbook.errors import CellError, CellInterrupted, MeshbookError, RankLost
from meshbook.ids import Ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors.modes import Modes
from meshbook.rank.tensors.modes import non_default_modes as modes_now
from meshbook.tensors import reopening
from meshbook.tensors.batches import BATCH_SIZES, Batch, BatchSender
from meshbook.tensors.call_sites import CallSite, capture_call_site
from meshbook.tensors.fault_guard import FaultGuard
from meshbook.tensors.op_queue import HeldOps, OpQueue, OpRewriter
from meshbook.tensors.plan import Planner
from meshbook.tensors.specs import SpecTable, TensorHandle
from meshbook.tensors.template_cache import TemplateCache
from meshbook.wire import messages

# Seconds after the last operation before a batch that is not full is sent.
_IDLE_FLUSH_S = 0.005
# Recorded steps per message while the ranks have enough to do, and the maximum of such messages in flight: a message
# costs each rank a quarter of a millisecond, and 8 messages of 4 steps are far enough ahead.
_STEPS_PER_BATCH, _MAX_STEP_BATCHES_IN_FLIGHT = 4, 8

# All live engines, for a recording that names no mesh.
ENGINES: weakref.WeakSet[TensorEngine] = weakref.WeakSet()

# Called on the user's thread once it is known what a fault or an interrupt left on an engine's ranks.
FAULT_CALLBACKS: list[Callable[[TensorEngine], None]] = []

_is_deterministic = torch._C._get_deterministic_algorithms


@functools.cache
def _keep_out_of_compiled_code() -> None:
    """Have code that `torch.compile` is given call Meshbook, instead of tracing what it does for remote tensors."""
    from torch._dynamo import trace_rules  # imported with the first operation in any case

    trace_rules.add("meshbook")


class TensorEngine:
    """The remote tensors of one client on one mesh or slice.

    Attributes:
        next_id, free_id: the id of a new tensor; frees one, at any moment and on any thread.
        foreign_version_counter: one version counter for all tensors whose storage code outside this engine can change,
            such as a cell's.
    """

    def __init__(self, session: Session, axes: MeshAxes) -> None:
        assert session.axes is not None
        _keep_out_of_compiled_code()
        self.session, self.axes = session, axes
        ENGINES.add(self)
        self.ranks: Ranks = tuple(sorted(axes.ranks))
        self.name = f"{session.connection.client_id}|{','.join(axes.names)}|{secrets.token_hex(3)}"
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()  # C code: an interrupt leaves no lock of it held
        self._wake = partial(self._wakeups.put, None)
        self.specs = SpecTable(self)
        self.planner = Planner(axes, self, self.specs)
        self.queue = OpQueue(self._wake, BATCH_SIZES[0])
        self.templates = TemplateCache(self.queue)
        reopen_self = _weak_callback(self.reopen)
        self.sender = BatchSender(session, axes, self.name, self.queue, self._wake, self._batch_ended, reopen_self)
        self.faults = FaultGuard(self.queue, self.templates, self.sender, self.fetch, self._after_resync)
        self.next_id = itertools.count(1).__next__
        self.free_id = self.queue.freed_ids.append
        self.foreign_version_counter: list[int] = session.extras.setdefault("changes", [0])
        self._sent_modes: Modes | None = ()  # last sent to the ranks; None: unknown
        self._sent_deterministic = False  # deterministic algorithms, as last sent
        session.before_call_hooks.append(_weak_callback(self._before_call))
        ranks_exited = _weak_callback(self.sender.ranks_exited)
        session.lost_listeners.append(lambda _: ranks_exited())
        session.healed_hooks.append(_weak_callback(self._healed))
        session.resized_hooks.append(_weak_callback(self.sender.mesh_resized))
        session.foreground.in_flight.append(_weak_callback(self.sender.in_flight.calls))
        thread = threading.Thread(
            target=_send_when_idle, args=(weakref.ref(self), self._wakeups), name="meshbook-tensors", daemon=True
        )
        self.sender.background = thread
        thread.start()

    @property
    def is_open(self) -> bool:
        """Whether operations may be issued."""
        return self.sender.error is None and self.session.ended is None and not self.session.connection.closed

    # ---- operations

    def emit(self, numbers: list[int | float], call_site: CallSite) -> None:
        """Queue an operation: template number, input ids, output ids, floats. Waits only when too far ahead.

        Raises:
            RankLost, NotAttached: the operation can no longer run.
        """
        if self.sender.error is not None:
            self.sender.raise_error()
        if self.faults.is_alert:
            self.faults.check_operands(numbers)
        ops = self.queue
        # All modes are compared only once per batch: the comparison takes half as long as an operation.
        if not ops.pending.ops or _is_deterministic() is not self._sent_deterministic:
            self.sync_modes()
        if ops.append(numbers, call_site):
            self.flush()

    def sync_modes(self) -> None:
        """Send torch's modes of this process to the ranks, if they have changed."""
        modes = modes_now()
        if modes == self._sent_modes:
            return
        template = self.templates.find_or_plan(
            ("set_modes", modes), self.planner.plan_rank_function, "set_modes", (modes,)
        )
        with defer_sigint():
            self._sent_modes, self._sent_deterministic = modes, _is_deterministic()
            self.queue.extend([([template.number], capture_call_site())])

    def new_handle(self) -> TensorHandle:
        """Return a handle, with a new id and no spec, for a tensor that an operation will create."""
        handle = TensorHandle()
        handle.id = new_id = self.next_id()
        handle.__del__ = partial(self.free_id, new_id)
        handle.version_counter = None
        return handle

    def upload(self, tensor: torch.Tensor, placements: Any) -> TensorHandle:
        """Queue a copy of a tensor for the next batch; return its handle. Each rank stores its part. Does not wait.

        Args:
            placements: torch's, one per axis; None: all of it on every rank, for the per-rank view.
        """
        if self.sender.error is not None:
            self.sender.raise_error()
        handle = self.new_handle()
        payload = self.session.transfer.dump((tensor.detach(), placements), self.ranks)
        with self.sender.lock:
            # An upload is bound before its batch runs, so earlier operations go first. Held operations stay held.
            if len(self.queue) and not self.queue.is_held:
                self.flush()
            self.queue.add_upload(messages.TensorUpload(id=handle.id, payload=payload))
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
        self.sender.check_open()
        handles = [self.new_handle() for _ in tensors]
        payload = self.session.transfer.dump((tuple(tensors), tuple(placements)), self.ranks)
        rows = messages.ShardedUpload(ids=tuple(handle.id for handle in handles), payload=payload)
        return handles, self.queue.add_feed(rows)

    # ---- steps

    def hold(self, held: HeldOps) -> bool:
        """Hold operations back from here until `release`. Code that needs a value of them sends them earlier.

        Returns:
            False: others are held already, and nothing is done.
        """
        if self.queue.is_held:
            return False
        if self._should_send_steps():
            self.flush()
        self.queue.hold(held)
        return True

    def release(self, held: HeldOps, rewriter: OpRewriter | None) -> None:
        """Stop holding operations back. Does nothing if `held` was never held.

        Args:
            rewriter: replaces the operations, if they have not been sent; None: they are sent unchanged.
        """
        self.queue.release(held, rewriter)
        if rewriter is not None and self._should_send_steps():
            self.sender.wait_for_room(_MAX_STEP_BATCHES_IN_FLIGHT)
            self.flush()
        elif self.queue.has_uploads or not self.sender.in_flight.are_many:
            self._wake()

    def _should_send_steps(self) -> bool:
        """Whether to send recorded steps now; otherwise an acknowledgement triggers it."""
        size = len(self.queue)
        return size > 0 and (not self.sender.in_flight.are_many or size >= _STEPS_PER_BATCH)

    def cancel_step(self) -> bool:
        """Remove the operations of an optimizer step that did not complete; False: some of it has been sent."""
        self._sent_modes = None  # a mode change may be among the removed operations
        return self.queue.cancel_step()

    # ---- sending

    def flush(self) -> None:
        """Send everything pending. Waits while the ranks are too far behind.

        Raises:
            RankLost: a rank has exited; its data is lost.
        """
        # An optimizer step is sent in one piece, so that an interrupt finds all of it or nothing.
        if not self.queue.is_empty and not self.queue.is_in_step:
            self.sender.wait_for_room()
            self.sender.send()

    def flush_if_idle(self) -> None:
        """Send pending operations if the ranks have little to do, since Python may now wait for something else."""
        if len(self.queue) and not self.sender.in_flight.are_many and not self.queue.is_held:
            self.flush()

    def _before_call(self) -> None:
        self.foreign_version_counter[0] += 1  # the call may change them
        if self.is_open and not self.session.lost:  # else using these tensors raises, and cells still run
            self.flush()

    def _batch_ended(self, batch: Batch, parts: Sequence[messages.OutcomeGroup], was_interrupted: bool) -> None:
        if was_interrupted:
            self._sent_modes = None
        self.faults.take_result(batch, parts, was_interrupted=was_interrupted)

    def reopen(self) -> None:
        """Use the ranks again, if some of them were replaced and given what others hold; see `reopening`. Blocks."""
        with self.sender.lock:
            if self.sender.may_reopen:  # no other thread has
                reopening.reopen(self)

    def _healed(self) -> None:
        try:
            self.reopen()
        except CellInterrupted:
            raise
        except MeshbookError:  # raised by the next operation
            pass

    def forget_modes(self) -> None:
        """Have the modes sent again: it is not known which the ranks have."""
        self._sent_modes = None

    def _after_resync(self) -> None:
        for callback in FAULT_CALLBACKS:
            callback(self)

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
            OperationFailed: the requested value could not be computed, or may be wrong.
            RankLost, CellInterrupted: as for a cell.
        """
        self.faults.check_ids((fetch.id,))
        self.sender.wait_for_room()
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        sent = self.sender.send(fetch, on_output=inbox.put)
        assert sent is not None
        command, future = sent
        # Notices about stalled ranks arrive through this inbox too.
        finished = self.session.foreground.wait(command, future, inbox=inbox, on_output=Console(self.ranks, echo=True))
        error = error_from(finished, "an operation on tensors")
        if error is not None:
            if isinstance(error, RankLost):
                self.sender.fail(error)
                self.sender.mark_loss_reported()
            raise render_error(error)
        # Recorded: the call site of a fault, and whether ranks are out of step, in this batch or one before it.
        self.sender.in_flight.wait_until_recorded(command.call)
        if isinstance(self.sender.error, CellError):
            self.sender.raise_error()
        answers: dict[int, dict[str, Any]] = {}
        reports: list[tuple[int, dict[str, Any]]] = []
        for part in finished.outcomes:
            reply = part.outcome.reply or {}
            for rank in part.ranks:
                if "poison" in reply:
                    reports.append((rank, reply["poison"]))
                    continue
                answers[rank] = dict(reply)
                if part.outcome.value is not None and part.outcome.value.payload is not None:
                    answers[rank]["value"] = self.session.transfer.load(part.outcome.value.payload)
        if reports:
            raise self.faults.error_from_reports(reports)
        return answers


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
            if not engine.queue.is_held:  # else `release` wakes this thread
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
