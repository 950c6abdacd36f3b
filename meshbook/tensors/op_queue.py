"""The queue of what the next batch to the ranks contains. Sends nothing and waits for nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshbook.controller.sigint import defer_sigint
from meshbook.tensors.call_sites import CallSite, capture_call_site, format_call_site
from meshbook.wire import messages

# Maximum of held operations; a longer step is sent as it is issued.
_MAX_HELD_OPS = 50_000
# Freed ids are sent in groups of this size: each message costs time, each unfreed tensor memory on the ranks.
_FREE_BATCH_SIZE = 16

# A queued operation: template number, input ids, output ids, floats; or 0, a count, and that many ids to free.
PendingOp = tuple[list[int | float], CallSite]


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


class UndoableStep(Protocol):
    """An optimizer step, as the engine sees it."""

    serial: int

    def undo(self) -> None:
        """Restore the optimizer's Python state to before the step. Runs on the user's thread."""


@dataclass
class PendingBatch:
    """What a batch will contain.

    Attributes:
        templates: bodies of templates that ranks do not have yet.
        evicted: numbers of templates that ranks may forget after the batch.
        feeds: uploads of rows, each with the future of the end of the batch.
        steps: optimizer steps that end in it.
    """

    ops: list[PendingOp] = field(default_factory=list)
    templates: list[bytes] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    uploads: list[messages.TensorUpload] = field(default_factory=list)
    feeds: list[tuple[messages.ShardedUpload, Future[Any]]] = field(default_factory=list)
    steps: list[UndoableStep] = field(default_factory=list)

    @property
    def must_be_sent(self) -> bool:
        """Whether there is more than templates and evictions, which can go with a later batch."""
        return bool(self.ops or self.uploads or self.feeds)

    def prepend(self, earlier: PendingBatch) -> None:
        self.ops[:0] = earlier.ops
        self.templates[:0] = earlier.templates
        self.evicted[:0] = earlier.evicted
        self.uploads[:0] = earlier.uploads
        self.feeds[:0] = earlier.feeds
        self.steps[:0] = earlier.steps


class OpQueue:
    """Operations, templates, uploads and freed ids that have not been sent. Any thread.

    Attributes:
        lock: guards everything that is queued; reentrant, because a finalizer may queue while something is queued.
        freed_ids: ids of tensors that no longer exist; finalizers append to it, at any moment.
        pending: what the next batch contains; changed by this class only.
    """

    def __init__(self, wake: Callable[[], None], batch_size: int) -> None:
        """Make an empty queue.

        Args:
            wake: called when there is something to send once Python is idle.
        """
        self.lock = threading.RLock()
        self.freed_ids: deque[int] = deque()
        self._wake = wake
        self.pending = PendingBatch()
        self._held: HeldOps | None = None  # the last of the pending operations, while they wait for the end of a step
        self._batch_size = self._threshold = batch_size
        self._step: UndoableStep | None = None  # the optimizer step that is being issued
        self._step_start = (0, 0)  # at its start: number of pending operations, number of batches taken
        self._num_taken = 0

    def __len__(self) -> int:
        """The number of pending operations."""
        return len(self.pending.ops)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent, except templates and evictions."""
        return not self.pending.must_be_sent and not self.freed_ids

    @property
    def has_uploads(self) -> bool:
        return bool(self.pending.uploads or self.pending.feeds)

    # ---- adding

    def append(self, numbers: list[int | float], call_site: CallSite) -> bool:
        """Add an operation; return whether the batch is full now."""
        if len(self.freed_ids) >= _FREE_BATCH_SIZE and self._held is None:
            self._append_frees()
        with self.lock:
            ops = self.pending.ops
            ops.append((numbers, call_site))  # atomic: an interrupt leaves no operation without call site
            size = len(ops)
        if size == 1:
            self._wake()
        return size >= self._threshold

    def extend(self, ops: Iterable[PendingOp]) -> None:
        """Add operations without asking for their sending."""
        with self.lock:
            self.pending.ops += ops

    def _append_frees(self) -> None:
        with defer_sigint():
            ids = _drain(self.freed_ids)
            if ids:
                self.extend([([0, len(ids), *ids], ())])

    def add_template(self, body: bytes) -> None:
        """Add the body of a template, which ranks need before operations that use it."""
        with self.lock:
            self.pending.templates.append(body)

    def add_evictions(self, numbers: Iterable[int]) -> None:
        """Let ranks forget templates after the next batch."""
        with self.lock:
            self.pending.evicted += numbers

    def add_upload(self, upload: messages.TensorUpload) -> None:
        with self.lock:
            self.pending.uploads.append(upload)
        self._wake()

    def add_feed(self, rows: messages.ShardedUpload) -> Future[Any]:
        """Add rows; return the future of the end of their batch."""
        acknowledged: Future[Any] = Future()
        with self.lock:
            self.pending.feeds.append((rows, acknowledged))
        self._wake()
        return acknowledged

    # ---- batches

    @property
    def is_full(self) -> bool:
        """Whether the pending operations fill a batch."""
        return len(self.pending.ops) >= self._threshold

    def set_batch_size(self, size: int) -> None:
        """Set the number of operations that fill a batch."""
        with self.lock:
            self._batch_size = size
            if self._held is None:
                self._threshold = size

    def take(self, *, even_if_empty: bool = False) -> PendingBatch | None:
        """Remove and return everything pending; None: there is nothing that must be sent. Ends a hold."""
        with self.lock:
            self._end_hold_early()
            self._append_frees()
            if not self.pending.must_be_sent and not even_if_empty:
                return None
            taken, self.pending = self.pending, PendingBatch()
            self._num_taken += 1
            return taken

    def put_back(self, batch: PendingBatch) -> None:
        """Add again what was taken and could not be sent, before everything else."""
        with self.lock:
            self.pending.prepend(batch)
            self._num_taken -= 1
            if self._held is not None:
                self._held.start += len(batch.ops)

    def restore(self, templates: list[bytes], freed: list[int]) -> None:
        """Add again the templates and freed ids of a batch that ranks may not have run."""
        with self.lock:
            self.pending.templates[:0] = templates
        self.freed_ids.extend(freed)

    # ---- held steps

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def hold(self, held: HeldOps) -> None:
        """Hold operations back from here until `release`."""
        with self.lock:
            held.start, self._held = len(self.pending.ops), held
            self._threshold = held.start + _MAX_HELD_OPS

    def release(self, held: HeldOps, rewriter: OpRewriter | None) -> None:
        """Stop holding operations back. Does nothing if `held` is not held.

        Args:
            rewriter: replaces the operations; None: they stay unchanged.
        """
        with defer_sigint(), self.lock:
            if self._held is not held:
                return
            try:
                if rewriter is not None:
                    self._rewrite(held.start, rewriter)
            finally:
                self._held, self._threshold = None, self._batch_size

    def _rewrite(self, start: int, rewriter: OpRewriter) -> None:
        ops = self.pending.ops
        stop = len(ops)
        freed = _drain(self.freed_ids)
        try:
            replacement = rewriter(ops[start:stop], freed)
            if replacement is not None:
                ops[start:stop] = [replacement[0]]
                freed = [id for id in freed if id not in replacement[1]]
        finally:
            self.freed_ids.extend(freed)

    def _end_hold_early(self) -> None:
        """End a hold because everything pending is about to be sent; record the reason."""
        held = self._held
        if held is None:
            return
        num_held = len(self.pending.ops) - held.start
        if num_held == 0:
            held.start, self._threshold = 0, _MAX_HELD_OPS
            return
        reason = format_call_site(capture_call_site()).strip().replace("\n", " ")
        held.break_reason = (
            f"more than {_MAX_HELD_OPS:,} operations" if num_held >= _MAX_HELD_OPS else reason or "a value"
        )
        self._held, self._threshold = None, self._batch_size

    # ---- optimizer steps

    @property
    def is_in_step(self) -> bool:
        """Whether an optimizer step is being issued."""
        return self._step is not None

    def begin_step(self, step: UndoableStep) -> None:
        """Begin an optimizer step: up to `end_step`, operations run on all ranks or none, and are sent in one piece."""
        with self.lock:
            self._step, self._step_start = step, (len(self.pending.ops), self._num_taken)

    def end_step(self, step: UndoableStep) -> None:
        with self.lock:
            self.pending.steps.append(step)
            self._step = None
        self._wake()

    def cancel_step(self) -> bool:
        """Remove the operations of an optimizer step that did not complete.

        Returns:
            False if some of it has been sent.
        """
        with self.lock:
            self._step = None
            start, num_taken = self._step_start
            if num_taken != self._num_taken:
                return False
            ops = self.pending.ops
            for numbers, _ in ops[start:]:
                if not numbers[0]:
                    self.freed_ids.extend(numbers[2:])  # type: ignore[arg-type]
            del ops[start:]
            return True


def _drain(ids: deque[int]) -> list[int]:
    found: list[int] = []
    popleft, append = ids.popleft, found.append
    try:
        for _ in range(len(ids)):
            append(popleft())
    except IndexError:  # another thread drains them too
        pass
    return found
