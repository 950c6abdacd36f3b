"""A rank's tensors by id, and the batches of operations that work on them.

`RankTensors.run` carries out one `RunOps` on the main thread. What an operation raises becomes a `Poison` in place of
its outputs, and of what it was to change; operations on poison are skipped and pass it on; everything else goes on. So
a fault is told when somebody waits for what depends on it, with the number of the operation that had it, and the
controller knows the line that issued it.

What an operation was to change keeps its value beside the fault: nothing was written to it, if the operation was not
begun. The controller has it back by `CLEAR_FAULTS` once the user knows of the fault, and an operation that overwrites
all of it needs no permission.

Seams for recordings: `RankTensors.space(engine)` gives a `TensorStore` (values by id, templates by number); `execute`
runs a list of numbers against any mapping of values; `EXTRAS` maps further commands' names to functions of (space,
arguments).
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

# Numbers in place of a template's, before a count and so many ids: let go of them; forget their faults.
FREE_IDS, CLEAR_FAULTS = 0, -1

# Who else keeps things for a client; called with its name when it is gone, from any thread.
ON_CLIENT_DROPPED: list[Callable[[str], None]] = []

# Of generated code, by its file name: which operation a line of it carries out now, and the line that issued that one.
GENERATED_CODE: dict[str, Callable[[int], tuple[str, Frame | None]]] = {}

# Errors of a rank that was in order, and that another one's fault has released from a collective.
_SECONDARY_ERRORS = ("GroupBroken", "CollectiveAborted", "StepRefused")
# Seconds that a rank waits to hear whether the others had the same fault before it takes them for stuck without it.
_SAME_FAULT_S = 1.0
# Faults of which it is remembered that the others were told.
_MAX_ANNOUNCED_FAULTS = 1000

_issued_decoder = msgspec.msgpack.Decoder(BatchCallSites)
_ops_decoder: msgspec.msgpack.Decoder[list[int | float]] = msgspec.msgpack.Decoder(list[int | float])


@dataclass(frozen=True)
class Poison:
    """What stands for a tensor that could not be computed."""

    number: int  # of the operation that failed first
    ename: str
    evalue: str
    trace: str  # the rank's traceback, as text
    interrupted: bool = False
    secondary: bool = False  # another rank had the fault, and this one was released from its collective
    # Of a tensor that was to be changed:
    old_value: Any = field(default=None, compare=False)  # the tensor; None: there was none
    num_skipped: int = 0  # operations that were to change it and were not begun
    write_started: bool = False  # one was, and may have written a part
    # Of a view that was not made:
    base: int | None = field(default=None, compare=False)  # the id of what it would be a view of

    def as_dict(self) -> dict[str, Any]:
        names = ("number", "ename", "evalue", "trace", "interrupted", "secondary")
        return {name: getattr(self, name) for name in names}

    def without_old_value(self) -> Poison:
        """Of a tensor that there is not."""
        if self.old_value is None and not self.num_skipped and self.base is None:
            return self
        return replace(self, old_value=None, num_skipped=0, write_started=False, base=None)


class Poisoned(Exception):
    """A value was asked for that could not be computed."""

    def __init__(self, poison: Poison) -> None:
        super().__init__(poison.evalue)
        self.poison = poison


class CurrentOp(NamedTuple):
    """What of a batch is carried out now."""

    operation: str  # "aten.mm"
    line: Frame | None  # of the controller, which issued it
    cells: dict[str, str]  # "cell 7", by file names of lines
    generated_code: dict[str, Callable[[int], tuple[str, Frame | None]]]  # `GENERATED_CODE`


class CompiledTemplate:
    """How one kind of operation is carried out."""

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
    """The function of that name; of one that this rank does not know, what says so, unless it does by then."""
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
    """The function where new floating-point tensors are of that dtype, as they are on the controller."""

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
    """How many tensors and floats the arguments take, whether the tensors are all of them, and what joins them."""
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
        number, doing: the operation that is carried out, and how; None: what was asked for is being fetched.
        sticky: the first failure of an operation that had no output to poison; told at the next wait.
        faults: failures since the last report.
        refused: why no operation of the optimizer's step that is under way is run.
        faulty: whether any value may be poison.
        unbegun: whether a batch is about to run, and `execute` does not answer for its operations yet.
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
    # Ids by the storage of their tensors, while there are faults; and those that are in it.
    _ids_by_storage: dict[int, list[int]] = field(default_factory=dict)
    _indexed_ids: set[int] = field(default_factory=set)

    def get(self, id: int) -> Any:
        """The tensor of that id.

        Raises:
            Poisoned: it could not be computed, or was never: its batch was stopped.
        """
        value = self.values.get(id)
        if value is None:
            value = Poison(0, "Interrupted", "its computation was stopped before it ran", "", interrupted=True)
        if isinstance(value, Poison):
            raise Poisoned(value)
        return value

    def poison_output(self, id: int, poison: Poison, *, base: int | None = None) -> None:
        """The tensor of that id could not be computed.

        Args:
            base: the id of what it would be a view of; None: it would be none.
        """
        if base is not None:
            base_value = self.values.get(base)
            base = base_value.base if isinstance(base_value, Poison) and base_value.base is not None else base
            self.values[id] = replace(poison.without_old_value(), base=base)
        else:
            self.values[id] = poison.without_old_value()
        self.may_have_poison = True

    def poison_unchanged(self, id: int, poison: Poison, *, write_started: bool = False) -> None:
        """The tensor of that id was to be changed, and was not; or, begun, maybe in part. So was whatever shares its
        storage."""
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
        """The id, and those of all tensors on the same storage."""
        storage = _storage_id(self.values.get(id))
        if storage is None:
            return [id]
        for new in reversed(self.values):  # what is new in a dict is at its end
            if new in self._indexed_ids:
                break
            self._indexed_ids.add(new)
            if (storage_of_new := _storage_id(self.values[new])) is not None:
                self._ids_by_storage.setdefault(storage_of_new, []).append(new)
        others = self._ids_by_storage.get(storage, ())
        return [id, *(other for other in others if other != id and _storage_id(self.values.get(other)) == storage)]

    def clear_poison(self, ids: Sequence[int]) -> None:
        """Who asks for these tensors again knows that they were not changed."""
        for id in ids:
            value = self.values.get(id)
            if isinstance(value, Poison) and value.old_value is not None:
                self.values[id] = value.old_value

    def report_poisoned(self) -> list[dict[str, Any]]:
        """The ids that have faults, by fault."""
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
    """All engines of this rank. Main thread only, but for `space` counts."""

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
        """
        Args:
            load: a payload's object.
            dump: an object's payload, large buffers in shared memory.
            resolve: what this rank has under a key, such as "name:w".
            defer_interrupts: lines that a Stop must not part; it is raised at their end.
        """
        self.rank, self.device = rank, device
        self._groups, self._load, self._dump, self._resolve_key = groups, load, dump, resolve
        self._stores: dict[str, TensorStore] = {}
        self._current_batch: tuple[RunOps, TensorStore] | None = None
        self._announced_faults: dict[str, None] = {}  # those of late
        self._dropped_clients: set[str] = set()  # clients; what they had sent before may still come
        FUNCTIONS["adopt"] = self._adopt
        agreement.defer_interrupts = defer_interrupts
        dtensor_patches.install()

    def store_of(self, engine: str) -> TensorStore:
        """The engine's space, made when it is first named: "<client>/<axes and places of its part of the mesh>"."""
        store = self._stores.get(engine)
        if store is None:
            store = self._stores[engine] = TensorStore(engine, self._mesh_of(engine), self.device)
        return store

    def _mesh_of(self, engine: str) -> DeviceMesh | None:
        """The DeviceMesh of the part of the mesh that an engine's name tells: "client|dp,tp|"."""
        if self._groups is None or self._groups.mesh is None:
            return None
        names = tuple(name for name in engine.split("|")[1].split(",") if name)
        full_mesh = self._groups.mesh
        return full_mesh if names == full_mesh.mesh_dim_names else full_mesh[names]

    def drop_client(self, client: str) -> None:
        """Forget what a client that is gone held. Any thread: a batch that runs keeps its space to its end."""
        self._dropped_clients.add(client)
        for name in [name for name in self._stores if name.partition("|")[0] == client]:
            del self._stores[name]
        for callback in ON_CLIENT_DROPPED:
            callback(client)

    def resolve(self, key: str) -> Any:
        """The tensor behind a handle that came among arguments: "<engine>#<id>"."""
        engine, _, id = key.rpartition("#")
        try:
            return self.store_of(engine).get(int(id))
        except Poisoned as error:
            raise RuntimeError(
                f"this tensor could not be computed: {error.poison.ename}: {error.poison.evalue}"
            ) from None

    def run(self, command: RunOps) -> dict[str, Any]:
        """Carry out a batch; what the controller is to know of it: faults, and the value it asked for.

        Raises:
            KeyboardInterrupt: Stop. What had not run yet is poison.
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
        """`run` is about to be called with this batch, unless a Stop comes before its operations are begun."""
        self.store_of(command.engine).is_batch_expected = True

    def skip_batch(self, command: RunOps) -> None:
        """Remember that the batch that was expected is not run, if none of its operations was begun."""
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
        """The operation that runs now, and who issued it; None between batches. Any thread; reads, and waits for
        nothing."""
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
        """Whether an operation failed because its collective was broken, and so for another rank's sake."""
        groups = self._groups
        is_known = type(error).__name__ in _SECONDARY_ERRORS
        return is_known or (isinstance(error, RuntimeError) and groups is not None and groups.is_broken)

    def _store_upload(self, store: TensorStore, id: int, tensor: torch.Tensor, placements: Any) -> None:
        """Bind what the controller sent. A payload's memory may be shared and is private only page by page: copied."""
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
            poison = _poison_from_error(-rows.ids[0], error)  # of no operation
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
        """Called where this rank cannot take part in a collective because of a fault. If the others have had the same
        fault nobody waits; if they have not, they wait for this rank, and are freed by breaking the groups."""
        groups = self._groups
        tcp_store = None if groups is None else groups._store
        # A group that broke because of a neighbour's closed connection still keeps other neighbours waiting.
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
        """A tensor that a cell made, for operations of the controller: the same storage, without autograd's history.

        Args:
            placements: None: it was a plain tensor.

        Raises:
            TypeError: it is not what it was said to be any more.
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
    """How many collectives this rank has begun, by axis of the mesh."""
    if mesh is None:
        return []
    labels = [getattr(mesh.get_group(axis), "label", None) for axis in range(mesh.ndim)]
    return [0 if label is None else label.num_begun for label in labels]


def execute(
    store: TensorStore,
    stream: list[Any],  # of int, and of float where a template has floats
    values: MutableMapping[int, Any],
    first_number: int,
    announce_fault: Callable[[Poison], None],
    is_secondary: Callable[[BaseException], bool] = lambda error: False,
) -> None:
    """Run a stream of operations against `values`.

    Raises:
        KeyboardInterrupt: after everything that had not run yet has been poisoned.
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
                    # A broken collective comes before anything is written, and a recorded step says what it wrote.
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
                    # Those that refuse a step have answered each other; a closed connection has told this rank alone.
                    if template.communicates and not isinstance(error, agreement.StepRefused):
                        announce_fault(poison)
            elif template.name == agreement.BEGIN:
                _refuse_step(store, poison)
            elif template.communicates:
                announce_fault(poison)
            if poison is not None:
                with agreement.defer_interrupts():  # a Stop between two of these lines would have them done twice
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
    """Carry out one of the words that are no operation; where the next one is."""
    next_at = at + 2 + int(stream[at + 1])
    if stream[at] == CLEAR_FAULTS:
        store.clear_poison(stream[at + 2 : next_at])
    else:
        for id in stream[at + 2 : next_at]:
            values.pop(id, None)
    return next_at


def _first_poison(template: CompiledTemplate, ins: list[Any], number: int) -> Poison | None:
    """The first fault of an operation's inputs. What it overwrites may have one: the value beside it serves."""
    for position, tensor in enumerate(ins):
        if tensor is None:
            return Poison(number, "Interrupted", "an earlier operation was stopped", "", True)
        if tensor.__class__ is Poison:
            if tensor.old_value is None or not template.overwrites or position not in template.mutates:
                return tensor
            ins[position] = tensor.old_value
    return None


def _versions(template: CompiledTemplate, ins: Sequence[Any]) -> list[int]:
    """How often what the operation is to change has been changed. One operation of torch's changes all, or none."""
    positions = (
        template.mutates if template.name == _REPLAY_FUNCTION else (*template.mutates[:1], *template.mutates[-1:])
    )
    return [_local_tensor(ins[position])._version for position in positions]


def _local_tensor(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_id(value: Any) -> int | None:
    """The storage that a tensor lies on, as a number; None: it has none of its own here."""
    tensor = _local_tensor(value.old_value if isinstance(value, Poison) else value)
    if tensor is None:
        return None
    try:
        found: int = tensor.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):  # sparse, for one
        return None
    return found


def _refuse_step(store: TensorStore, poison: Poison) -> None:
    """Tell the others that this rank cannot take part in a step; they hear nothing where the groups are broken."""
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
    """A Stop came in the middle of an operation: before it changed anything, or after it had."""
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
    """Operations from a place on are not run: poison in place of what they make, and beside what they change."""
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
    """The operation whose tensors are listed from `start` on was not run, or failed: poison in place of what it makes,
    and beside what it changes."""
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        store.poison_output(id, poison, base=stream[start] if template.is_view else None)
    for index in template.mutates:
        store.poison_unchanged(stream[start + index], poison, write_started=write_started)


def display_name(function: str) -> str:
    """A template's function as people write it: "aten.mm"."""
    return function.removeprefix("whole::").removeprefix("reduced::").replace("::", ".").removesuffix(".default")


def _call_seeded(template: CompiledTemplate, args: Any, kwargs: Any, seed: int, store: TensorStore) -> Any:
    tracker = dtensor_random._rng_tracker
    first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, DTensor)), None)
    if isinstance(tracker, dtensor_patches.ShardedRNGTracker) and first is not None:
        tracker.seed = seed
        try:
            # Seeded here, as DTensor asks the tracker for some operations only.
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
    """Of this rank's own piece; empty where there is none."""
    tensor = value.old_value if isinstance(value, Poison) else value
    if tensor is None:
        return ""
    piece = _wait_if_async(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous().cpu()
    return hashlib.blake2b(piece.reshape(-1).view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def _wait_if_async(local: torch.Tensor) -> torch.Tensor:
    """A collective's result that may still be on its way, arrived."""
    wait = getattr(local, "wait", None)
    return wait() if wait is not None and type(local) is not torch.Tensor else local


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(int(length), 1)
    return tuple(reversed(strides))
