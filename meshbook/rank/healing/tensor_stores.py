"""Gives new ranks the remote tensors that others have the same part of, and makes equal what a loss left unequal.

All ranks take part. A new rank compiles the templates of each engine, builds the modules that live on the ranks, and
gets each tensor from a rank that holds the same part of it. In place of what nobody else has it gets a `Poison` beside
memory of the right shape, so that a checkpoint can be loaded into it. Tensors on one storage are on one storage again.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshbook.errors import message_of
from meshbook.rank.healing import transfer
from meshbook.rank.healing.tensor_choice import StoreHeld, TensorChoice, TensorHeld, choose_tensors, rank_by_damage
from meshbook.rank.objects import RankObjects
from meshbook.rank.process_groups.groups import ProcessGroups
from meshbook.rank.tensors import building
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.resident_module import RESIDENT_MODULES, rebuild_resident
from meshbook.rank.tensors.tensor_store import FOREIGN_MEMORY, Poison, TensorStore, local_tensor, storage_id
from meshbook.rank.value_store import ValueStore
from meshbook.wire import pickling
from meshbook.wire.messages import InlineBuffer, Payload

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, StoreHeld])


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def rebuild_modules(
    topic: str,
    rank: int,
    new_ranks: Sequence[int],
    values: ValueStore,
    groups: ProcessGroups,
    without_others: Callable[[], AbstractContextManager[None]],
) -> dict[str, str]:
    """Build the modules that live on the other ranks. Blocks until all ranks have called this.

    Values of their parameters come with the tensors. Call it before any collective of this generation.

    Args:
        without_others: context in which collectives return at once.

    Returns:
        on a new rank, why modules could not be built, by key.
    """
    refs = {id(value): ref for ref, value in values.items()}
    own: list[tuple[str, str, bytes]] = []
    if rank not in new_ranks:
        for key, resident in sorted(RESIDENT_MODULES.items()):
            if id(resident) in refs:
                payload = pickling.dump(resident.recipe, pool=None)
                own.append((key, refs[id(resident)], pickle.dumps(payload)))
    sender = min((other for other in range(torch.distributed.get_world_size()) if other not in new_ranks), default=-1)
    every = groups.exchange(f"{topic}/modules", pickle.dumps(own) if rank == sender else b"")
    if rank not in new_ranks or sender < 0:
        return {}
    failed: dict[str, str] = {}
    recipes: list[tuple[str, str, bytes]] = pickle.loads(every[sender])
    if recipes:
        with without_others():
            for key, ref, body in recipes:
                try:
                    recipe = pickling.load(pickle.loads(body))
                    values.store(ref, rebuild_resident(key, recipe, groups.mesh))
                except Exception as error:  # a factory, which is the user's, may raise anything
                    failed[key] = f"{type(error).__name__}: {message_of(error)}"
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# Descriptions


def _describe(store: TensorStore) -> StoreHeld:
    for id, value in store.values.items():
        try:
            wait_local_tensor(value.old_value if isinstance(value, Poison) else value)
        except Exception as error:  # the loss broke the collective that was computing it
            store.values[id] = Poison.of_error(store.op_number, error, secondary=True)
    held = {id: _describe_value(value) for id, value in store.values.items()}
    return StoreHeld(held, store.num_batches, store.num_heals, tuple(store.step_tracker.completed))


def _describe_value(value: Any) -> TensorHeld:
    poison = value if isinstance(value, Poison) else None
    tensor = value if poison is None else poison.old_value
    if tensor is None:
        assert poison is not None
        return TensorHeld("lost", is_transient=poison.is_transient, is_view=poison.base is not None)
    if hasattr(tensor, "_meshbook_resident"):
        return TensorHeld("module")
    known: dict[str, Any] = {"memory": storage_id(tensor) or 0, "text": _describe_shape(tensor)}
    if poison is not None:
        known |= {"skipped": poison.num_skipped, "is_begun": poison.write_started, "is_transient": poison.is_transient}
    if not isinstance(tensor, DTensor):
        is_graph = tensor.dim() == 1 and not tensor.numel()
        return TensorHeld("graph" if is_graph else "own", **known)
    if tensor in FOREIGN_MEMORY:
        return TensorHeld("foreign", **known)
    if not _can_be_sent(wait_local_tensor(tensor)):
        return TensorHeld("odd", **known)
    cut = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return TensorHeld("tensor", cut, **known)


def _describe_shape(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return f"{tuple(tensor.shape)}, each rank's own"
    names = tensor.device_mesh.mesh_dim_names or ()
    placed = [f"{placement} over {name}" for name, placement in zip(names, tensor.placements, strict=True)
              if not placement.is_replicate()]  # fmt: skip
    return f"{tuple(tensor.shape)}, {', '.join(placed) or 'replicated'}"


def _can_be_sent(local: torch.Tensor) -> bool:
    return (
        type(local) in (torch.Tensor, torch.nn.Parameter)
        and local.layout is torch.strided
        and not (local.is_quantized or local.is_meta or local.is_conj() or local.is_neg())
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sharing


@dataclass
class SharedTensors:
    """What came of it on a new rank: how many tensors, by the axes that cut them and the rank, or by the reason."""

    restored: Counter[tuple[str, int]] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)


def share_tensors(
    topic: str,
    rank: int,
    new_ranks: Sequence[int],
    objects: RankObjects,
    groups: ProcessGroups,
    axes: Mapping[str, int],
) -> SharedTensors:
    """Take part in the sharing of all engines' tensors. Blocks until this rank has sent and received everything.

    Args:
        axes: of the whole mesh, outermost first.
    """
    own: dict[str, StoreHeld] = {}
    if objects.has_tensors and rank not in new_ranks:
        own = {name: _describe(store) for name, store in objects.tensors.stores.items()}
    every = [_decoder.decode(text) for text in groups.exchange(f"{topic}/tensors", _encoder.encode(own))]
    shared = SharedTensors()
    for name in sorted({name for stores in every for name in stores}):
        stores = {other: holds[name] for other, holds in enumerate(every) if name in holds}
        points = _points_of(name, next(iter(stores)), axes)
        if not any(new in points for new in new_ranks):
            continue  # all its ranks have lived on
        choices = choose_tensors(stores, points, new_ranks)
        if rank in points:
            store = objects.tensors.store_of(name)
            _exchange_tensors(store, rank, new_ranks, stores, choices, shared)
            _finish(store, 1 + max(held.num_heals for held in stores.values()), stores[rank_by_damage(stores)[0]])
    return shared


def _points_of(engine: str, member: int, axes: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    """Return the ranks of an engine, of which one is given, and the place of each along the dims of its mesh."""
    names = [name for name in engine.split("|")[1].split(",") if name]
    every = list(itertools.product(*map(range, axes.values())))
    others = [dim for dim, name in enumerate(axes) if name not in names]
    return {
        rank: tuple(point[dim] for dim, name in enumerate(axes) if name in names)
        for rank, point in enumerate(every)
        if all(point[dim] == every[member][dim] for dim in others)
    }


def _exchange_tensors(
    store: TensorStore,
    rank: int,
    new_ranks: Sequence[int],
    stores: Mapping[int, StoreHeld],
    choices: Mapping[int, Mapping[int, TensorChoice]],
    shared: SharedTensors,
) -> None:
    """Send and receive what ranks take from each other, in one order on all ranks."""
    main = rank_by_damage(stores)[0]
    for taker in sorted(choices):
        sources = {choice.source for choice in choices[taker].values()} | ({main} if taker in new_ranks else set())
        for source in sorted(sources, key=lambda other: (other != main, other)):
            chosen = {id: choice for id, choice in choices[taker].items() if choice.source == source}
            if rank == source:
                bundle = _Bundle(store)
                entries = [bundle.entry(id, choice) for id, choice in chosen.items()]
                head = _Head(list(store.template_bodies.values()), store.num_batches)
                pickled = pickle.dumps((entries, bundle.storages, head if source == main else None))
                transfer.send(Payload(pickled, tuple(map(InlineBuffer, bundle.contents))), {}, taker)
            elif rank == taker:
                payload, _ = transfer.receive(source)
                entries, storages, head = pickle.loads(payload.pickled)
                contents = [buffer.data for buffer in payload.buffers if isinstance(buffer, InlineBuffer)]
                if taker in new_ranks:
                    if head is not None:
                        head.apply(store)
                    _Receiver(store, rank, storages, contents).take(entries)
                    _count(stores[source].held, chosen, store, shared)
                else:
                    _Receiver(store, rank, [(size, None) for size, _ in storages], contents).replace(entries)


@dataclass
class _Head:
    """What a store has beside its tensors."""

    templates: list[bytes]
    num_batches: int

    def apply(self, store: TensorStore) -> None:
        for body in self.templates:
            store.add_template(body)
        store.num_batches = self.num_batches


@dataclass
class _Entry:
    """One tensor on its way.

    Attributes:
        kind: that of `TensorHeld`; "missing" is sent without contents.
        poison: without its old value.
        storage: index among those of the bundle; None: no contents.
        layout: size, stride, offset and dtype of the local tensor.
        dtensor: placements, global shape and stride.
        key: of the module that it keeps, or that it is a parameter of, with its index there.
    """

    id: int
    kind: str
    poison: Poison | None = None
    storage: int | None = None
    layout: tuple[Any, ...] = ()
    dtensor: tuple[Any, ...] | None = None
    key: tuple[str, int] | None = None
    text: str = ""


class _Bundle:
    """Tensors of one rank for another: each storage once."""

    def __init__(self, store: TensorStore) -> None:
        self.storages: list[tuple[int, tuple[str, int] | None]] = []  # bytes; of a module: its key, and an index there
        self.contents: list[bytes] = []
        self._store = store
        self._indices: dict[int, int] = {}
        self._of_modules: dict[int, tuple[str, int]] = {}
        for key, resident in RESIDENT_MODULES.items():
            for index, tensor in enumerate(resident.tensors):
                self._of_modules[storage_id(tensor) or 0] = key, index

    def entry(self, id: int, choice: TensorChoice) -> _Entry:
        value = self._store.values[id]
        poison = value if isinstance(value, Poison) else None
        tensor = value if poison is None else poison.old_value
        held = _describe_value(value)
        if tensor is None or held.kind == "module":
            resident = getattr(tensor, "_meshbook_resident", None)
            return _Entry(id, held.kind, poison, key=None if resident is None else (resident.key, 0))
        local = wait_local_tensor(tensor)
        found = _Entry(id, "missing" if choice.missing else held.kind, text=held.text)
        if isinstance(tensor, DTensor):
            found.dtensor = tensor.placements, tuple(tensor.shape), tuple(tensor.stride())
        if held.kind == "odd":
            return found
        found.layout = tuple(local.shape), local.stride(), local.storage_offset(), local.dtype
        found.key = self._of_modules.get(held.memory)
        if found.kind == "tensor":
            found.poison = None if poison is None else replace(poison, old_value=None)
            found.storage = self._add_storage(local, held.memory)
        return found

    def _add_storage(self, local: torch.Tensor, memory: int) -> int:
        if memory not in self._indices:
            self._indices[memory] = len(self.storages)
            storage = local.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            self.storages.append((storage.nbytes(), self._of_modules.get(memory)))
            self.contents.append(flat.cpu().numpy().tobytes())
        return self._indices[memory]


class _Receiver:
    """Puts what another rank has sent into a store of this one."""

    def __init__(
        self, store: TensorStore, rank: int, storages: Sequence[tuple[int, Any]], contents: Sequence[bytes]
    ) -> None:
        self._store, self._rank = store, rank
        self._storages = [self._storage(key, data) for (_, key), data in zip(storages, contents, strict=True)]

    def _storage(self, key: tuple[str, int] | None, data: bytes) -> Any:
        """Return memory with these contents: that of a module's tensor, or new. None: the module has other memory."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if key is None:
            return content.to(self._store.device).untyped_storage()
        local = _tensor_of_module(key)
        if local is None or local.untyped_storage().nbytes() != len(data):
            return None
        storage = local.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
        flat.copy_(content)
        return storage

    def take(self, entries: Sequence[_Entry]) -> None:
        """Store all of them, on a new rank."""
        for entry in entries:
            value: Any
            if entry.kind == "tensor":
                value = self._rebuild(entry)
                if value is None:
                    value = self._missing(entry)
                elif entry.poison is not None:
                    value = replace(entry.poison, old_value=value)
            elif entry.kind == "lost":
                value = entry.poison
            elif entry.kind == "module":
                value = torch.empty(0, device=self._store.device)
                value._meshbook_resident = RESIDENT_MODULES.get(entry.key[0]) if entry.key is not None else None
            elif entry.kind == "graph":
                value = replace(Poison.of_missing(self._rank, None), num_skipped=0, write_started=False)
                self._store.missing[entry.id] = "the graph of a module's forward: run the forward again"
            else:
                value = self._missing(entry)
            self._store.values[entry.id] = value

    def replace(self, entries: Sequence[_Entry]) -> None:
        """Make what this rank has equal to what was sent, in its own memory, on a rank that was there before."""
        for entry in entries:
            value = self._rebuild(entry)
            old = self._store.values[entry.id]
            own = old.old_value if isinstance(old, Poison) else old
            if own is not None:
                local_tensor(own).copy_(local_tensor(value))
                value = own
            self._store.values[entry.id] = value if entry.poison is None else replace(entry.poison, old_value=value)

    def _rebuild(self, entry: _Entry) -> Any:
        assert entry.storage is not None
        assert entry.dtensor is not None
        storage = self._storages[entry.storage]
        if storage is None:
            return None
        size, stride, offset, dtype = entry.layout
        empty = torch.empty(0, dtype=dtype, device=self._store.device)
        return self._wrap(empty.set_(storage, offset, size, stride), entry)

    def _wrap(self, local: torch.Tensor, entry: _Entry) -> Any:
        assert entry.dtensor is not None
        placements, shape, stride = entry.dtensor
        assert self._store.mesh is not None
        return DTensor.from_local(local, self._store.mesh, placements, run_check=False, shape=shape, stride=stride)

    def _missing(self, entry: _Entry) -> Poison:
        self._store.missing[entry.id] = entry.text
        if not entry.layout:
            return Poison.of_missing(self._rank, None)
        size, _, _, dtype = entry.layout
        local = None
        if entry.dtensor is not None:
            placements, shape, _ = entry.dtensor
            assert self._store.mesh is not None
            size, _ = compute_local_shape_and_global_offset(shape, self._store.mesh, placements)
            of_module = None if entry.key is None else _tensor_of_module(entry.key)
            if of_module is not None and tuple(of_module.shape) == tuple(size) and of_module.dtype == dtype:
                local = of_module
        if local is None:
            local = torch.empty(size, dtype=dtype, device=self._store.device)
        local.fill_(math.nan if dtype.is_floating_point or dtype.is_complex else 0)
        return Poison.of_missing(self._rank, local if entry.dtensor is None else self._wrap(local, entry))


def _tensor_of_module(key: tuple[str, int]) -> torch.Tensor | None:
    resident = RESIDENT_MODULES.get(key[0])
    if resident is None:
        return None
    assert resident.mesh is not None
    return wait_local_tensor(building.as_dtensor(resident.tensors[key[1]], resident.mesh))


def _count(
    held: Mapping[int, TensorHeld], chosen: Mapping[int, TensorChoice], store: TensorStore, shared: SharedTensors
) -> None:
    names = (store.mesh.mesh_dim_names if store.mesh is not None else None) or ()
    for id, choice in chosen.items():
        if held[id].kind in ("graph", "module", "lost"):
            continue
        axes = ", ".join(names[dim] for dim in held[id].cut)
        if id not in store.missing:
            shared.restored[axes, choice.source] += 1
        elif held[id].kind == "tensor" and choice.missing:
            shared.missing[f"cut over {axes}; {choice.missing}"] += 1
        else:
            shared.missing[choice.missing or "its module could not be built"] += 1


def _finish(store: TensorStore, num_heals: int, main: StoreHeld) -> None:
    """Have batches refused whose controller does not know yet what has been replaced, and forget how they ended.

    Args:
        main: of the rank from which replicas were taken: all have taken the steps that it has.
    """
    store.num_heals = num_heals
    store.step_tracker.completed.clear()
    store.step_tracker.completed.extend(main.completed)
    store.may_have_poison, store.is_batch_expected, store.step_refusal = True, False, None
    if store.pending_error is not None and store.pending_error.is_transient:
        store.pending_error = None
    for id, value in store.values.items():
        if isinstance(value, Poison) and value.interrupted:
            store.values[id] = value.after_loss()
