"""Sends batches of operations to the ranks: ordered, bounded in flight, and pending again when sending fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from meshbook.controller.call_errors import error_from, render_error
from meshbook.controller.console import Console
from meshbook.controller.session import Session, incarnations
from meshbook.controller.sigint import defer_sigint
from meshbook.errors import CellInterrupted, MeshbookError, MeshShapeError, RankLost
from meshbook.fold.heal_advice import heal_advice
from meshbook.ids import Ranks, name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.tensors.call_sites import CallSite, capture_call_site, encode_call_sites
from meshbook.tensors.op_queue import OpQueue, PendingBatch, UndoableStep
from meshbook.wire import messages

# Operations per batch, by the number of batches in flight: small while the ranks wait for work, larger after that.
BATCH_SIZES = (48, 64, 128, 192, 256)
# Unacknowledged batches before Python waits: some 8,000 operations, a few training steps.
MAX_IN_FLIGHT = 32
# Batches in flight that keep the ranks busy: further operations may wait.
_SATURATED_BATCHES = 2
# Seconds between checks of whether the ranks can still acknowledge batches, and the wait for the connection's thread to
# record an acknowledgement that has arrived.
_POLL_S, _RECORDED_S = 1.0, 5.0
_MAX_LOST_SHOWN = 4  # lost ranks whose exit is described

_encoder = msgspec.msgpack.Encoder()


@dataclass
class Batch:
    """A batch that has been sent.

    Attributes:
        first_op: number of its first operation, among all of the engine.
        ordinal: its index among all batches.
        freed: ids that it frees.
        steps: optimizer steps that end in it.
        does_work: whether it makes or changes a tensor.
        future: None: not sent yet.
    """

    command: messages.RunOps
    ordinal: int
    first_op: int
    call_sites: list[CallSite]
    templates: list[bytes]
    freed: list[int]
    steps: list[UndoableStep]
    does_work: bool = True
    future: Future[Any] | None = None


class InFlightBatches:
    """The batches that the ranks have not acknowledged, oldest first. Any thread."""

    def __init__(self) -> None:
        self._batches: dict[str, Batch] = {}  # by call
        self._lock = threading.RLock()  # acquire by this name: an interrupt in `with condition:` leaves it locked
        self._changed = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, call: str) -> bool:
        return call in self._batches

    @property
    def are_many(self) -> bool:
        """Whether the ranks have enough work for now."""
        return len(self._batches) >= _SATURATED_BATCHES

    def get(self, call: str) -> Batch | None:
        return self._batches.get(call)

    def calls(self) -> list[str]:
        return list(self._batches)

    def oldest(self) -> Batch | None:
        return next(iter(self._batches.values()), None)

    def add(self, batch: Batch) -> None:
        self._batches[batch.command.call] = batch

    def remove(self, call: str) -> None:
        with self._lock:
            self._batches.pop(call, None)
            self._changed.notify_all()

    def wait_until_fewer(self, limit: int, timeout: float | None = None) -> bool:
        """Wait until fewer than `limit` batches are in flight; False: the time has passed."""
        with self._lock:
            return self._changed.wait_for(lambda: len(self._batches) < limit, timeout)

    def wait_until_recorded(self, call: str) -> None:
        """Wait until the connection's thread has recorded an acknowledgement that has arrived."""
        with self._lock:
            self._changed.wait_for(lambda: call not in self._batches, _RECORDED_S)


class BatchSender:
    """Sends the queue of an engine to its ranks.

    Attributes:
        error: why nothing can be sent any more; None: it can.
        lost: batches that lost ranks have not confirmed, in order.
        is_closed_for_good: ranks are new, and were not given what those before them held.
        num_heals: how often ranks were replaced, and those of before were given what others hold; see `reopening`.
        lock: held while a batch is sent; what must come into one batch is queued under it.
        num_ops, num_batches: how many have been sent.
        num_disturbances: how often ranks may have left out different operations: a fault, a Stop, a loss.
    """

    def __init__(
        self,
        session: Session,
        axes: MeshAxes,
        engine_name: str,
        queue: OpQueue,
        wake: Callable[[], None],
        batch_ended: Callable[[Batch, Sequence[messages.OutcomeGroup], bool], None],
        reopen: Callable[[], None],
    ) -> None:
        """Make a sender that has sent nothing.

        Args:
            reopen: called before the error of lost ranks is raised, once these are replaced.
            wake: called when operations that were held back may be sent.
            batch_ended: called by the connection's thread with each batch that ranks have ended, their outcomes, and
                whether it was interrupted.
        """
        self.session, self.axes = session, axes
        self.ranks: Ranks = tuple(sorted(axes.ranks))
        self.error: MeshbookError | None = None
        self.in_flight = InFlightBatches()
        self.lock = threading.RLock()
        self.num_ops = self.num_batches = self.num_disturbances = 0
        self._engine_name, self._queue = engine_name, queue
        self._wake, self._batch_ended, self._reopen = wake, batch_ended, reopen
        self._incarnations = incarnations(session, self.ranks)
        self.lost: list[Batch] = []
        self.is_closed_for_good = False
        self.num_heals = 0
        self.background: threading.Thread | None = None  # nobody sees an error that is raised there
        self._lasting_error: MeshbookError | None = None  # one that no healing ends
        self._error_once: MeshbookError | None = None
        self._is_loss_reported = False  # to the user
        self._next_op_number = 1
        self._must_drain = False  # process groups broke: form them again once all batches have ended

    # ---- the state of the ranks

    def fail(self, error: MeshbookError) -> None:
        """Send nothing any more; the next operation raises this error."""
        if not isinstance(error, RankLost):
            self._lasting_error = self._lasting_error or error
        if self.error is None or isinstance(error, RankLost):
            self.error = error

    def ranks_exited(self) -> None:
        """Send nothing more to ranks of which some have exited: what comes after cannot mean what it was to mean."""
        if lost := self._lost_ranks():
            self.fail(_error_from_lost(lost, self.session.living(self.ranks)))

    def _lost_ranks(self) -> list[messages.RankInfo]:
        return [rank for rank in self.session.info.ranks if rank.state == "dead" and rank.rank in self.ranks]

    @property
    def may_reopen(self) -> bool:
        """Whether all lost ranks have new processes, which may have been given what the others hold."""
        is_closed = isinstance(self.error, RankLost) or (self.error is None and self.has_new_ranks)
        return is_closed and self.session.ended is None and not self._lost_ranks() and self.has_new_ranks

    def reopened(self, num_heals: int) -> None:
        """Send again: the ranks are as their healing has left them."""
        self.num_heals, self._incarnations = num_heals, incarnations(self.session, self.ranks)
        self.num_disturbances += 1
        self.error, self._must_drain = self._lasting_error, False

    def close_for_good(self) -> None:
        """Raise from now on that ranks are new, and hold nothing of before."""
        self.fail(_error_from_replaced(self.session, self.ranks, self._incarnations))
        self.is_closed_for_good, self._lasting_error = True, self.error
        self._incarnations = incarnations(self.session, self.ranks)

    def mesh_resized(self) -> None:
        """Raise from now on that the tensors are cut for another number of ranks."""
        axes = self.session.axes
        self.error = self._lasting_error = MeshShapeError(
            f"the mesh was resized since this tensor was made, from {self.axes} to {axes}, and tensors are cut for the "
            "ranks that there were: make it anew, from a checkpoint or from what the program has"
        )
        self.is_closed_for_good = True

    def fail_once(self, error: MeshbookError) -> None:
        """Raise this error once, where the user can see it, unless another one stands."""
        if self.error is None:
            self.error = self._error_once = error

    def raise_error(self) -> None:
        """Raise the error that keeps anything from being sent; with new ranks, use them first if that can be done.

        Raises:
            RankLost, NotAttached: nothing can be sent, or what was under way when a rank was lost: that once.
        """
        if self.may_reopen and threading.current_thread() is not self.background:
            self._reopen()
        error = self.error
        if error is None:
            return
        if threading.current_thread() is not self.background:
            self._is_loss_reported = True
            if error is self._error_once:
                self.error = self._error_once = None
                self._is_loss_reported = False
        raise error.with_traceback(None)

    def mark_loss_reported(self) -> None:
        """Note that the user has seen the last loss."""
        self._is_loss_reported = True

    def take_report(self) -> bool:
        """Return whether the user has seen the last loss; the next one is another."""
        is_reported, self._is_loss_reported = self._is_loss_reported, False
        return is_reported

    @property
    def has_new_ranks(self) -> bool:
        """Whether some rank has got a new process since this was made."""
        return incarnations(self.session, self.ranks) != self._incarnations

    def check_open(self) -> None:
        """Check that batches can be sent.

        Raises:
            RankLost, NotAttached: they cannot.
        """
        if self.session.ended is not None and self.error is None:
            self.session.check_attached()
        if self.error is None:
            self.ranks_exited()
        self.raise_error()

    def wait_for_room(self, limit: int = MAX_IN_FLIGHT) -> None:
        """Wait until fewer than `limit` batches are in flight; another thread may send meanwhile.

        Raises:
            RankLost, NotAttached: no batch can be sent any more.
            CellInterrupted: an interrupt.
        """
        self.check_open()
        if self._must_drain:
            limit = 1
        if len(self.in_flight) < limit or threading.current_thread() is self.session.connection.thread:
            return
        if threading.current_thread() is threading.main_thread() and self.session.foreground.is_idle:
            self._wait_in_foreground(limit)
        while self.error is None and not self.in_flight.wait_until_fewer(limit, _POLL_S):
            pass
        self.check_open()
        self._must_drain = self._must_drain and bool(self.in_flight)

    def _wait_in_foreground(self, limit: int) -> None:
        """Wait as for a cell, so that an interrupt reaches stalled ranks.

        Raises:
            CellInterrupted: an interrupt.
        """
        while len(self.in_flight) >= limit and self.error is None:
            batch = self.in_flight.oldest()
            if batch is None or batch.future is None:
                return
            call, sink = batch.command.call, Console(self.ranks, echo=True)
            finished = self.session.foreground.wait(batch.command, batch.future, on_output=sink)
            if self.session.foreground.was_interrupted(call) and not isinstance(
                error_from(finished, "an operation on tensors"), RankLost
            ):
                raise CellInterrupted((), self.ranks, summary="operations on tensors were stopped")
            self.in_flight.wait_until_recorded(call)

    # ---- sending

    def ask(self, **options: Any) -> list[messages.OutcomeGroup]:
        """Send a command that is none of the batches in order, and return its outcomes. Blocks; interruptible.

        Raises:
            RankLost, CellInterrupted: as for a cell.
        """
        command = messages.RunOps(
            call=self.session.connection.next_call_id(), ranks=self.ranks, engine=self._engine_name, **options
        )
        future = self.session.connection.request(command)
        finished = self.session.foreground.wait(command, future, on_output=Console(self.ranks, echo=True))
        error = error_from(finished, "an operation on tensors")
        if error is not None:
            if isinstance(error, RankLost):
                self.fail(error)
                self.mark_loss_reported()
            raise render_error(error)
        return list(finished.outcomes)

    def cancel_pending(self) -> None:
        """Take what is pending out of the queue, as a batch that is lost."""
        taken = self._queue.take()
        if taken is None:
            return
        batch = self._make_batch(taken, None)
        self._next_op_number += len(taken.ops)
        self.num_batches += 1
        self.lost.append(batch)
        for _, acknowledged in taken.feeds:
            acknowledged.set_exception(self.error or RankLost("a rank was lost before these rows were sent"))

    def send(self, fetch: messages.Fetch | None = None, **handlers: Any) -> tuple[messages.RunOps, Future[Any]] | None:
        """Send everything pending, and a request; None: there is nothing. After an exception, it is pending again."""
        with defer_sigint(), self.lock:
            taken = self._queue.take(even_if_empty=fetch is not None)
            if taken is None:
                return None
            batch = None
            try:
                batch = self._make_batch(taken, fetch)
                self.in_flight.add(batch)
                self._next_op_number += len(taken.ops)
                self.num_ops += sum(numbers[0] > 0 for numbers, _ in taken.ops)
                self.num_batches += 1
                future = batch.future = self.session.connection.request(batch.command, **handlers)
            except BaseException:
                if batch is not None:
                    self.in_flight.remove(batch.command.call)
                self._queue.put_back(taken)
                raise
            self._set_batch_size()
            future.add_done_callback(partial(self._acknowledged, batch.command.call))  # no cycle with the batch
            for _, acknowledged in taken.feeds:
                future.add_done_callback(partial(_copy_outcome, acknowledged))
            return batch.command, future

    def _make_batch(self, taken: PendingBatch, fetch: messages.Fetch | None) -> Batch:
        ops, sites = zip(*taken.ops, strict=True) if taken.ops else ((), ())
        call_sites = list(sites)
        command = messages.RunOps(
            call=self.session.connection.next_call_id(),
            ranks=self.ranks,
            engine=self._engine_name,
            first_op=self._next_op_number,
            ops=_encoder.encode(list(itertools.chain.from_iterable(ops))),
            templates=tuple(taken.templates),
            uploads=tuple(taken.uploads),
            sharded_uploads=tuple(rows for rows, _ in taken.feeds),
            fetch=fetch,
            evicted_templates=tuple(taken.evicted),
            call_sites=encode_call_sites(call_sites if fetch is None else [*call_sites, capture_call_site()]),
            ordinal=self.num_batches,
            num_heals=self.num_heals,
        )
        freed = [id for numbers in ops if not numbers[0] for id in numbers[2:]]
        does_work = bool(taken.uploads or taken.feeds) or any(numbers[0] > 0 for numbers in ops)
        return Batch(
            command, self.num_batches, self._next_op_number, call_sites, taken.templates, freed, taken.steps, does_work
        )

    def _acknowledged(self, call: str, done: Future[Any]) -> None:
        """Record that a batch has ended on every rank. Called by the connection's thread."""
        batch = self.in_flight.get(call)
        if batch is None:
            return
        try:
            finished: messages.CallFinished = done.result()
        except MeshbookError as error:
            self.num_disturbances += 1
            self.fail(error)
            self.lost.append(batch)
        else:
            self._take_result(batch, finished)
        self.in_flight.remove(call)
        self._set_batch_size()
        if len(self._queue) and not self.in_flight.are_many:  # they were held back while the ranks had enough to do
            self._wake()

    def _take_result(self, batch: Batch, finished: messages.CallFinished) -> None:
        error = error_from(finished, "an operation on tensors")
        if error is None and any((part.outcome.reply or {}).get("stale") for part in finished.outcomes):
            error = _error_from_replaced(self.session, self.ranks, self._incarnations)
        if isinstance(error, RankLost):
            self.fail(render_error(error))
            self.lost.append(batch)
        elif error is not None and not isinstance(error, CellInterrupted):
            self.fail_once(render_error(error))  # of Meshbook, not of an operation: those are faults of their tensors
        if error is not None:  # interrupted, perhaps before it began: send its templates and frees again
            self._queue.restore(batch.templates, batch.freed)
        if any(part.outcome.groups_broken for part in finished.outcomes):
            self._must_drain = True
        if error is not None or any((part.outcome.reply or {}).get("faults") for part in finished.outcomes):
            self.num_disturbances += 1
        self._batch_ended(batch, finished.outcomes, error is not None)

    def _set_batch_size(self) -> None:
        self._queue.set_batch_size(BATCH_SIZES[min(len(self.in_flight), len(BATCH_SIZES) - 1)])


def _error_from_lost(lost: Sequence[Any], survivors: Any) -> RankLost:
    exits = "; ".join(
        f"rank {rank.rank} (pid {rank.pid} on {rank.host}) {rank.exit}" for rank in lost[:_MAX_LOST_SHOWN]
    )
    more = f", and {len(lost) - _MAX_LOST_SHOWN} more ended" if len(lost) > _MAX_LOST_SHOWN else ""
    advice = heal_advice(len(lost), (rank.heals_when for rank in lost))
    return RankLost(
        f"{exits}{more}. {advice}, with the tensors that other ranks have a copy of, and says of which a part is gone",
        ranks=[rank.rank for rank in lost],
        survivors=survivors,
    )


def _error_from_replaced(session: Session, ranks: Ranks, before: Sequence[int]) -> RankLost:
    new = [rank for rank, now, then in zip(ranks, incarnations(session, ranks), before, strict=True) if now != then]
    return RankLost(
        f"{name_ranks(new)} {'has a new process' if len(new) == 1 else 'have new processes'} since this tensor was "
        "made (%mesh heal), and a part of it was lost with the former: make it anew, from a checkpoint or from what "
        "the program has",
        ranks=new,
        survivors=tuple(rank for rank in ranks if rank not in new),
    )


def _copy_outcome(target: Future[Any], source: Future[Any]) -> None:
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)
