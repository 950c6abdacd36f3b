"""Carries values from one rank to another that has some of the objects they refer to already.

What a new rank has (functions and classes of replayed cells, models that setup cells have built, process groups) is
named in the pickle and not copied, so that an optimizer refers to the new rank's own parameters. Bytes go over the
world group, from rank to rank.
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshbook.errors import TransferError
from meshbook.rank.healing.filling import is_fillable
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.memory_transfer import receive_memory, send_memory
from meshbook.rank.process_groups.resized_world import axes_of
from meshbook.rank.process_groups.watched_group import WatchedGroup
from meshbook.rank.state.kinds import has_identity, is_loadable
from meshbook.wire import pickling
from meshbook.wire.messages import InlineBuffer, Payload
from meshbook.wire.pickler import NotSendable


class _Namespace:
    """Stands for the namespace of cells in a pickle: a dict would be copied."""


_NAMESPACE = _Namespace()


class References:
    """The objects of this rank that another one has too, and how a pickle names them.

    A model, optimizer, tensor or generator of another name that the other rank does not have, and is not sent, is an
    error in a pickle: with a copy of its own, an optimizer would train parameters that no model has.

    Args:
        namespace: of the cells.
        shared: names under which the other rank has an object of its own.
        mesh: the DeviceMesh of all ranks.
        with_shards: DTensors have contents, which are sent.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        shared: Collection[str],
        mesh: DeviceMesh | None,
        *,
        with_shards: bool = True,
    ) -> None:
        self._with_shards = with_shards
        self._namespace, self._mesh, self._shared = namespace, mesh, frozenset(shared)
        self._absent: dict[int, str] = {}
        self._keys: dict[int, str] = {id(_NAMESPACE): "namespace:"}
        if mesh is not None:
            self._keys[id(mesh)] = "name:mesh"
        for name in shared:
            value = namespace.get(name)
            if isinstance(value, torch.nn.Module):
                for kind, fqn, part in _parts_of(value):
                    self._keys.setdefault(id(part), f"{kind}:{name}:{fqn}")
            elif isinstance(value, (types.FunctionType, type, DeviceMesh)) or is_loadable(value) or is_fillable(value):
                self._keys.setdefault(id(value), f"name:{name}")

    def set_bundle(self, bundle: Mapping[str, Any]) -> None:
        """Take these values for what is sent together."""
        self._absent = {}
        for name, value in self._namespace.items():
            if name[:1] != "_" and name not in self._shared and name not in bundle and has_identity(value):
                self._absent[id(value)] = name
                self._absent |= {id(part): name for _, _, part in _parts_of(value)}
        for value in bundle.values():
            self._absent.pop(id(value), None)
            for _, _, part in _parts_of(value):
                self._absent.pop(id(part), None)

    def key_of(self, thing: object) -> str | None:
        if isinstance(thing, WatchedGroup):
            return f"group:{thing.label.name}"
        key = self._keys.get(id(thing))
        if key is None and (name := self._absent.get(id(thing))) is not None:
            raise NotSendable(f"it uses `{name}`, which the new rank does not have")
        return key

    def reduce(self, thing: Any) -> Any:
        """Return how an object is pickled; NotImplemented: as usual."""
        if isinstance(thing, DTensor):
            flags = thing.requires_grad, isinstance(thing, torch.nn.Parameter)
            layout = thing.device_mesh, thing.placements, thing.shape, thing.stride()
            if not self._with_shards:
                return _make_empty_dtensor, (thing.dtype, thing.device.type, *layout, *flags)
            return rebuild_dtensor, (thing.to_local(), *layout, *flags)
        if isinstance(thing, DeviceMesh):
            axes = axes_of(thing, self._mesh) if self._mesh is not None else None
            if axes is None:
                raise NotSendable("a DeviceMesh of your own: make it in a %%mesh --setup cell")
            if axes == ("",):
                return _mesh_of_all_ranks, (thing.device_type, thing.mesh_dim_names)
            return _part_of_mesh, (self._mesh, axes)
        if type(thing) is types.FunctionType and thing.__globals__ is self._namespace:
            arguments = thing.__code__, _NAMESPACE, thing.__name__, thing.__defaults__, thing.__closure__
            return types.FunctionType, arguments, {**vars(thing), "__kwdefaults__": thing.__kwdefaults__}
        return NotImplemented


def _parts_of(value: object) -> Iterator[tuple[str, str, object]]:
    """Yield ("tensor" or "module", its name, itself) for what a module consists of."""
    if isinstance(value, torch.nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield "tensor", name, tensor
        for name, module in value.named_modules():
            yield "module", name, module


def rebuild_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any, grad: bool, is_parameter: bool
) -> torch.Tensor:
    """Return the DTensor of which this rank has the part `local`."""
    tensor = DTensor.from_local(local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)
    return torch.nn.Parameter(tensor, requires_grad=grad) if is_parameter else tensor.requires_grad_(grad)


def _make_empty_dtensor(
    dtype: torch.dtype,
    device: str,
    mesh: DeviceMesh,
    placements: Any,
    shape: Any,
    stride: Any,
    grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Return a DTensor whose part on this rank has yet to come."""
    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    memory = torch.empty([local_shape[dim] for dim in order], dtype=dtype, device=device)
    local = memory.permute([order.index(dim) for dim in range(len(shape))])
    return rebuild_dtensor(local, mesh, placements, shape, stride, grad, is_parameter)


def _mesh_of_all_ranks(device_type: str, names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(device_type, list(range(dist.get_world_size())), mesh_dim_names=names)


def _part_of_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names]


class Resolver:
    """The objects that keys of `References` stand for on this rank."""

    def __init__(self, namespace: MutableMapping[str, Any], groups: GroupTable) -> None:
        self._namespace, self._groups = namespace, groups

    def __call__(self, key: str) -> Any:
        kind, _, rest = key.partition(":")
        if kind == "namespace":
            return self._namespace
        if kind == "group":
            if rest not in self._groups.names:
                raise TransferError(f"it uses the process group {rest}, which this rank does not have")
            return self._groups[rest]
        name, _, fqn = rest.partition(":")
        if name not in self._namespace:
            raise TransferError(f"it uses `{name}`, which this rank does not have")
        value = self._namespace[name]
        if kind == "module":
            return value.get_submodule(fqn)
        if kind == "tensor":
            path, _, attribute = fqn.rpartition(".")
            return getattr(value.get_submodule(path), attribute)
        return value


def pickle_bundle(bundle: dict[str, Any], references: References) -> tuple[Payload, dict[str, str]]:
    """Pickle values together, so that what they share is shared on the other side.

    Returns:
        the payload, and by name why values that cannot be pickled are not in it; they are taken out of the bundle.
    """
    dropped: dict[str, str] = {}
    while True:
        references.set_bundle(bundle)
        try:
            return _pickle(bundle, references), dropped
        except TransferError:
            found: dict[str, str] = {}
            for name, value in bundle.items():
                try:
                    _pickle(value, references)
                except TransferError as error:
                    why = error.__cause__
                    found[name] = str(why if isinstance(why, NotSendable) else error)
            if not found:
                raise
            for name in found:
                del bundle[name]
            dropped |= found


def _pickle(value: Any, references: References) -> Payload:
    return pickling.dump(value, pool=None, persistent=references.key_of, reduce=references.reduce)


def send(payload: Payload, extra: dict[str, Any], to: int) -> None:
    """Send a payload and a JSON object to a rank. Blocks until they are received."""
    parts = [payload.pickled]
    for buffer in payload.buffers:
        assert isinstance(buffer, InlineBuffer)  # it was pickled without shared memory
        parts.append(buffer.data)
    header = json.dumps({"sizes": [len(part) for part in parts], "extra": extra}).encode()
    dist.send(torch.tensor([len(header)]), to)
    for part in (header, *parts):
        if part:  # torch has no tensor on an empty buffer
            send_memory(torch.frombuffer(bytearray(part), dtype=torch.uint8), to)


def receive(source: int) -> tuple[Payload, dict[str, Any]]:
    """Receive what `send` sends. Blocks."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    header = json.loads(_receive_bytes(int(length), source))
    pickled, *buffers = (_receive_bytes(size, source) for size in header["sizes"])
    return Payload(pickled, tuple(map(InlineBuffer, buffers))), header["extra"]


def _receive_bytes(size: int, source: int) -> bytes:
    found = torch.empty(size, dtype=torch.uint8)
    receive_memory(found, source)
    return found.numpy().tobytes()
