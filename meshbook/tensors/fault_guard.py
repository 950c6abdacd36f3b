"""Raises known faults before an operation uses a tensor, and finds out with the ranks what a fault has left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshbook.controller.sigint import defer_sigint
from meshbook.errors import OperationFailed, RankLost
from meshbook.tensors.batches import Batch, BatchSender
from meshbook.tensors.faults import MISSING, Fault, FaultTable, TensorFault, error_from_collectives, error_of_missing
from meshbook.tensors.op_queue import OpQueue, UndoableStep
from meshbook.tensors.template_cache import TemplateCache
from meshbook.wire import messages

# In place of a template number, before a count and that many ids: clears the reported faults of these ids.
CLEAR_FAULTS = -1
# Seconds that `fetch_state` waits for the acknowledgements of earlier batches, which have ended by then.
_ACKNOWLEDGED_S = 30.0
# Unconfirmed optimizer steps before the ranks are asked which they have taken; they remember 4,096.
_MAX_UNCONFIRMED_STEPS = 256


class FaultGuard:
    """Knows the faults of an engine's tensors.

    Attributes:
        is_alert: whether operations must be checked before they are issued.
        names: of parameters, by id.
        after_resync: called on the user's thread once `resync` has determined what a fault left.
    """

    def __init__(
        self,
        queue: OpQueue,
        templates: TemplateCache,
        sender: BatchSender,
        fetch: Callable[[messages.Fetch], dict[int, dict[str, Any]]],
        after_resync: Callable[[], None],
    ) -> None:
        self.is_alert = False
        self.names: dict[int, str] = {}
        self._queue, self._templates, self._sender = queue, templates, sender
        self._fetch, self._after_resync = fetch, after_resync
        self._table = FaultTable(sender.ranks)
        self._lock = threading.RLock()  # of the table's writers: the connection's thread, and the user's
        self._needs_resync = False  # the ranks may be out of sync: query them before the next operation
        self._is_resyncing = False
        self._unconfirmed_steps: dict[int, UndoableStep] = {}  # sent, and not known to be taken by all ranks

    # ---- reports

    def take_result(self, batch: Batch, parts: Sequence[messages.OutcomeGroup], *, was_interrupted: bool) -> None:
        """Record what the ranks report at the end of a batch. Called by the connection's thread."""
        with self._lock:
            for part in parts:
                for report in (part.outcome.reply or {}).get("faults", ()):
                    self._register(batch, part.ranks, report)
            if was_interrupted:
                self._needs_resync = True
            else:
                reports = [
                    (part.ranks, self._register(batch, part.ranks, report), report)
                    for part in parts
                    for report in (part.outcome.reply or {}).get("faulted", ())
                ]
                self._table.update(batch.ordinal, reports)
                mismatch = error_from_collectives(
                    self._sender.axes, parts, batch.call_sites[-1] if batch.call_sites else ()
                )
                if mismatch is not None:
                    self._sender.fail(mismatch)
            if was_interrupted or self._table.has_lost_ids:
                self._unconfirmed_steps.update((step.serial, step) for step in batch.steps)
                if len(self._unconfirmed_steps) > _MAX_UNCONFIRMED_STEPS:
                    self._needs_resync = True
            self._refresh()

    def _register(self, batch: Batch, ranks: Iterable[int], report: dict[str, Any]) -> Fault:
        return self._table.register(report, ranks, batch.first_op, batch.call_sites)

    def error_from_reports(self, reports: Iterable[tuple[int, dict[str, Any]]]) -> OperationFailed | RankLost:
        """Return the error of a value that ranks could not compute; they are (rank, report)."""
        with self._lock:
            found = [self._table.register(report, (rank,)) for rank, report in reports]
            if missing := [fault for fault in found if fault.ename == MISSING]:
                return error_of_missing(missing[0], "this tensor", "", self._sender.ranks)
            return self._reported(self._table.error_from(min(found, key=lambda fault: fault.urgency)))

    def _reported(self, error: OperationFailed) -> OperationFailed:
        """Have the ranks asked before the next operation: what they left unchanged can be used from now on."""
        with self._lock:
            self._needs_resync = self.is_alert = True
        return error

    def _refresh(self) -> None:
        self.is_alert = self._needs_resync or not self._table.is_clear

    # ---- before an operation

    def check_operands(self, numbers: Sequence[int | float]) -> None:
        """Before an operation is issued: raise the known fault of an operand, unless the operation overwrites it.

        Raises:
            OperationFailed: ranks have no value for an operand, or different ones.
        """
        if not self._is_ready():
            return
        template = self._templates.by_number.get(int(numbers[0]))
        overwritten = template.mutates if template is not None and template.overwrites else ()
        overwritten_ids: list[int] = []
        for position, id in enumerate(numbers[1:]):
            if id.__class__ is int and id in self._table:
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
        if self.is_alert and self._is_ready():
            for id in ids:
                if id in self._table:
                    self._raise_fault(id)

    def _is_ready(self) -> bool:
        """Whether faults may be raised now; asks the ranks first, if they may be out of sync."""
        if self._queue.is_in_step or self._is_resyncing:
            return False
        if self._needs_resync:
            self.resync()
        return True

    def _raise_fault(self, id: int) -> None:
        is_final = self._table.is_half_written(id) or self._table.is_missing(id)
        error = self._table.error_of(id, self.names.get(id, ""))
        raise error if is_final or isinstance(error, RankLost) else self._reported(error)

    def _mark_overwritten(self, ids: Iterable[int]) -> None:
        with self._lock:
            self._table.mark_overwritten(ids, self._sender.num_batches)
            self._refresh()

    # ---- after a fault or an interrupt

    def lost(self, steps: Iterable[UndoableStep], missing: Mapping[int, str]) -> None:
        """Record what a loss has left: steps that may not have been taken, and tensors without a part, in words."""
        with self._lock:
            self._unconfirmed_steps.update((step.serial, step) for step in steps)
            self._table.missing.update(missing)
            self._needs_resync = self.is_alert = True

    def resync(self) -> None:
        """Query the progress of the ranks after an interrupt, or a fault that was reported to the user. Blocks.

        Tensors that no rank changed keep their values; those that some ranks changed are recorded as half-written.
        Optimizer steps that no rank has taken are undone.

        Raises:
            RankLost, CellInterrupted: as for a cell.
        """
        self._is_resyncing = True
        try:
            answers = self.fetch_state(())
        finally:
            self._is_resyncing = False
        with defer_sigint():
            with self._lock:
                self._needs_resync = False
                unchanged = self._table.separate_half_written()
            self.clear(unchanged)
            self._undo_steps_except([set(answer["done"]) for answer in answers.values()])
            self._after_resync()

    def _undo_steps_except(self, taken_by_ranks: Sequence[set[int]]) -> None:
        while self._unconfirmed_steps:
            serial = max(self._unconfirmed_steps)  # the latest first; batches may have ended in another order
            step = self._unconfirmed_steps.pop(serial)
            if not any(serial in taken for taken in taken_by_ranks):
                step.undo()

    def fetch_state(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the optimizer steps that each rank has taken, and hashes of its pieces of these tensors. Blocks.

        The faults that the ranks report are recorded.
        """
        answers = self._fetch(messages.Fetch(mode="state", ids=tuple(ids)))
        self._sender.in_flight.wait_until_fewer(1, timeout=_ACKNOWLEDGED_S)  # recorded by the connection's thread
        return answers

    def clear(self, ids: Sequence[int]) -> None:
        """Have the ranks drop the faults of tensors that kept their values."""
        if ids:
            self._queue.extend([([CLEAR_FAULTS, len(ids), *ids], ())])
        self._mark_overwritten(ids)

    def is_lost(self, id: int) -> bool:
        """Whether ranks are known to have no value for this id."""
        return self._table.is_lost(id)

    def of(self, ids: Iterable[int]) -> dict[int, TensorFault]:
        """Return what is known of those of these tensors that have a fault, by id."""
        return self._table.of(ids)
