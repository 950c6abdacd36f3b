"""How the objects that a cell reads are pickled for a process without other ranks, and rebuilt there.

Process groups, the namespace and functions of cells are named or taken apart. A DDP model is rebuilt with the buckets
that it has. Depends on the internals of DDP.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import TransferError
from meshbook.rank.healing.transfer import rebuild_dtensor
from meshbook.rank.process_groups import gradient_buckets
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.watched_group import WatchedGroup
from meshbook.rank.recording import sharded_models
from meshbook.rank.recording.names import global_names


class RecordedObjects:
    """Says how objects are pickled, for `PayloadPickler`, and notes what it comes across.

    Attributes:
        names: of the namespace that the functions read which were pickled.
        files: that the functions' code is from.
        gradients: pairs of a leaf tensor and its gradient. Pickled behind the values, it has those of all of them.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.names: dict[str, None] = {}
        self.files: dict[str, None] = {}
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._namespace = namespace
        self._sharded = sharded_models.ShardedModels(namespace)

    def key_of(self, thing: object) -> str | None:
        """Return the key of an object that the replay makes itself; None: it is pickled."""
        if isinstance(thing, WatchedGroup):
            return f"group:{thing.label.name}"
        return None

    def reduce(self, thing: Any) -> Any:
        """Return how an object is pickled; NotImplemented: as usual."""
        if isinstance(thing, torch.Tensor):
            return self._reduce_tensor(thing)
        if type(thing) is types.FunctionType and thing.__globals__ is self._namespace:
            self.names.update(dict.fromkeys(global_names(thing.__code__)))
            self.files[thing.__code__.co_filename] = None
            arguments = thing.__code__, _NamespaceOfCells(), thing.__name__, thing.__defaults__, thing.__closure__
            return _make_function, arguments, (vars(thing), _function_attributes(thing)), None, None, _set_attributes
        if isinstance(thing, DistributedDataParallel):
            state = {name: value for name, value in vars(thing).items() if name not in ("reducer", "logger")}
            buckets = gradient_buckets.current(thing)
            return _make_blank, (type(thing),), (state, buckets), None, None, _restore_ddp
        if isinstance(thing, DeviceMesh):
            return _make_blank, (type(thing),), thing.__getstate__(), None, None, _restore_mesh
        return self._sharded.reduce(thing)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_leaf and tensor.grad is not None:
            self.gradients.append((tensor, tensor.grad))
        if isinstance(tensor, DTensor):
            if (place := self._sharded.place_of(tensor)) is not None:
                return place
            flags = tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)
            layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
            return rebuild_dtensor, (tensor.to_local().detach(), *layout, *flags)
        return NotImplemented


class ReplayedObjects:
    """Returns what keys stand for in a process that replays. The namespace is that of its `__main__`."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups

    def __call__(self, key: str) -> Any:
        kind, _, name = key.partition(":")
        if kind == "group" and name in self._groups.names:
            return self._groups[name]
        raise TransferError(f"it uses {kind} {name}, which was not there when the cell began")


class _NamespaceOfCells:
    """Stands for the namespace of cells in a pickle: a dict would be copied."""

    def __reduce__(self) -> Any:
        return _namespace_of_replay, ()


def _namespace_of_replay() -> dict[str, Any]:
    import __main__

    return vars(__main__)


def _make_function(
    code: types.CodeType, namespace: dict[str, Any], name: str, defaults: Any, closure: Any
) -> types.FunctionType:
    return types.FunctionType(code, namespace, name, defaults, closure)


def _function_attributes(function: types.FunctionType) -> dict[str, Any]:
    names = ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__annotations__")
    return {name: getattr(function, name) for name in names}


def _set_attributes(function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    vars(function).update(state[0])
    for name, value in state[1].items():
        setattr(function, name, value)


def _make_blank(kind: Any) -> Any:
    return kind.__new__(kind)


def _restore_mesh(mesh: Any, state: dict[str, Any]) -> None:
    if not torch.cuda.is_available():  # tensors arrive on the CPU too
        state = {name: "cpu" if "device_type" in name and value == "cuda" else value for name, value in state.items()}
    if hasattr(mesh, "__setstate__"):
        mesh.__setstate__(state)
    else:
        vars(mesh).update(state)


def _restore_ddp(model: Any, state: tuple[dict[str, Any], gradient_buckets.Buckets | None]) -> None:
    attributes, buckets = state
    group = attributes["process_group"]
    attributes = {name: value for name, value in attributes.items() if name != "process_group"}
    model.__setstate__({**attributes, "broadcast_buffers": _syncs_buffers(attributes)})
    model.process_group = group
    if hasattr(model.reducer, "_remove_autograd_hooks"):  # else it has the world's group and its first buckets
        gradient_buckets.rebuild(model, buckets)


def _syncs_buffers(attributes: Mapping[str, Any]) -> bool:
    return bool(attributes.get("forward_sync_buffers", attributes.get("broadcast_buffers", True)))
