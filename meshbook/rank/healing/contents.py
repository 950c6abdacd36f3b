"""What this rank holds under the user's names, described so that ranks can compare it without sending it."""

from __future__ import annotations

import secrets
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshbook.rank.healing.choice import Held
from meshbook.rank.healing.replicas import Replicas, parameters_of
from meshbook.rank.previews.digests import PLAIN_TYPES
from meshbook.rank.process_groups.watched_group import WatchedGroup
from meshbook.rank.state.digests import DEFINITIONS, LOOKED_AT_FIRST, TELLING_BYTES, Digester, NotComparable, digest_of
from meshbook.rank.state.kinds import has_state_dict
from meshbook.rank.state.modules import (
    attributes_of,
    extra_states_of,
    gradients_of,
    local_part,
)


def describe_names(namespace: Mapping[str, Any], names: Iterable[str], *, with_shards: bool = True) -> dict[str, Held]:
    """Return what is held under each of these names. Reads all of it: about 0.3 s per GB on a CPU.

    Args:
        with_shards: read the contents of DTensors.
    """
    replicas = Replicas(namespace.values())
    return {name: describe(namespace[name], replicas, with_shards=with_shards) for name in names if name in namespace}


def describe(value: Any, replicas: Replicas | None = None, *, with_shards: bool = True) -> Held:
    """Return what a name holds.

    Args:
        replicas: what is known of models.
    """
    held = _describe(value, with_shards=with_shards)
    if held.digest is None:
        return held
    try:
        is_telling = held.is_telling or _are_telling(parameters_of(value))
        return structs.replace(held, replicas=(replicas or Replicas()).of(value), is_telling=is_telling)
    except Exception:  # a user's parameters() may raise anything, too
        return held


def _describe(value: Any, *, with_shards: bool) -> Held:
    kind, name = type(value), name_of_class(value)
    if isinstance(value, WatchedGroup):
        return Held("group", "process group", groups=((value.label.name, value.label.ranks),))
    if isinstance(value, DeviceMesh):
        return _describe_mesh(value)
    if kind is int and value == dist.GroupMember.NON_GROUP_MEMBER:
        return Held("non-member", name)
    if _is_sampler_of_rank(value):
        return Held("opaque", name)  # that of another rank would deal that one's rows
    if isinstance(value, DEFINITIONS):
        return _describe_definition(value, name)
    try:
        if isinstance(value, torch.nn.Module):
            own = [(key, parameter) for key, parameter in value.named_parameters()]
            held = _describe_contents(
                "state", name, [own, value.training], with_shards=with_shards, may_have_plain=True
            )
            attributes = digest_of(attributes_of(value))
            rest = _digests_of_rest(value, with_shards=with_shards)
            return structs.replace(held, rest_digests=rest, attributes_digest=attributes)
        if has_state_dict(value):
            is_optimizer = isinstance(value, torch.optim.Optimizer)
            contents = value.state_dict()
            return _describe_contents("state", name, contents, with_shards=with_shards, may_have_plain=is_optimizer)
        contents = value
        if isinstance(value, torch.Tensor) and (gradients := _gradients_of(value, with_shards=with_shards)):
            contents = [value, gradients]
        return _describe_contents("plain" if kind in PLAIN_TYPES else "value", name, contents, with_shards=with_shards)
    except NotComparable as error:
        opaque = isinstance(value, (types.GeneratorType, types.CoroutineType)) or hasattr(value, "fileno")
        return Held("opaque" if opaque else "value", str(error) or name)
    except Exception:  # a user's state_dict() may raise anything
        return Held("value", name)


def _describe_contents(kind: str, name: str, contents: Any, *, with_shards: bool, may_have_plain: bool = False) -> Held:
    """Describe contents.

    Args:
        may_have_plain: numbers and words in it are of models and optimizers, and no flags of the user's.
    """
    digester = Digester(with_shards=with_shards)
    digester.add(contents, 0)
    is_telling = digester.num_telling >= TELLING_BYTES and (may_have_plain or not digester.num_plain)
    return Held(kind, name, digester.hash.hexdigest(), is_sharded=digester.is_sharded, is_telling=is_telling)


def _describe_definition(value: Any, name: str) -> Held:
    """Return what a module, function or class is. Code that is alike is the same; what a function holds may be not."""
    digester = Digester()
    try:
        digester.add(value, 0)
    except Exception:
        return Held("definition", name)
    return Held("definition", name, digester.hash.hexdigest(), is_telling=not digester.num_plain)


def name_of_class(value: Any) -> str:
    """Return the class of a value; of a DDP model with what it was made with, on which its collectives depend."""
    options = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view", "bucket_bytes_cap")
    is_ddp = isinstance(value, DistributedDataParallel)
    return type(value).__name__ + "".join(f" {name}={getattr(value, name, None)}" for name in options if is_ddp)


def _is_sampler_of_rank(value: Any) -> bool:
    """Whether a value deals the rows of a data set to ranks."""
    samplers: Any = sys.modules.get("torch.utils.data.distributed")
    return samplers is not None and isinstance(value, samplers.DistributedSampler)


def _describe_mesh(mesh: DeviceMesh) -> Held:
    try:
        found = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    except RuntimeError:  # without process groups
        return Held("opaque", "DeviceMesh")
    groups = [(group.label.name, group.label.ranks) for group in found if isinstance(group, WatchedGroup)]
    return (
        Held("mesh", "DeviceMesh", groups=tuple(groups)) if len(groups) == mesh.ndim else Held("opaque", "DeviceMesh")
    )


def _digests_of_rest(module: torch.nn.Module, *, with_shards: bool) -> dict[str, str]:
    """Return digests of what may differ between replicas of a module, by what it is.

    Of what cannot be compared it is one that equals no other.
    """
    found = {
        "buffers": list(module.named_buffers()),
        "gradients": _gradients_of(module, with_shards=with_shards),
        "extra state": extra_states_of(module),
    }
    return {what: _digest_or_unlike(value) for what, value in found.items()}


def _digest_or_unlike(value: Any) -> str:
    try:
        return digest_of(value)
    except NotComparable:
        return secrets.token_hex(8)


def _gradients_of(value: Any, *, with_shards: bool) -> dict[str, torch.Tensor]:
    return {name: local for name, (local, _) in gradients_of(value, with_shards=with_shards).items()}


def _are_telling(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors cannot be alike on two ranks by chance, as far as their first values show."""
    num_bytes = 0
    for tensor in tensors:
        local = local_part(tensor)
        if local.layout is torch.strided and not local.is_meta and local.numel():
            first = local.reshape(-1)[: LOOKED_AT_FIRST // local.itemsize]
            num_bytes += local.nbytes if bool((first != first[0]).any()) else 0
            if num_bytes >= TELLING_BYTES:
                return True
    return False
