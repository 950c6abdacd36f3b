"""One engine's tensors on this rank by id, with a `Poison` in place of each that could not be computed.

A tensor that was to be mutated retains its value beside the fault: nothing was written to it if the operation did not
start. The controller restores it by `TensorStore.clear_poison` once the user has seen the fault.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshbook.errors import message_of, traceback_of
from meshbook.rank.tensors.agreement import StepTracker
from meshbook.rank.tensors.modes import BatchModes
from meshbook.rank.tensors.operators import TemplateMessage
from meshbook.rank.tensors.templates import CompiledTemplate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshbook.rank.elastic.runs import Run

# The error of what a new process of a rank lacks; the controller raises a RankLost for it.
MISSING = "PartLost"


@dataclass(frozen=True)
class Poison:
    """Replaces a tensor that could not be computed."""

    number: int  # number of the operation that failed first
    ename: str
    evalue: str
    trace: str  # the rank's traceback, as text
    interrupted: bool = False
    secondary: bool = False  # another rank failed, and this one was released from its collective
    # For a tensor that was to be mutated:
    old_value: Any = field(default=None, compare=False)  # the tensor; None: there was none
    num_skipped: int = 0  # operations that were to mutate it and did not start
    write_started: bool = False  # one did, and may have written a part
    # For a view that was not created:
    base: int | None = field(default=None, compare=False)  # id of the tensor it would be a view of

    @classmethod
    def of_interrupt(cls, number: int) -> Poison:
        """Return the poison of what an interrupt in that operation left out."""
        return cls(number, "KeyboardInterrupt", "stopped by the user", "", interrupted=True)

    @classmethod
    def of_error(cls, number: int, error: Exception, *, secondary: bool = False) -> Poison:
        trace = traceback_of(error, limit=-4, chain=False)
        return cls(number, type(error).__name__, message_of(error).strip()[:2000], trace[-4000:], secondary=secondary)

    def after_loss(self) -> Poison:
        """Return this poison of an interrupt in other words: the loss of a rank interrupts the others too."""
        return replace(self, evalue="stopped before it ran, by the user or because a rank was lost")

    @classmethod
    def of_missing(cls, rank: int, placeholder: Any) -> Poison:
        """Return the poison of what this rank, a new process, does not have, beside memory that can be overwritten."""
        text = f"the part of it that rank {rank} held was lost with its process"
        number = -1 - rank  # of no operation
        return cls(number, MISSING, text, "", old_value=placeholder, num_skipped=1, write_started=True)

    @property
    def is_transient(self) -> bool:
        """Whether it tells of an operation that was stopped, and not of one that failed."""
        return self.interrupted or self.secondary

    def as_dict(self) -> dict[str, Any]:
        names = ("number", "ename", "evalue", "trace", "interrupted", "secondary")
        return {name: getattr(self, name) for name in names}

    def without_old_value(self) -> Poison:
        """Return this poison for a tensor that does not exist."""
        if self.old_value is None and not self.num_skipped and self.base is None:
            return self
        return replace(self, old_value=None, num_skipped=0, write_started=False, base=None)


class Poisoned(Exception):
    """The requested value could not be computed."""

    def __init__(self, poison: Poison) -> None:
        super().__init__(poison.evalue)
        self.poison = poison


@dataclass
class TensorStore:
    """One engine's tensors and templates on this rank.

    Attributes:
        values: tensor (DTensor, or plain where the view is per rank) or Poison, by id.
        op_number, current_template: the running operation and its template; None while a value is fetched.
        pending_error: the first failure of an operation without outputs to poison; reported at the next wait.
        faults: failures since the last report.
        step_refusal: why the operations of the current optimizer step are skipped.
        may_have_poison: whether any value may be poison.
        is_batch_expected: whether a batch is about to run and `execute` does not handle its operations yet.
        template_bodies: the pickled messages of `templates`, for a rank that is replaced.
        num_batches: how many batches of the engine have come to this rank, run or not.
        num_heals: how often its ranks were replaced.
        missing: what this rank, a new process, lacks of what its predecessor held: in words, by id.
        loop: the snapshots of a `mesh.resilient` loop (`loop_snapshots`).
        loop_report: what the controller is to know of them, with the next reply.
    """

    name: str
    mesh: DeviceMesh | None
    device: torch.device
    values: dict[int, Any] = field(default_factory=dict)
    templates: dict[int, CompiledTemplate] = field(default_factory=dict)
    pending_error: Poison | None = None
    faults: list[Poison] = field(default_factory=list)
    op_number: int = 0
    current_template: CompiledTemplate | None = None
    step_tracker: StepTracker = field(default_factory=StepTracker)
    modes: BatchModes = field(default_factory=BatchModes)
    step_refusal: Poison | None = None
    may_have_poison: bool = False
    is_batch_expected: bool = False
    template_bodies: dict[int, bytes] = field(default_factory=dict)
    num_batches: int = 0
    num_heals: int = 0
    missing: dict[int, str] = field(default_factory=dict)
    loop: Run | None = None
    loop_report: dict[str, Any] = field(default_factory=dict)
    # Ids by storage of their tensors, maintained while there are faults, and the set of ids in it.
    _ids_by_storage: dict[int, list[int]] = field(default_factory=dict)
    _indexed_ids: set[int] = field(default_factory=set)

    def add_template(self, body: bytes) -> None:
        message: TemplateMessage = pickle.loads(body)
        self.templates[message.number] = CompiledTemplate(message, self.mesh, self.device)
        self.template_bodies[message.number] = body

    def drop_template(self, number: int) -> None:
        self.templates.pop(number, None)
        self.template_bodies.pop(number, None)

    def get(self, id: int) -> Any:
        """Return the tensor of that id.

        Raises:
            Poisoned: it could not be computed, or never was because its batch was interrupted.
        """
        value = self.values.get(id)
        if value is None:
            value = Poison(0, "Interrupted", "its computation was stopped before it ran", "", interrupted=True)
        if isinstance(value, Poison):
            raise Poisoned(value)
        return value

    def poison_output(self, id: int, poison: Poison, *, base: int | None = None) -> None:
        """Record that the tensor of that id could not be computed.

        Args:
            base: the id of the tensor it would be a view of; None: it would not be a view.
        """
        if base is not None:
            base_value = self.values.get(base)
            base = base_value.base if isinstance(base_value, Poison) and base_value.base is not None else base
            self.values[id] = replace(poison.without_old_value(), base=base)
        else:
            self.values[id] = poison.without_old_value()
        self.may_have_poison = True

    def poison_unchanged(self, id: int, poison: Poison, *, write_started: bool = False) -> None:
        """Record that an operation did not mutate the tensor of that id, or only started to.

        The same applies to all tensors that share its storage.
        """
        self.may_have_poison = True
        value = self.values.get(id)
        if isinstance(value, Poison) and value.old_value is None and value.base is not None:
            self._poison_one_unchanged(id, poison, write_started)
            id = value.base
        for other in self._aliases_of(id):
            self._poison_one_unchanged(other, poison, write_started)

    def _poison_one_unchanged(self, id: int, poison: Poison, write_started: bool) -> None:
        value = self.values.get(id)
        if isinstance(value, Poison):
            self.values[id] = replace(
                value, num_skipped=value.num_skipped + 1, write_started=value.write_started or write_started
            )
        else:
            self.values[id] = replace(poison, old_value=value, num_skipped=1, write_started=write_started, base=None)

    def _aliases_of(self, id: int) -> list[int]:
        """Return the id and those of all tensors on the same storage."""
        storage = storage_id(self.values.get(id))
        if storage is None:
            return [id]
        for new in reversed(self.values):  # a dict ends with its newest items
            if new in self._indexed_ids:
                break
            self._indexed_ids.add(new)
            if (storage_of_new := storage_id(self.values[new])) is not None:
                self._ids_by_storage.setdefault(storage_of_new, []).append(new)
        others = self._ids_by_storage.get(storage, ())
        return [id, *(other for other in others if other != id and storage_id(self.values.get(other)) == storage)]

    def clear_poison(self, ids: Sequence[int]) -> None:
        """Restore the old values of these tensors: the caller knows that they were not mutated."""
        for id in ids:
            value = self.values.get(id)
            if isinstance(value, Poison) and value.old_value is not None:
                self.values[id] = value.old_value

    def report_poisoned(self) -> list[dict[str, Any]]:
        """Return the faults, each with the ids that have it."""
        found: dict[Any, dict[str, Any]] = {}
        for id, value in self.values.items():
            if isinstance(value, Poison):
                key = value.number, value.ename
                report = found.setdefault(key, {**value.as_dict(), "lost": [], "spared": {}, "begun": []})
                if value.old_value is None:
                    report["lost"].append(id)
                else:
                    report["spared"][id] = value.num_skipped
                    if value.write_started:
                        report["begun"].append(id)
        self.may_have_poison = bool(found)
        if not found:
            self._ids_by_storage, self._indexed_ids = {}, set()
        return list(found.values())


# The store whose operations run now: a rank has one thread that runs them.
current_store: TensorStore | None = None


def local_tensor(tensor: Any) -> Any:
    """Return a DTensor's shard, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_id(value: Any) -> int | None:
    """Return an identifier of a tensor's storage; None if it has no storage of its own here."""
    tensor = local_tensor(value.old_value if isinstance(value, Poison) else value)
    if tensor is None:
        return None
    try:
        found: int = tensor.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):  # such as sparse tensors
        return None
    return found


class _ForeignMemory:
    """Memory of tensors that are a cell's or an actor's too, whoever of them lives longer."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Any) -> None:
        storage = local_tensor(tensor).untyped_storage()
        for key in [key for key, known in self._storages.items() if known.expired()]:  # type: ignore[no-untyped-call]
            del self._storages[key]
        self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __contains__(self, value: Any) -> bool:
        found = self._storages.get(storage_id(value) or 0)
        return found is not None and not found.expired()  # type: ignore[no-untyped-call]


FOREIGN_MEMORY = _ForeignMemory()
