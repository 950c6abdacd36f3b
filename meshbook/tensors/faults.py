"""Faults that the ranks report: which tensors have no value, or different ones, and the errors that tell the user.

Decides and does not act: reports of batches in, faults and errors out. `fault_guard` asks the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshbook.diagnose.source_files import is_user_file
from meshbook.errors import Failure, OperationFailed, RankLost
from meshbook.ids import name_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.tensors.call_sites import CallSite, format_call_site
from meshbook.wire import messages

# The error by which a rank reports what it, a new process, does not have.
MISSING = "PartLost"
_FILE = re.compile(r'^  File "([^"]+)", line \d+', re.MULTILINE)
_DEFECTS = ("AssertionError", "AttributeError", "KeyError", "NameError")
# Faults whose call sites are stored.
_MAX_FAULTS = 1000


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

    @property
    def urgency(self) -> tuple[bool, bool, int]:
        """The order in which faults are reported: causes first, in the order of their operations."""
        return self.secondary, self.interrupted, self.number


@dataclass(frozen=True)
class TensorFault:
    """What is known of a tensor that a fault has reached.

    Attributes:
        skipped_writes: for each rank that retained an earlier value, the number of operations it skipped.
        write_started: whether any of those operations had begun.
    """

    fault: Fault
    skipped_writes: Mapping[int, int]
    write_started: bool


class FaultTable:
    """The faults of an engine's tensors. Its callers serialize writes.

    Attributes:
        is_clear: whether no tensor is known to have a fault.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.is_clear = True
        self._ranks = ranks
        self._faults: dict[tuple[int, str], Fault] = {}
        self._by_id: dict[int, Fault] = {}  # ids without a value on some ranks, by the latest reports
        self._skipped_writes: dict[int, dict[int, int]] = {}  # id -> rank -> operations that would have changed it
        self._started_writes: set[int] = set()
        self._overwritten_in: dict[int, int] = {}  # id -> ordinal of the batch that overwrote it
        self.missing: dict[int, str] = {}  # what new processes of ranks lack: shape and placements, by id
        self._half_written: dict[int, Fault] = {}  # changed on some ranks and not on others

    # ---- reports

    def register(
        self, report: Mapping[str, Any], ranks: Iterable[int], first_op: int = 0, call_sites: Sequence[CallSite] = ()
    ) -> Fault:
        """Add a reported fault, or the ranks to a known one; return it.

        Args:
            first_op, call_sites: of the batch that reported it: number of its first operation, and all call sites.
        """
        number = report["number"]
        key = number, report["ename"]
        fault = self._faults.get(key)
        if fault is None:
            fault = Fault(*key, report["evalue"], report["trace"], report["interrupted"], report["secondary"])
            while len(self._faults) >= _MAX_FAULTS:
                self._faults.pop(next(iter(self._faults)))
            self._faults[key] = fault
        fault.ranks.update(ranks)
        if first_op <= number < first_op + len(call_sites):
            fault.call_site = call_sites[number - first_op]
        return fault

    def update(self, ordinal: int, reports: Iterable[tuple[Sequence[int], Fault, Mapping[str, Any]]]) -> None:
        """Replace what is known of the ids by the reports as of the end of a batch.

        Args:
            ordinal: of the batch.
            reports: ranks, the fault, and what they say of it: ids that are "lost", "spared" ones with the number of
                operations skipped, and those of them whose change had "begun".
        """
        self._overwritten_in = {id: last for id, last in self._overwritten_in.items() if last > ordinal}
        by_id: dict[int, Fault] = {}
        skipped_writes: dict[int, dict[int, int]] = {}
        started_writes: set[int] = set()
        for ranks, fault, report in reports:
            for id in (*report["lost"], *report["spared"]):
                known = by_id.get(id)
                if id not in self._overwritten_in and (known is None or (known.secondary and not fault.secondary)):
                    by_id[id] = fault
            for id, count in report["spared"].items():
                skipped_writes.setdefault(id, {}).update(dict.fromkeys(ranks, count))
            started_writes.update(report["begun"])
        self._by_id, self._skipped_writes, self._started_writes = by_id, skipped_writes, started_writes
        self._refresh()

    def mark_overwritten(self, ids: Iterable[int], ordinal: int) -> None:
        """Drop the faults of ids that a batch to come, of this ordinal, overwrites or clears."""
        for id in ids:
            self._overwritten_in[id] = ordinal
            self._by_id.pop(id, None)
            self._half_written.pop(id, None)
        self._refresh()

    def separate_half_written(self) -> list[int]:
        """Once all batches have ended: return the ids that no rank has changed, and note those that some ranks have."""
        unchanged: list[int] = []
        for id, fault in self._by_id.items():
            counts = self._skipped_writes.get(id)
            if (
                counts is None
                or fault.ename == MISSING
                or not (fault.is_reported or fault.secondary or fault.interrupted)
            ):
                continue
            if id not in self._started_writes and len({counts.get(rank, 0) for rank in self._ranks}) == 1:
                unchanged.append(id)
            else:
                self._half_written[id] = fault
        self._refresh()
        return unchanged

    def _refresh(self) -> None:
        self.is_clear = not self._by_id and not self._half_written

    # ---- questions

    @property
    def has_lost_ids(self) -> bool:
        """Whether some id has no value on some rank."""
        return bool(self._by_id)

    def __contains__(self, id: object) -> bool:
        return id in self._by_id or id in self._half_written

    def is_half_written(self, id: int) -> bool:
        """Whether an id is changed on some ranks and not on others."""
        return id in self._half_written

    def is_missing(self, id: int) -> bool:
        """Whether a new process of a rank lacks its part of this id."""
        return id in self._by_id and self._by_id[id].ename == MISSING

    def is_lost(self, id: int) -> bool:
        """Whether ranks are known to have no value for this id."""
        return id in self._by_id and id not in self._skipped_writes

    def of(self, ids: Iterable[int]) -> dict[int, TensorFault]:
        """Return what is known of those of these tensors that have a fault, by id."""
        return {
            id: TensorFault(fault, self._skipped_writes.get(id, {}), id in self._started_writes)
            for id in ids
            if (fault := self._half_written.get(id) or self._by_id.get(id)) is not None
        }

    # ---- errors

    def error_of(self, id: int, name: str = "") -> OperationFailed | RankLost:
        """Return the error that reports the fault of an id.

        Args:
            name: of the tensor, as a parameter; "": it has none.
        """
        fault = self._half_written.get(id) or self._by_id[id]
        if fault.ename == MISSING:
            return error_of_missing(fault, self.missing.get(id, "this tensor"), name, self._ranks)
        if id not in self._half_written:
            return self.error_from(self._by_id[id])
        lines = format_call_site(fault.call_site)
        issued = f" The operation was issued here:\n{lines}" if lines else ""
        return OperationFailed(
            (Failure(tuple(sorted(fault.ranks)), fault.ename, fault.evalue),),
            summary="this tensor was changed on some ranks and not on others, when a fault or a Stop came between "
            f"({fault.ename}: {fault.evalue}). meshbook.recover(model, optimizer) compares what the ranks have, "
            f"restores what one of them has whole, and says what it could not.{issued}",
        )

    def error_from(self, fault: Fault) -> OperationFailed:
        """Return the error that reports a fault, or the fault that caused it; these count as reported from now on."""
        causes = [
            other
            for other in self._faults.values()
            if not (other.secondary or other.interrupted or other.is_reported or other.ename == MISSING)
        ]
        if fault.secondary and causes:
            fault = min(causes, key=lambda other: other.number)
        others = [other for other in causes if other is not fault]
        for other in (fault, *others):  # tensors that they left unchanged can be used again
            other.is_reported = True
        return _operation_failed(fault, others)


def error_of_missing(fault: Fault, text: str, name: str, ranks: Sequence[int]) -> RankLost:
    lost = sorted(fault.ranks)
    what = f"{name} ({text})" if name else f"a tensor ({text})"
    if text.startswith("the graph"):
        message = f"{name_ranks(lost)} had a part of what this needs, which was lost with its process: {text}"
    else:
        message = (
            f"{what}: the part that {name_ranks(lost)} held was lost with the process, and no other rank has it. "
            "Load it from a checkpoint (load_state_dict, or x.copy_(...): what overwrites all of it makes it whole), "
            "or make it anew; other tensors live on"
        )
    return RankLost(message, ranks=lost, survivors=tuple(rank for rank in ranks if rank not in lost))


def _operation_failed(fault: Fault, others: Sequence[Fault]) -> OperationFailed:
    failure = Failure(tuple(sorted(fault.ranks)), fault.ename, fault.evalue, tuple(fault.trace.rstrip().splitlines()))
    lines = format_call_site(fault.call_site)
    issued = f"\nissued here:\n{lines}" if lines else ""
    # Frames of libraries say no more than the error does; those of a user's module do, and Meshbook's of its defects.
    is_shown = fault.ename in _DEFECTS or any(map(is_user_file, _FILE.findall(fault.trace)))
    trace = f"\non {name_ranks(failure.ranks)}:\n{fault.trace.rstrip()}" if is_shown else ""
    more = "".join(
        f"\nand {name_ranks(sorted(other.ranks))}: {other.ename}: {other.evalue}\n"
        f"{format_call_site(other.call_site[:1])}"
        for other in others[:3]
    )
    return OperationFailed(
        (failure,), summary=f"{name_ranks(failure.ranks)}: {fault.ename}: {fault.evalue}{issued}{trace}{more}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Collectives


def error_from_collectives(
    axes: MeshAxes, parts: Sequence[messages.OutcomeGroup], last_call_site: CallSite
) -> OperationFailed | None:
    """Return an error if ranks of one group began different numbers of collectives in a batch without a fault.

    The next collective would match a different one on other ranks, and receive its data.
    """
    replies = [part.outcome.reply or {} for part in parts]
    if len(parts) == 1 or any(reply.keys() & {"faults", "faulted", "poison"} for reply in replies):
        return None
    counts = {rank: reply.get("met", []) for part, reply in zip(parts, replies, strict=True) for rank in part.ranks}
    mismatch = describe_collective_mismatch(axes, counts)
    if mismatch is None:
        return None
    lines = format_call_site(last_call_site)
    return OperationFailed(
        (),
        summary=f"operations on tensors left the ranks out of step: {mismatch}. Their numbers may be wrong, "
        f"and the next collective would wait for ever: start the mesh anew, %mesh restart"
        + (f"\nin the batch that ends with:\n{lines}" if lines else ""),
    )


def describe_collective_mismatch(axes: MeshAxes, collective_counts: Mapping[int, Sequence[int]]) -> str | None:
    """Describe which ranks of one group began different numbers of collectives in a batch; None: none.

    Args:
        collective_counts: for each rank, how many it has begun, by axis; empty: none at all.
    """
    for axis, name in enumerate(axes.names):
        for ranks in axes.groups(name):
            counts = {
                rank: collective_counts[rank][axis] if collective_counts[rank] else 0
                for rank in ranks
                if rank in collective_counts
            }
            if len(set(counts.values())) > 1:
                counts_text = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
                return f"of the collectives along {name}, {counts_text}"
    return None
