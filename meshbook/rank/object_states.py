"""The state of a user's object as plain containers and tensors, and its way back into an object like it.

A module's state is its parameters and buffers, in place (a DDP or FSDP2 model keeps its memory, and what refers to it
stays right), its modes, its attributes that are plain values (`dropout.p`), and its extra state. Other objects have
`state_dict` and `load_state_dict`. No process groups, no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.rank.previews.digests import PLAIN_TYPES

# What each module has.
_OWN_ATTRIBUTES = vars(torch.nn.Module()).keys() - {"training"}


def state_of(value: Any, *, with_shards: bool = True) -> Any:
    """Return the state of a module, or of an object with `state_dict`. The tensors are its own memory, not copies.

    Args:
        with_shards: DTensors of a module are part of it.
    """
    if not isinstance(value, torch.nn.Module):
        return value.state_dict()
    tensors = {
        f"{kind}:{name}": local_part(tensor)
        for kind, name, tensor in tensors_of(value)
        if with_shards or not isinstance(tensor, DTensor)
    }
    return {"tensors": tensors, "attributes": attributes_of(value), "extra": extra_states_of(value)}


def attributes_of(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return by module the attributes that are plain values. Those of torch's wrappers are not the user's."""
    return {
        name: {
            key: value
            for key, value in vars(inner).items()
            if type(value) in PLAIN_TYPES
            and key not in _OWN_ATTRIBUTES
            and (key == "training" or not _is_wrapper(inner))
        }
        for name, inner in module.named_modules()
    }


def _is_wrapper(module: torch.nn.Module) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def extra_states_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return by module what its `get_extra_state` returns, of those that have one."""
    return {
        name: inner.get_extra_state()
        for name, inner in module.named_modules()
        if type(inner).get_extra_state is not torch.nn.Module.get_extra_state
    }


def tensors_of(module: torch.nn.Module) -> Iterable[tuple[str, str, torch.Tensor]]:
    """Yield kind ("parameter" or "buffer"), name and tensor, each tensor once."""
    for name, parameter in module.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers():
        yield "buffer", name, buffer


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank's part of a tensor."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def load_state(value: Any, state: Any, *, with_shards: bool = True, with_attributes: bool = True) -> None:
    """Load a state, which `state_of` has returned for the same `with_shards`.

    Args:
        with_attributes: those of a module too; its modes (`training`) are loaded in any case.

    Raises ValueError, before anything is changed, if a module has another structure.
    """
    if not isinstance(value, torch.nn.Module):
        value.load_state_dict(state)
        return
    own = {
        f"{kind}:{name}": local_part(tensor)
        for kind, name, tensor in tensors_of(value)
        if with_shards or not isinstance(tensor, DTensor)
    }
    sent = state["tensors"]
    if different := sorted(own.keys() ^ sent.keys()) or [
        name for name, tensor in own.items() if tensor.shape != sent[name].shape or tensor.dtype != sent[name].dtype
    ]:
        shown = ", ".join(name.partition(":")[2] for name in different[:4])
        raise ValueError(f"the model here has another structure: {shown}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(sent[name])
    attributes = state["attributes"]
    if not with_attributes:
        attributes = {name: {"training": found["training"]} for name, found in attributes.items()}
    load_attributes(value, attributes, state["extra"])


def load_attributes(module: torch.nn.Module, attributes: dict[str, dict[str, Any]], extra: dict[str, Any]) -> None:
    """Give a module the attributes and the extra states of another of the same structure."""
    for name, inner in module.named_modules():
        vars(inner).update(attributes.get(name, {}))
        if name in extra:
            inner.set_extra_state(extra[name])
