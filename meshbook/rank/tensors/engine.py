"""A rank's tensors by id, and the execution of batches of operations on them.

`RankTensors.run` executes one `RunOps` on the main thread. If an operation raises, a `Poison` replaces its outputs and
the tensors it was to mutate; operations with a poisoned input are skipped and propagate the poison; all others run. So
a fault is reported when the controller waits for a tensor that depends on it. It carries the number of the failed
operation, from which the controller knows the line that issued it.

A tensor that was to be mutated retains its value beside the fault: nothing was written to it if the operation did not
start. The controller restores it by `CLEAR_FAULTS` once the user has seen the fault; an operation that overwrites all
of it needs no such permission.

Entry points for recorded steps: `RankTensors.store_of(engine)` returns a `TensorStore` (values by id, templates by
number); `execute` runs a stream of numbers against any mapping of values.
"""

from __future__ import annotations

import hashlib
import pickle
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import _pytree as pytree

from meshbook.clock import monotonic, sleep
from meshbook.rank.tensors import agreement, dtensor_patches, feeding, modes, shared_write
from meshbook.rank.tensors.agreement import StepTracker
from meshbook.rank.tensors.operators import FLOAT, FUNCTIONS, MESH, TENSOR, TemplateMessage, find_function
from meshbook.wire import messages
from meshbook.wire.messages import BatchCallSites, Frame, RunOps, ShardedUpload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshbook.rank.groups import ProcessGroups

# Control numbers in place of a template's number, followed by a count and that many ids: free the tensors; clear their
# faults.
FREE_IDS, CLEAR_FAULTS = 0, -1

# Callbacks of modules that store state for a client; called with its name when it has disconnected, from any thread.
ON_CLIENT_DROPPED: list[Callable[[str], None]] = []

# By file name of generated code: a function from a line in it to the operation that the line runs now, and the
# controller's line that issued it.
GENERATED_CODE: dict[str, Callable[[int], tuple[str, Frame | None]]] = {}

# Errors of a rank without a fault of its own, released from a collective because another rank failed.
_SECONDARY_ERRORS = ("GroupBroken", "CollectiveAborted", "StepRefused")
# Seconds that a rank waits for the others to announce the same fault before it assumes that they are blocked without
# it.
_SAME_FAULT_S = 1.0
# Announced faults that are remembered.
_MAX_ANNOUNCED_FAULTS = 1000

_issued_decoder = msgspec.msgpack.Decoder(BatchCallSites)
_ops_decoder: msgspec.msgpack.Decoder[list[int | float]] = msgspec.msgpack.Decoder(list[int | float])


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


class CurrentOp(NamedTuple):
    """The operation of a batch that runs now."""

    operation: str  # "aten.mm"
    line: Frame | None  # the controller's line that issued it
    cells: dict[str, str]  # "cell 7", by file name
    generated_code: dict[str, Callable[[int], tuple[str, Frame | None]]]  # `GENERATED_CODE`


class CompiledTemplate:
    """How one kind of operation is executed."""

    __slots__ = (
        "build_args",
        "call",
        "communicates",
        "default_dtype",
        "is_view",
        "kwargs",
        "mutates",
        "name",
        "new_outputs",
        "num_floats",
        "num_in",
        "num_new",
        "outputs",
        "overwrites",
        "returns",
        "seeded",
        "takes_only_tensors",
    )  # fmt: skip

    def __init__(self, message: TemplateMessage, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.name = message.function
        self.default_dtype = None if message.default_dtype is None else getattr(torch, message.default_dtype)
        function = _find_or_defer(message.function)
        self.call = function if self.default_dtype is None else _with_default_dtype(function, self.default_dtype)
        self.outputs, self.returns, self.mutates = message.outputs, message.returns, message.mutates
        self.communicates, self.seeded, self.overwrites = message.communicates, message.seeded, message.overwrites
        self.is_view = message.is_view
        self.new_outputs = [index for index, output in enumerate(message.outputs) if output == -1]
        self.num_new = len(self.new_outputs)

        def fill_placeholder(leaf: Any) -> Any:
            if leaf is MESH:
                return mesh
            return device if isinstance(leaf, torch.device) else leaf

        args, self.kwargs = pytree.tree_map(fill_placeholder, (message.args, message.kwargs))
        self.num_in, self.num_floats, self.takes_only_tensors, self.build_args = _args_builder(args, self.kwargs)
        if self.seeded:
            self.num_floats += 1


def _find_or_defer(name: str) -> Callable[..., Any]:
    """Return the function of that name, or one that looks it up when called and raises if it is still unknown."""
    try:
        return find_function(name)
    except AttributeError:
        pass

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            function = find_function(name)
        except AttributeError:
            raise NotImplementedError(
                f"the operator {display_name(name)} is registered in the notebook's process and not on the ranks; run "
                "the cell that defines it there too, or import its module in a cell, and do this again"
            ) from None
        return function(*args, **kwargs)

    return call


def _with_default_dtype(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return the function wrapped so that new floating-point tensors get this dtype, as on the controller."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return call


def _args_builder(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, int, bool, Callable[[list[Any], Any], Any]]:
    """Return the numbers of tensors and floats, whether all are tensors, and the function that builds the arguments."""
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [at for at, leaf in enumerate(leaves) if leaf is TENSOR]
    floats = [at for at, leaf in enumerate(leaves) if leaf is FLOAT]
    flat = not kwargs and all(not isinstance(arg, (list, tuple, dict)) for arg in args)
    if flat and len(tensors) == len(args):
        return len(tensors), 0, True, lambda ins, numbers: (ins, {})
    if flat:

        def build_flat(ins: list[Any], numbers: Any) -> Any:
            filled = leaves.copy()
            for at, tensor in zip(tensors, ins, strict=True):
                filled[at] = tensor
            for at, number in zip(floats, numbers, strict=False):
                filled[at] = number
            return filled, {}

        return len(tensors), len(floats), False, build_flat

    def build(ins: list[Any], numbers: Any) -> Any:
        filled = leaves.copy()
        for at, tensor in zip(tensors, ins, strict=True):
            filled[at] = tensor
        for at, number in zip(floats, numbers, strict=False):
            filled[at] = number
        return pytree.tree_unflatten(filled, tree)

    return len(tensors), len(floats), False, build


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
    """

    name: str
    mesh: DeviceMesh | None
    device: torch.device
    values: dict[int, Any] = field(default_factory=dict)
    templates: dict[int, CompiledTemplate] = field(default_factory=dict)
    pending_error: Poison | None = None
    faults: list[Poison] = field(default_factory=list)
    num_ops: int = 0
    op_number: int = 0
    current_template: CompiledTemplate | None = None
    step_tracker: StepTracker = field(default_factory=StepTracker)
    modes: modes.BatchModes = field(default_factory=modes.BatchModes)
    step_refusal: Poison | None = None
    may_have_poison: bool = False
    is_batch_expected: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    # Ids by storage of their tensors, maintained while there are faults, and the set of ids in it.
    _ids_by_storage: dict[int, list[int]] = field(default_factory=dict)
    _indexed_ids: set[int] = field(default_factory=set)

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
        storage = _storage_id(self.values.get(id))
        if storage is None:
            return [id]
        for new in reversed(self.values):  # a dict ends with its newest items
            if new in self._indexed_ids:
                break
            self._indexed_ids.add(new)
            if (storage_of_new := _storage_id(self.values[new])) is not None:
                self._ids_by_storage.setdefault(storage_of_new, []).append(new)
        others = self._ids_by_storage.get(storage, ())
        return [id, *(other for other in others if other != id and _storage_id(self.values.get(other)) == storage)]

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


class RankTensors:
    """All engines of this rank. Main thread only, except `current_op` and `drop_client`."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        groups: ProcessGroups | None,
        *,
        load: Callable[[Any], Any],
        dump: Callable[[Any], Any],
        resolve: Callable[[str], Any],
        defer_interrupts: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Initialize without any engine.

        Args:
            load: returns a payload's object.
            dump: returns an object's payload, with large buffers in shared memory.
            resolve: returns what this rank has under a key, such as "name:w".
            defer_interrupts: context that an interrupt must not split; KeyboardInterrupt is raised at its end.
        """
        self.rank, self.device = rank, device
        self._groups, self._load, self._dump, self._resolve_key = groups, load, dump, resolve
        self._stores: dict[str, TensorStore] = {}
        self._current_batch: tuple[RunOps, TensorStore] | None = None
        self._announced_faults: dict[str, None] = {}  # the most recent ones
        self._dropped_clients: set[str] = set()  # disconnected clients; earlier commands of theirs may still arrive
        FUNCTIONS["adopt"] = self._adopt
        agreement.defer_interrupts = defer_interrupts
        dtensor_patches.install()

    def store_of(self, engine: str) -> TensorStore:
        """Return the engine's store, created at first use.

        An engine's name is "<client>|<axes of its part of the mesh>|<random suffix>".
        """
        store = self._stores.get(engine)
        if store is None:
            store = self._stores[engine] = TensorStore(engine, self._mesh_of(engine), self.device)
        return store

    def _mesh_of(self, engine: str) -> DeviceMesh | None:
        """Return the DeviceMesh of the part of the mesh in an engine's name: "client|dp,tp|"."""
        if self._groups is None or self._groups.mesh is None:
            return None
        names = tuple(name for name in engine.split("|")[1].split(",") if name)
        full_mesh = self._groups.mesh
        return full_mesh if names == full_mesh.mesh_dim_names else full_mesh[names]

    def drop_client(self, client: str) -> None:
        """Drop what a disconnected client stored. Any thread; a running batch retains its store until it ends."""
        self._dropped_clients.add(client)
        for name in [name for name in self._stores if name.partition("|")[0] == client]:
            del self._stores[name]
        for callback in ON_CLIENT_DROPPED:
            callback(client)

    def resolve(self, key: str) -> Any:
        """Return the tensor of a handle among the arguments: "<engine>#<id>"."""
        engine, _, id = key.rpartition("#")
        try:
            return self.store_of(engine).get(int(id))
        except Poisoned as error:
            raise RuntimeError(
                f"this tensor could not be computed: {error.poison.ename}: {error.poison.evalue}"
            ) from None

    def run(self, command: RunOps) -> dict[str, Any]:
        """Run a batch and return what the controller must know: faults, and the value that it requested.

        Raises:
            KeyboardInterrupt: the user interrupted; operations that had not run yet are poisoned.
        """
        store = self.store_of(command.engine)
        store.op_number, store.current_template, self._current_batch = command.first_op, None, (command, store)
        agreement.current_tracker, modes.current_batch_modes = store.step_tracker, store.modes
        counts_before = _collective_counts(store.mesh)
        try:
            store.modes.begin()
            with dtensor_patches.in_remote_op():
                answer = self._run_batch(command, store)
            if (counts := _collective_counts(store.mesh)) != counts_before:
                answer["met"] = [now - then for now, then in zip(counts, counts_before, strict=True)]
            return answer
        finally:
            store.modes.end()
            self._current_batch = agreement.current_tracker = modes.current_batch_modes = None
            store.step_tracker.end()
            client = command.engine.partition("|")[0]
            if client in self._dropped_clients:
                self.drop_client(client)

    def expect_batch(self, command: RunOps) -> None:
        """Record that `run` will be called with this batch, unless an interrupt arrives before its operations start."""
        self.store_of(command.engine).is_batch_expected = True

    def skip_batch(self, command: RunOps) -> None:
        """Poison the outputs of the expected batch, if none of its operations started."""
        store = self.store_of(command.engine)
        if not store.is_batch_expected:
            return
        store.is_batch_expected = False
        self._compile_templates(command, store)
        poison = Poison(command.first_op, "KeyboardInterrupt", "stopped by the user", "", interrupted=True)
        for upload in command.uploads:
            store.poison_output(upload.id, poison)
        for rows in command.sharded_uploads:
            for id in rows.ids:
                store.poison_output(id, poison)
        _skip_from(store, _ops_decoder.decode(command.ops), 0, store.values, poison)

    def current_op(self) -> CurrentOp | None:
        """Return the operation that runs now and the line that issued it; None between batches.

        Any thread. Only reads; does not block.
        """
        current = self._current_batch
        if current is None:
            return None
        command, store = current
        template, number = store.current_template, store.op_number
        if template is None:
            operation = f"fetch {command.fetch.mode}" if command.fetch is not None else "a batch's beginning"
        else:
            operation = display_name(template.name)
        if not command.call_sites:
            return CurrentOp(operation, None, {}, GENERATED_CODE)
        issued = _issued_decoder.decode(command.call_sites)
        index = issued.line_indices[min(number - command.first_op, len(issued.line_indices) - 1)]
        return CurrentOp(operation, issued.lines[index], issued.cell_labels, GENERATED_CODE)

    def _compile_templates(self, command: RunOps, store: TensorStore) -> None:
        for body in command.templates:
            message: TemplateMessage = pickle.loads(body)
            store.templates[message.number] = CompiledTemplate(message, store.mesh, store.device)

    def _run_batch(self, command: RunOps, store: TensorStore) -> dict[str, Any]:
        self._compile_templates(command, store)
        for upload in command.uploads:
            self._store_upload(store, upload.id, *self._load(upload.payload))
        for rows in command.sharded_uploads:
            self._store_rows(store, rows)
        with torch.no_grad():
            announce_fault = partial(self._announce_fault, store)
            execute(
                store,
                _ops_decoder.decode(command.ops),
                store.values,
                command.first_op,
                announce_fault,
                self._is_secondary,
            )
            answer: dict[str, Any] = {}
            fetch = command.fetch
            if fetch is not None:
                try:
                    answer = self._fetch(store, fetch)
                except Exception as error:
                    poison = _poison_from_error(store.op_number, error, secondary=self._is_secondary(error))
                    answer = {"poison": poison.as_dict()}
        for number in command.evicted_templates:
            store.templates.pop(number, None)
        if store.faults:
            answer["faults"] = [fault.as_dict() for fault in store.faults]
            store.faults = []
        if store.may_have_poison and (poisoned := store.report_poisoned()):
            answer["faulted"] = poisoned
        return answer

    def _is_secondary(self, error: BaseException) -> bool:
        """Whether an operation failed because its collective was aborted, and so because of another rank."""
        groups = self._groups
        is_known = type(error).__name__ in _SECONDARY_ERRORS
        return is_known or (isinstance(error, RuntimeError) and groups is not None and groups.is_broken)

    def _store_upload(self, store: TensorStore, id: int, tensor: torch.Tensor, placements: Any) -> None:
        """Store a tensor from the controller. It is copied: a payload's memory may be shared, private only per page."""
        tensor = tensor.detach()
        if placements is None:
            store.values[id] = tensor.to(self.device, copy=True)
        elif all(placement.is_replicate() for placement in placements):
            local_tensor = tensor.to(self.device, copy=True)
            assert store.mesh is not None
            store.values[id] = DTensor.from_local(local_tensor, store.mesh, placements, run_check=False)
        else:
            dtensor = distribute_tensor(tensor, store.mesh, placements, src_data_rank=None)
            local_tensor = dtensor.to_local().to(self.device, copy=True)
            store.values[id] = DTensor.from_local(
                local_tensor,
                store.mesh,
                placements,
                run_check=False,
                shape=tensor.shape,
                stride=_contiguous_strides(tensor.shape),
            )

    def _store_rows(self, store: TensorStore, rows: ShardedUpload) -> None:
        try:
            tensors, placements = self._load(rows.payload)
            for id, tensor, placement_row in zip(rows.ids, tensors, placements, strict=True):
                store.values[id] = feeding.shard_rows(tensor, store.mesh, placement_row, self.device)
        except Exception as error:
            poison = _poison_from_error(-rows.ids[0], error)  # not of an operation
            for id in rows.ids:
                store.poison_output(id, poison)

    def _fetch(self, store: TensorStore, fetch: messages.Fetch) -> dict[str, Any]:
        if fetch.mode == "state":
            return {
                "done": list(store.step_tracker.completed),
                "hashes": [_hash_of(store.values.get(id)) for id in fetch.ids],
            }
        pending_error, store.pending_error = store.pending_error, None
        if pending_error is not None:
            return {"poison": pending_error.as_dict()}
        if fetch.mode == "nothing":
            return {"live": len(store.values), "templates": len(store.templates)}
        try:
            value = store.get(fetch.id)
        except Poisoned as error:
            if fetch.mode != "local" and not error.poison.interrupted:
                self._announce_fault(store, error.poison)
            return {"poison": error.poison.as_dict()}
        is_asked = self.rank in fetch.ranks
        if fetch.mode == "item":
            if isinstance(value, DTensor):
                value = value.full_tensor()
            return {"value": self._dump(value.item())} if is_asked else {}
        if fetch.mode == "parts" and isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                placements = [Replicate() if place.is_partial() else place for place in value.placements]
                value = value.redistribute(placements=placements)
            value = _wait_if_async(value.to_local())
        elif isinstance(value, DTensor):
            value = _wait_if_async(value.to_local())
        if not is_asked or (
            fetch.buffer is not None and shared_write.write_box(fetch.buffer, self.rank, value.detach())
        ):
            return {}
        return {"value": self._dump(value.detach().cpu())}

    def _announce_fault(self, space: TensorStore, poison: Poison) -> None:
        """Announce that this rank cannot take part in a collective because of a fault.

        If all ranks have the same fault, none of them waits. Otherwise the others wait for this rank, and aborting the
        groups releases them.
        """
        groups = self._groups
        tcp_store = None if groups is None else groups._store
        # Only an abort releases all ranks: a group broken by one neighbour's closed connection still blocks other
        # neighbours.
        if groups is None or tcp_store is None or groups.abort_failure is not None:
            return
        num_ranks = space.mesh.size() if space.mesh is not None else 1
        key = f"meshbook/fault/{groups.generation}/{space.name}/{poison.number}/{poison.ename}"
        announcement = f"{key}/{self.rank}"
        if announcement not in self._announced_faults:
            self._announced_faults[announcement] = None
            if len(self._announced_faults) > _MAX_ANNOUNCED_FAULTS:
                del self._announced_faults[next(iter(self._announced_faults))]
            tcp_store.add(key, 1)
        deadline = monotonic() + _SAME_FAULT_S
        while tcp_store.add(key, 0) < num_ranks:
            if monotonic() > deadline:
                groups.abort(RuntimeError(f"rank {self.rank} cannot take part: {poison.ename}: {poison.evalue}"))
                return
            sleep(0.01)

    def _adopt(
        self, key: str, shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...] | None, mesh: Any
    ) -> torch.Tensor:
        """Return a tensor from a cell for operations of the controller: same storage, without autograd history.

        Args:
            placements: None: it was a plain tensor.

        Raises:
            TypeError: its type, shape, dtype or placements are no longer the reported ones.
        """
        tensor = self._resolve_key(key)
        name = key.partition(":")[2]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__} on rank {self.rank}, not a tensor")
        if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
            raise TypeError(
                f"{name} lies on {tensor.device_mesh}, not on all of this mesh; take x.to_local() in a cell"
            )
        current_placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
        current = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), current_placements)
        if current != (shape, dtype, placements):
            raise TypeError(
                f"{name} has changed on rank {self.rank} since it was looked up: it was "
                f"{_describe_tensor(shape, dtype, placements)}, and is {_describe_tensor(*current)}; "
                f"look it up again, mesh[{name!r}]"
            )
        return tensor.detach()


def _describe_tensor(shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...] | None) -> str:
    placement_text = "each rank's own" if placements is None else f"placed ({', '.join(map(str, placements))})"
    return f"{shape} of {dtype}, {placement_text}"


def _collective_counts(mesh: DeviceMesh | None) -> list[int]:
    """Return how many collectives this rank has begun, by mesh axis."""
    if mesh is None:
        return []
    labels = [getattr(mesh.get_group(axis), "label", None) for axis in range(mesh.ndim)]
    return [0 if label is None else label.num_begun for label in labels]


def execute(
    store: TensorStore,
    stream: list[Any],  # int, and float where a template has floats
    values: MutableMapping[int, Any],
    first_number: int,
    announce_fault: Callable[[Poison], None],
    is_secondary: Callable[[BaseException], bool] = lambda error: False,
) -> None:
    """Run a stream of operations against `values`.

    Raises:
        KeyboardInterrupt: after all operations that had not run yet have been poisoned.
    """
    templates = store.templates
    at, end, number = 0, len(stream), first_number
    running: tuple[CompiledTemplate, int, list[Any], list[int]] | None = None
    try:
        store.is_batch_expected = False
        while at < end:
            number_or_control = stream[at]
            if number_or_control <= FREE_IDS:
                at = _run_control_op(store, values, stream, at)
                number += 1
                continue
            template = templates[number_or_control]
            store.op_number, store.current_template = number, template
            start = at + 1
            middle = start + template.num_in
            stop = middle + template.num_new
            next_at = stop + template.num_floats
            ins = [values.get(id) for id in stream[start:middle]]
            poison, write_started = store.step_refusal, False
            for tensor in ins:
                if tensor is None or tensor.__class__ is Poison:
                    poison = _first_poison(template, ins, number) or poison
                    break
            if poison is None:
                running, at = (template, start, ins, _versions(template, ins) if template.mutates else []), next_at
                try:
                    args, kwargs = template.build_args(ins, stream[stop:next_at])
                    if template.seeded:
                        result = _call_seeded(template, args, kwargs, int(stream[next_at - 1]), store)
                    else:
                        result = template.call(*args, **kwargs)
                    if template.num_new:
                        if template.returns == "one":
                            if result.__class__ is DTensor:
                                meta = result._spec.tensor_meta
                                if meta is not None and meta.dtype is not result._local_tensor.dtype:
                                    result = dtensor_patches.with_actual_dtype(result)
                            values[stream[middle]] = result
                        else:
                            for id, index in zip(stream[middle:stop], template.new_outputs, strict=True):
                                values[id] = result[index]
                    if template.overwrites and store.may_have_poison:
                        for index in template.mutates:
                            values[stream[start + index]] = ins[index]
                except Exception as error:
                    poison = _poison_from_error(number, error, secondary=is_secondary(error))
                    # A broken collective fails before anything is written; of a recorded step the version counters show
                    # what it wrote.
                    is_unwritten = poison.secondary or template.name == _REPLAY_FUNCTION
                    write_started = not is_unwritten or _versions(template, ins) != running[3]
                    store.faults.append(poison)
                    is_begin_step = template.name == agreement.BEGIN
                    if (
                        not is_begin_step
                        and not template.num_new
                        and not template.mutates
                        and store.pending_error is None
                    ):
                        store.pending_error = poison
                    # Ranks that refuse a step have replied to each other; a closed connection is known to this rank
                    # only.
                    if template.communicates and not isinstance(error, agreement.StepRefused):
                        announce_fault(poison)
            elif template.name == agreement.BEGIN:
                _refuse_step(store, poison)
            elif template.communicates:
                announce_fault(poison)
            if poison is not None:
                with agreement.defer_interrupts():  # an interrupt between these lines would make them run twice
                    _propagate_poison(store, stream, template, start, poison, write_started=write_started)
                    if template.name == agreement.BEGIN:
                        store.step_refusal = poison.without_old_value()
                    elif template.name == agreement.END:
                        store.step_refusal = None
                    running, at, number = None, next_at, number + 1
            else:
                running, at, number = None, next_at, number + 1
        store.num_ops += number - first_number
        store.op_number, store.current_template = number, None
    except KeyboardInterrupt:
        store.is_batch_expected = False
        poison = Poison(number, "KeyboardInterrupt", "stopped by the user", "", interrupted=True)
        if running is not None:
            _poison_interrupted(store, values, stream, poison, *running)
        _skip_from(store, stream, at, values, poison)
        store.step_refusal = None
        store.op_number, store.current_template = number, None
        raise


_REPLAY_FUNCTION = "meshbook::replay"


def _run_control_op(store: TensorStore, values: MutableMapping[int, Any], stream: list[Any], at: int) -> int:
    """Execute a control number, which is no operation; return the index of the next one."""
    next_at = at + 2 + int(stream[at + 1])
    if stream[at] == CLEAR_FAULTS:
        store.clear_poison(stream[at + 2 : next_at])
    else:
        for id in stream[at + 2 : next_at]:
            values.pop(id, None)
    return next_at


def _first_poison(template: CompiledTemplate, ins: list[Any], number: int) -> Poison | None:
    """Return the first fault of an operation's inputs. For an overwritten input the value beside its fault is used."""
    for position, tensor in enumerate(ins):
        if tensor is None:
            return Poison(number, "Interrupted", "an earlier operation was stopped", "", True)
        if tensor.__class__ is Poison:
            if tensor.old_value is None or not template.overwrites or position not in template.mutates:
                return tensor
            ins[position] = tensor.old_value
    return None


def _versions(template: CompiledTemplate, ins: Sequence[Any]) -> list[int]:
    """Return version counters of the tensors that are mutated. A torch operator mutates all of them or none."""
    positions = (
        template.mutates if template.name == _REPLAY_FUNCTION else (*template.mutates[:1], *template.mutates[-1:])
    )
    return [_local_tensor(ins[position])._version for position in positions]


def _local_tensor(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_id(value: Any) -> int | None:
    """Return an identifier of a tensor's storage; None if it has no storage of its own here."""
    tensor = _local_tensor(value.old_value if isinstance(value, Poison) else value)
    if tensor is None:
        return None
    try:
        found: int = tensor.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):  # such as sparse tensors
        return None
    return found


def _refuse_step(store: TensorStore, poison: Poison) -> None:
    """Tell the other ranks that this one cannot take part in a step; without effect if the groups are broken."""
    try:
        agreement.all_ranks_ready(store.mesh, False)
    except Exception as error:
        store.faults.append(_poison_from_error(store.op_number, error, secondary=True))


def _poison_interrupted(
    store: TensorStore,
    values: MutableMapping[int, Any],
    stream: list[Any],
    poison: Poison,
    template: CompiledTemplate,
    start: int,
    ins: list[Any],
    versions: list[int],
) -> None:
    """Poison the outputs and mutated inputs of an operation that was interrupted, before or after it wrote anything."""
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        if values.get(id) is None:
            store.poison_output(id, poison, base=stream[start] if template.is_view else None)
    was_written = bool(template.mutates) and _versions(template, ins) != versions
    if was_written and template.overwrites:
        for index in template.mutates:
            values[stream[start + index]] = ins[index]
    if not was_written or template.name == _REPLAY_FUNCTION:
        for index in template.mutates:
            store.poison_unchanged(stream[start + index], poison, write_started=was_written)


def _skip_from(
    store: TensorStore, stream: list[Any], at: int, values: MutableMapping[int, Any], poison: Poison
) -> None:
    """Skip the operations from an index on: poison what they would create and mark what they would mutate."""
    end = len(stream)
    while at < end:
        if stream[at] <= FREE_IDS:
            at = _run_control_op(store, values, stream, at)
            continue
        template = store.templates[int(stream[at])]
        _propagate_poison(store, stream, template, at + 1, poison)
        at += 1 + template.num_in + template.num_new + template.num_floats


def _propagate_poison(
    store: TensorStore,
    stream: list[Any],
    template: CompiledTemplate,
    start: int,
    poison: Poison,
    *,
    write_started: bool = False,
) -> None:
    """Poison the outputs of an operation that was skipped or failed, and mark the tensors it was to mutate.

    Its tensors are listed in `stream` from `start` on.
    """
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        store.poison_output(id, poison, base=stream[start] if template.is_view else None)
    for index in template.mutates:
        store.poison_unchanged(stream[start + index], poison, write_started=write_started)


def display_name(function: str) -> str:
    """Return a template's function name for display: "aten.mm"."""
    return function.removeprefix("whole::").removeprefix("reduced::").replace("::", ".").removesuffix(".default")


def _call_seeded(template: CompiledTemplate, args: Any, kwargs: Any, seed: int, store: TensorStore) -> Any:
    tracker = dtensor_random._rng_tracker
    first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, DTensor)), None)
    if isinstance(tracker, dtensor_patches.ShardedRNGTracker) and first is not None:
        tracker.seed = seed
        try:
            # Seed here, as DTensor calls the tracker for some operations only.
            with dtensor_patches.fork_rng_with_seed(
                dtensor_patches.mix_seed(seed, dtensor_patches.shard_index_of(first._spec))
            ):
                return template.call(*args, **kwargs)
        finally:
            tracker.seed = None
    position = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with dtensor_patches.fork_rng_with_seed(dtensor_patches.mix_seed(seed, position)):
        return template.call(*args, **kwargs)


def _poison_from_error(number: int, error: Exception, *, secondary: bool = False) -> Poison:
    trace = "".join(traceback.format_exception(error, limit=-4, chain=False))
    return Poison(number, type(error).__name__, str(error).strip()[:2000], trace[-4000:], secondary=secondary)


def _hash_of(value: Any) -> str:
    """Return the hash of this rank's shard; empty if there is none."""
    tensor = value.old_value if isinstance(value, Poison) else value
    if tensor is None:
        return ""
    piece = _wait_if_async(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous().cpu()
    return hashlib.blake2b(piece.reshape(-1).view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def _wait_if_async(local: torch.Tensor) -> torch.Tensor:
    """Wait for a collective's result that may still be in flight, and return it."""
    wait = getattr(local, "wait", None)
    return wait() if wait is not None and type(local) is not torch.Tensor else local


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(int(length), 1)
    return tuple(reversed(strides))
