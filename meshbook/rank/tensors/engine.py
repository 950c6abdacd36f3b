"""A rank's tensors of all engines, and the batches of operations on them.

`RankTensors.run` executes one `RunOps` on the main thread. A fault is reported when the controller waits for a tensor
that depends on it. It carries the number of the failed operation, from which the controller knows the line that issued
it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.distributed.tensor import DTensor

from meshbook.rank.tensors import agreement, dtensor_patches, feeding, modes, shared_write, tensor_store
from meshbook.rank.tensors.execution import execute, skip_from
from meshbook.rank.tensors.fault_announcer import FaultAnnouncer
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.operators import FUNCTIONS, replicate_partials
from meshbook.rank.tensors.templates import display_name
from meshbook.rank.tensors.tensor_store import FOREIGN_MEMORY, Poison, Poisoned, TensorStore
from meshbook.wire import messages
from meshbook.wire.messages import BatchCallSites, Frame, RunOps, ShardedUpload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshbook.rank.process_groups.groups import ProcessGroups

# Callbacks of modules that store state for a client; called with its name when it has disconnected, from any thread.
ON_CLIENT_DROPPED: list[Callable[[str], None]] = []

# By file name of generated code: a function from a line in it to the operation that the line runs now, and the
# controller's line that issued it.
GENERATED_CODE: dict[str, Callable[[int], tuple[str, Frame | None]]] = {}

# Errors of a rank without a fault of its own, released from a collective because another rank failed.
_SECONDARY_ERRORS = ("GroupBroken", "CollectiveAborted", "StepRefused", "OutOfStep", "RankLost")

# The running batch is asked about again and again while it is watched.
_decode_call_sites = functools.lru_cache(maxsize=1)(msgspec.msgpack.Decoder(BatchCallSites).decode)
_ops_decoder: msgspec.msgpack.Decoder[list[int | float]] = msgspec.msgpack.Decoder(list[int | float])


class CurrentOp(NamedTuple):
    """The operation of a batch that runs now."""

    operation: str  # "aten.mm"
    line: Frame | None  # the controller's line that issued it
    cells: dict[str, str]  # "cell 7", by file name
    generated_code: dict[str, Callable[[int], tuple[str, Frame | None]]]  # `GENERATED_CODE`


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
        self._announcer = FaultAnnouncer(rank, groups)
        self._dropped_clients: set[str] = set()  # disconnected clients; earlier commands of theirs may still arrive
        FUNCTIONS["adopt"] = self._adopt
        agreement.defer_interrupts = defer_interrupts
        dtensor_patches.install()
        if device.type == "cpu":
            dtensor_patches.install_rng_tracker()

    @property
    def stores(self) -> Mapping[str, TensorStore]:
        """The stores by the names of their engines."""
        return self._stores

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

    def run(self, command: RunOps, watch: AbstractContextManager[Any] | None = None) -> dict[str, Any]:
        """Run a batch and return what the controller must know: faults, and the value that it requested.

        A batch of a controller that does not know yet that ranks were replaced is not run (`{"stale": True}`): what
        came before it may be lost.

        Args:
            watch: entered while the operations run.

        Raises:
            KeyboardInterrupt: the user interrupted; operations that had not run yet are poisoned.
        """
        store = self.store_of(command.engine)
        if command.fetch is not None and command.fetch.mode == "heals":
            return {"heals": store.num_heals, "batches": store.num_batches, "missing": store.missing}
        if command.num_heals < store.num_heals:
            self.skip_batch(command)
            return {"stale": True}
        store.num_batches = command.ordinal + 1
        store.op_number, store.current_template, self._current_batch = command.first_op, None, (command, store)
        agreement.current_tracker, modes.current_batch_modes = store.step_tracker, store.modes
        tensor_store.current_store = store
        counts_before = _collective_counts(store.mesh)
        try:
            store.modes.begin()
            with dtensor_patches.in_remote_op(), dtensor_patches.own_rng_tracker(), watch or nullcontext():
                answer = self._run_batch(command, store)
            if (counts := _collective_counts(store.mesh)) != counts_before:
                answer["met"] = [now - then for now, then in zip(counts, counts_before, strict=True)]
            return answer
        finally:
            store.modes.end()
            self._current_batch = agreement.current_tracker = modes.current_batch_modes = None
            tensor_store.current_store = None
            store.step_tracker.end()
            client = command.engine.partition("|")[0]
            if client in self._dropped_clients:
                self.drop_client(client)

    def expect_batch(self, command: RunOps) -> None:
        """Record that `run` will be called with this batch, unless an interrupt arrives before its operations start.

        Of a batch that has come before (a controller repeats, as cancelled, those that a lost rank has not confirmed)
        nothing is recorded.
        """
        store = self.store_of(command.engine)
        is_question = command.fetch is not None and command.fetch.mode == "heals"
        store.is_batch_expected = command.ordinal >= store.num_batches and not is_question

    def skip_batch(self, command: RunOps) -> None:
        """Poison the outputs of the expected batch, if none of its operations started."""
        store = self.store_of(command.engine)
        if not store.is_batch_expected:
            return
        store.num_batches = command.ordinal + 1
        self._compile_templates(command, store)
        poison = Poison.of_interrupt(command.first_op)
        if store.num_heals:
            poison = poison.after_loss()
        for upload in command.uploads:
            store.poison_output(upload.id, poison)
        for rows in command.sharded_uploads:
            for id in rows.ids:
                store.poison_output(id, poison)
        skip_from(store, _ops_decoder.decode(command.ops), 0, poison)

    def current_op(self, number: int | None = None) -> CurrentOp | None:
        """Return the operation that runs now and the line that issued it; None between batches.

        Any thread. Only reads; does not block.

        Args:
            number: of an operation of the same batch, whose line is returned in place of that of the one that runs.
        """
        current = self._current_batch
        if current is None:
            return None
        command, store = current
        template, number = store.current_template, store.op_number if number is None else number
        if template is None:
            operation = f"fetch {command.fetch.mode}" if command.fetch is not None else "a batch's beginning"
        else:
            operation = display_name(template.name)
        if not command.call_sites:
            return CurrentOp(operation, None, {}, GENERATED_CODE)
        issued = _decode_call_sites(command.call_sites)
        index = issued.line_indices[min(number - command.first_op, len(issued.line_indices) - 1)]
        return CurrentOp(operation, issued.lines[index], issued.cell_labels, GENERATED_CODE)

    def _compile_templates(self, command: RunOps, store: TensorStore) -> None:
        for body in command.templates:
            store.add_template(body)

    def _run_batch(self, command: RunOps, store: TensorStore) -> dict[str, Any]:
        self._compile_templates(command, store)
        for upload in command.uploads:
            self._store_upload(store, upload.id, *self._load(upload.payload))
        for rows in command.sharded_uploads:
            self._store_rows(store, rows)
        with torch.no_grad():
            stream = _ops_decoder.decode(command.ops)
            execute(store, stream, command.first_op, partial(self._announcer.announce, store), self._is_secondary)
            answer: dict[str, Any] = {}
            fetch = command.fetch
            if fetch is not None:
                try:
                    answer = self._fetch(store, fetch)
                except Exception as error:
                    poison = Poison.of_error(store.op_number, error, secondary=self._is_secondary(error))
                    answer = {"poison": poison.as_dict()}
        for number in command.evicted_templates:
            store.drop_template(number)
        if store.loop_report:
            answer["loop"], store.loop_report = store.loop_report, {}
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
            return
        shard = feeding.own_shard(tensor, store.mesh, placements)
        stride = torch.empty(tensor.shape, device="meta").stride()
        store.values[id] = DTensor.from_local(
            shard.to(self.device, copy=True, memory_format=torch.contiguous_format),
            store.mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=stride,
        )

    def _store_rows(self, store: TensorStore, rows: ShardedUpload) -> None:
        try:
            tensors, placements = self._load(rows.payload)
            for id, tensor, placement_row in zip(rows.ids, tensors, placements, strict=True):
                store.values[id] = feeding.shard_rows(tensor, store.mesh, placement_row, self.device)
        except Exception as error:
            poison = Poison.of_error(-rows.ids[0], error)  # not of an operation
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
            if self.device.type != "cpu":  # its operations have been launched, and may still fail
                torch.get_device_module(self.device).synchronize(self.device)
            return {"live": len(store.values), "templates": len(store.templates)}
        try:
            value = store.get(fetch.id)
        except Poisoned as error:
            if fetch.mode != "local" and not error.poison.interrupted:
                self._announcer.announce(store, error.poison)
            return {"poison": error.poison.as_dict()}
        is_asked = self.rank in fetch.ranks
        if fetch.mode == "item":
            if isinstance(value, DTensor):
                value = value.full_tensor()
            return {"value": self._dump(value.item())} if is_asked else {}
        if fetch.mode == "parts" and isinstance(value, DTensor):
            value = replicate_partials(value)
        value = wait_local_tensor(value)
        if not is_asked or (
            fetch.buffer is not None and shared_write.write_box(fetch.buffer, self.rank, value.detach())
        ):
            return {}
        return {"value": self._dump(value.detach().cpu())}

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
            if not torch.equal(tensor.device_mesh.mesh, mesh.mesh):
                raise TypeError(
                    f"{name} lies on {tensor.device_mesh}, not along the axes of this mesh; take {name}.full_tensor() "
                    f"or {name}.to_local() in a cell"
                )
            # A cell, or fully_shard() without a mesh, has made a DeviceMesh of its own with the same ranks.
            local, size, stride = tensor.to_local().detach(), tensor.shape, tensor.stride()
            tensor = DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=size, stride=stride)
        current_placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
        current = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), current_placements)
        if current != (shape, dtype, placements):
            raise TypeError(
                f"{name} has changed on rank {self.rank} since it was looked up: it was "
                f"{_describe_tensor(shape, dtype, placements)}, and is {_describe_tensor(*current)}; "
                f"look it up again, mesh[{name!r}]"
            )
        FOREIGN_MEMORY.add(tensor)
        detached: torch.Tensor = tensor.detach()
        return detached


def _describe_tensor(shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...] | None) -> str:
    placement_text = "each rank's own" if placements is None else f"placed ({', '.join(map(str, placements))})"
    return f"{shape} of {dtype}, {placement_text}"


def _collective_counts(mesh: DeviceMesh | None) -> list[int]:
    """Return how many collectives this rank has begun, by mesh axis."""
    if mesh is None:
        return []
    labels = [getattr(mesh.get_group(axis), "label", None) for axis in range(mesh.ndim)]
    return [0 if label is None else label.num_begun for label in labels]


def _hash_of(value: Any) -> str:
    """Return the hash of this rank's shard; empty if there is none."""
    tensor = value.old_value if isinstance(value, Poison) else value
    if tensor is None:
        return ""
    piece = wait_local_tensor(tensor).detach().contiguous().cpu()
    return hashlib.blake2b(piece.reshape(-1).view(torch.uint8).numpy().data, digest_size=16).hexdigest()
