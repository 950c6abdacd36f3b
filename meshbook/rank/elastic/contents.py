"""The state under one name as a pickle and the memory of its tensors, and its way back into the object of that name.

A module, and an object with `load_state_dict`, keeps its identity: its state is loaded into it. So do tensors and
random generators. Any other value is replaced by an equal one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import UsageError, message_of
from meshbook.rank.process_groups import gradient_buckets
from meshbook.rank.state import pickles
from meshbook.rank.state.kinds import kind_of
from meshbook.rank.state.modules import (
    gradients_of,
    load_gradients,
    load_state,
    local_part,
    reshard,
    state_of,
    tensors_of,
)


@dataclass
class Part:
    """The state under one name.

    Attributes:
        pickled: everything but the contents of tensors.
        tensors: this rank's memory of each tensor, live: a step changes it.
    """

    pickled: bytes
    tensors: list[torch.Tensor]


def capture(value: Any, name: str, meshes: Mapping[DeviceMesh, Any]) -> Part:
    """Return the state of a value.

    Args:
        meshes: how a pickle names the DeviceMeshes that DTensors may have (`name_meshes`).

    Raises:
        UsageError: it cannot be copied; the message names it and says what to do.
    """
    try:
        return pickle_part(_state_under(value), meshes)
    except UsageError as error:
        raise UsageError(f"the state `{name}` cannot be copied: {error}") from None
    except Exception as error:  # what a user's state_dict() or __reduce__ raises
        text = f"{type(error).__name__}: {message_of(error)}"
        raise UsageError(f"the state `{name}` (a {type(value).__name__}) cannot be copied: {text}") from error


def restore(name: str, part: Part, namespace: MutableMapping[str, Any], meshes: Mapping[Any, DeviceMesh]) -> None:
    """Load the state of a part into the object of that name, or bind the name.

    Args:
        part: its tensors are copied from.
        meshes: the inverse of `name_meshes` on this rank.

    Raises:
        UsageError: the name has no object, or one that the state does not fit.
    """
    try:
        kind, state = unpickle_part(part, meshes)
        if kind == "value":
            namespace[name] = state
        elif kind == "tensor" and name not in namespace:
            namespace[name], gradients = state
            load_gradients(namespace[name], gradients)
        elif name not in namespace:
            what = {"module": "model", "generator": "generator"}.get(kind, "object")
            raise UsageError(f"this rank has no {what} of that name; build it in a %%mesh --setup cell, then heal")
        else:
            _load(kind, namespace[name], state)
    except Exception as error:
        text = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {message_of(error)}"
        raise UsageError(f"the state `{name}` could not be loaded from the snapshot: {text}") from error


def _state_under(value: Any) -> tuple[str, Any]:
    kind = kind_of(value)
    match kind:
        case "module":
            return kind, _module_state(value)
        case "tensor":
            return kind, (value, gradients_of(value))
        case "value":
            return kind, value
        case _:
            return kind, state_of(value)


def _load(kind: str, value: Any, state: Any) -> None:
    if kind == "module":
        _load_module(value, state)
    elif kind == "tensor":
        with torch.no_grad():
            own, sent = local_part(value), local_part(state[0])
            if own.shape != sent.shape:
                raise UsageError(f"it has shape {tuple(own.shape)} here, and {tuple(sent.shape)} in the snapshot")
            own.copy_(sent)
        load_gradients(value, state[1])
    else:
        load_state(value, state)


# ---- modules


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state of a module, and what DDP's sums depend on."""
    reshard(module)
    buckets = {name: gradient_buckets.read(model) for name, model in _ddp_models(module)}
    return {"state": state_of(module), "buckets": buckets}


def _load_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    reshard(module)
    load_state(module, state["state"])
    for name, model in _ddp_models(module):
        gradient_buckets.arrange(model, state["buckets"].get(name))


def _ddp_models(module: torch.nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    for name, inner in module.named_modules():
        if isinstance(inner, DistributedDataParallel):
            yield name, inner


# ---- DeviceMeshes, which a pickle names by where they are found


def name_meshes(namespace: Mapping[str, Any], names: Sequence[str], mesh: DeviceMesh) -> dict[DeviceMesh, Any]:
    """Return a key for each DeviceMesh that the state may refer to: it is found under the same key on other ranks.

    Args:
        mesh: of all ranks.
    """
    found: dict[DeviceMesh, Any] = {mesh: "mesh"}
    for dim_name in mesh.mesh_dim_names or ():
        found.setdefault(mesh[dim_name], ("mesh", dim_name))
    for name in names:
        for at, tensor in enumerate(_dtensors_of(namespace.get(name))):
            found.setdefault(tensor.device_mesh, (name, at))
    return found


def meshes_by_key(namespace: Mapping[str, Any], names: Sequence[str], mesh: DeviceMesh) -> dict[Any, DeviceMesh]:
    """Return every DeviceMesh by each key that another rank may have for it."""
    found: dict[Any, DeviceMesh] = {"mesh": mesh}
    for dim_name in mesh.mesh_dim_names or ():
        found["mesh", dim_name] = mesh[dim_name]
    for name in names:
        found |= {(name, at): tensor.device_mesh for at, tensor in enumerate(_dtensors_of(namespace.get(name)))}
    return found


def _dtensors_of(value: Any) -> Iterator[DTensor]:
    tensors: Any = ()
    if isinstance(value, torch.Tensor):
        tensors = [value]
    elif isinstance(value, torch.nn.Module):
        tensors = [tensor for _, _, tensor in tensors_of(value)]
    elif isinstance(value, torch.optim.Optimizer):
        tensors = [tensor for group in value.param_groups for tensor in group["params"]]
    return (tensor for tensor in tensors if isinstance(tensor, DTensor))


# ---- pickling


def pickle_part(value: Any, meshes: Mapping[DeviceMesh, Any]) -> Part:
    tensors: list[torch.Tensor] = []

    def key_of(tensor: torch.Tensor) -> Any:
        local = local_part(tensor)
        if local.layout is not torch.strided or local.is_meta or local.is_quantized:
            raise UsageError(f"it holds a {local.layout} tensor without dense memory")
        spec = None
        if isinstance(tensor, DTensor):
            key = meshes.get(tensor.device_mesh)
            if key is None:
                raise UsageError("it holds a DTensor on a DeviceMesh that no model or optimizer in `state` has")
            spec = key, tensor.placements, tensor.shape, tensor.stride()
        tensors.append(local)
        flags = tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)
        layout = tuple(local.shape), _dense_stride(local), local.dtype, local.device.type
        return len(tensors) - 1, layout, flags, spec

    pickled = pickles.dump(value, key_of, advice="give that a name and list it in `state` itself")
    return Part(pickled, tensors)


def unpickle_part(part: Part, meshes: Mapping[Any, DeviceMesh]) -> Any:
    """Return the value of a part, with tensors of its own."""

    def make(key: Any) -> torch.Tensor:
        at, (shape, stride, dtype, device), (needs_gradient, is_parameter), spec = key
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        tensor.copy_(part.tensors[at].view(dtype).view(shape))
        if spec is not None:
            mesh, placements, whole, whole_stride = spec
            if mesh not in meshes:
                raise UsageError("the DeviceMesh of a DTensor in it is not on this rank; build it in a --setup cell")
            tensor = DTensor.from_local(
                tensor, meshes[mesh], placements, run_check=False, shape=whole, stride=whole_stride
            )
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=needs_gradient)
        return tensor.requires_grad_(needs_gradient) if needs_gradient else tensor

    return pickles.load(part.pickled, make)


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy: the tensor's own if its memory has no holes, else those of a contiguous one."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tuple(torch.empty(tensor.shape, device="meta").stride())
    return tensor.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each place of a tensor's memory is one element of it, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
