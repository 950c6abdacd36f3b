"""The state of an object that has one as plain containers and tensors, and its way back into an object like it.

A module's state is its parameters and buffers, in place (a DDP or FSDP2 model keeps its memory, and what refers to it
stays right), the gradients that a step may add to, its modes, its attributes that are plain values (`dropout.p`), and
its extra state. Other objects have `state_dict` and `load_state_dict`, and generators their numbers. No process groups,
no files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.rank.previews.digests import PLAIN_TYPES

# What each module has.
_OWN_ATTRIBUTES = vars(torch.nn.Module()).keys() - {"training"}


def state_of(value: Any, *, with_shards: bool = True) -> Any:
    """Return the state of an object that keeps its identity, but for tensors. It has the object's memory, not copies.

    Args:
        with_shards: DTensors of a module are part of it.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    if not isinstance(value, torch.nn.Module):
        return value.state_dict()
    tensors = {
        f"{kind}:{name}": local_part(tensor)
        for kind, name, tensor in tensors_of(value)
        if with_shards or not isinstance(tensor, DTensor)
    }
    return {
        "tensors": tensors,
        "gradients": gradients_of(value, with_shards=with_shards),
        "attributes": attributes_of(value),
        "extra": extra_states_of(value),
    }


def gradients_of(value: Any, *, with_shards: bool = True) -> dict[str, Any]:
    """Return the gradients of a module's parameters by name, of a tensor by ""; those that it has.

    A gradient is the memory of this rank's part, and the placements.
    """
    found = {}
    for name, leaf in _leaves_of(value, with_shards=with_shards):
        gradient: Any = leaf.grad
        if gradient is not None:
            found[name] = local_part(gradient), gradient.placements if isinstance(gradient, DTensor) else None
    return found


def load_gradients(value: Any, gradients: dict[str, Any], *, with_shards: bool = True) -> None:
    """Give a module or tensor the gradients that `gradients_of` has returned for one like it, and no others."""
    for name, leaf in _leaves_of(value, with_shards=with_shards):
        own, sent = gradients_of(leaf).get(""), gradients.get(name)
        if own is None or sent is None:
            leaf.grad = None if sent is None else _as_gradient(leaf, *sent)
        elif own[1] == sent[1] and own[0].shape == sent[0].shape and own[0].dtype == sent[0].dtype:
            own[0].copy_(sent[0])  # in place: it may be a view of DDP's bucket
        else:
            leaf.grad = _as_gradient(leaf, *sent)


def _leaves_of(value: Any, *, with_shards: bool) -> Iterator[tuple[str, torch.Tensor]]:
    found = value.named_parameters() if isinstance(value, torch.nn.Module) else [("", value)]
    for name, leaf in found:
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf and (with_shards or not isinstance(leaf, DTensor)):
            yield name, leaf


def _as_gradient(tensor: torch.Tensor, local: torch.Tensor, placements: Any) -> torch.Tensor:
    local = local.detach().to(local_part(tensor).device, copy=True)
    if not isinstance(tensor, DTensor):
        return local
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


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
    if isinstance(value, torch.Generator):
        value.set_state(state)
        return
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
    load_gradients(value, state["gradients"], with_shards=with_shards)
    attributes = state["attributes"]
    if not with_attributes:
        attributes = {name: {"training": found["training"]} for name, found in attributes.items()}
    load_attributes(value, attributes, state["extra"])


def reshard(module: torch.nn.Module) -> None:
    """Free whole parameters that FSDP2 has gathered: they are gathered again from the shards, which are state."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # imported only if a user's code uses it
    for inner in module.modules() if fsdp is not None else ():
        if isinstance(inner, fsdp.FSDPModule):
            inner.reshard()


def load_attributes(module: torch.nn.Module, attributes: dict[str, dict[str, Any]], extra: dict[str, Any]) -> None:
    """Give a module the attributes and the extra states of another of the same structure."""
    for name, inner in module.named_modules():
        vars(inner).update(attributes.get(name, {}))
        if name in extra:
            inner.set_extra_state(extra[name])
