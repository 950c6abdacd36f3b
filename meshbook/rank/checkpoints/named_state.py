"""The state behind a name of the ranks' namespaces: tensors and values by path, as a checkpoint has them.

A path begins with the name and goes on as torch's own state dicts do: `("model", "layers.0.weight")`,
`("opt", "state", "layers.0.weight", "exp_avg")`. Joined with dots it is the key in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import CheckpointError
from meshbook.rank.state.kinds import clean_name, kind_of
from meshbook.rank.state.random_states import random_states

Path = tuple[str, ...]

RNG = "rng"  # the reserved name: each rank's generators of torch, CUDA, NumPy and Python

# Of the keys of values that differ between ranks: `step@rank1`.
RANK_SUFFIX = re.compile(r"@rank(\d+)$")

_TENSOR_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, DTensor)


@dataclass
class NamedState:
    """The state behind one name on this rank.

    Attributes:
        kind: as in `SavedName`.
        target: the object itself.
        tensors: by path; those of a module or tensor share the object's memory.
        values: what is not a tensor, by path.
        from_first_rank: paths that every rank has and DDP takes from rank 0 with the next forward.
        replicated: paths of parameters that DDP keeps equal on all ranks.
        is_sharded: some of its tensors are DTensors.
    """

    name: str
    kind: str
    target: Any
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    from_first_rank: set[Path] = field(default_factory=set)
    replicated: set[Path] = field(default_factory=set)

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(tensor, DTensor) for tensor in self.tensors.values())


def key_of(path: Path) -> str:
    return ".".join(path)


def read_state(name: str, namespace: Mapping[str, Any]) -> NamedState:
    """Return the state behind a name. Changes nothing, and starts no collective.

    Raises:
        CheckpointError: the name is not bound, or its state cannot be saved; the message says what to do.
    """
    if name == RNG:
        return NamedState(name, "rng", None, values={(name,): random_states()})
    if name not in namespace:
        raise CheckpointError(f"`{name}` is not bound on this rank; run the cell that makes it, or leave it out")
    target = namespace[name]
    kind = kind_of(target)
    state = NamedState(name, kind, target)
    match kind:
        case "module":
            _read_module(state)
        case "optimizer":
            read_optimizer(state, namings(target, name, namespace)[0])
        case "tensor":
            state.tensors[name,] = target
        case "generator":
            state.values[name,] = target.get_state()
        case "stateful":
            flatten((name,), target.state_dict(), state)
        case _:
            state.values[name,] = target
    for path, tensor in state.tensors.items():
        _check_tensor(key_of(path), tensor)
    _check_keys([*state.tensors, *state.values])
    return state


def _check_keys(paths: Sequence[Path]) -> None:
    """Raise CheckpointError for paths that a checkpoint cannot tell apart."""
    path_of: dict[str, Path] = {}
    for path in paths:
        key = key_of(path)
        if (other := path_of.setdefault(key, path)) != path:
            both = f"{_subscripts(other)} and {_subscripts(path)}"
            raise CheckpointError(f"`{path[0]}` has {both}, which are both `{key}` in a checkpoint: rename one")
        if RANK_SUFFIX.search(key):
            raise CheckpointError(f"`{key}` ends like what a rank has of its own in a checkpoint: rename it")


def _subscripts(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path[1:])


def _read_module(state: NamedState) -> None:
    module, name = state.target, state.name
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        raise CheckpointError(f"`{name}` is wrapped in FullyShardedDataParallel (FSDP1); wrap it with fully_shard")
    if not module.state_dict():
        return
    for fqn, value in get_model_state_dict(module).items():
        if isinstance(value, torch.Tensor):
            state.tensors[name, fqn] = value
        else:  # of a module's get_extra_state
            state.values[name, fqn] = value
    is_ddp = isinstance(module, DistributedDataParallel)
    if is_ddp and module.process_group.size() == torch.distributed.get_world_size():
        ignored = module.parameters_to_ignore
        state.replicated = {
            (name, clean_name(one)) for one, _ in module.module.named_parameters() if one not in ignored
        }
        if module.broadcast_buffers:
            state.from_first_rank = {(name, clean_name(buffer)) for buffer, _ in module.module.named_buffers()}


def read_optimizer(state: NamedState, names: Mapping[Any, str]) -> None:
    """Read the state of an optimizer, whose parameters have these names."""
    optimizer, name = state.target, state.name
    groups = []
    for group in optimizer.param_groups:
        others = {key: value for key, value in group.items() if key != "params"}
        groups.append({**others, "params": [names[parameter] for parameter in group["params"]]})
    state.values[name, "param_groups"] = groups
    for parameter, parameter_state in optimizer.state.items():
        flatten((name, "state", names[parameter]), parameter_state, state, descend=True)


def namings(optimizer: torch.optim.Optimizer, name: str, namespace: Mapping[str, Any]) -> list[dict[Any, str]]:
    """Return what the parameters of an optimizer can be called: at first how they are saved.

    That is by their names in the module that has them: of the modules in the namespace that have all the parameters,
    the one with most. Parameters of several modules, and tensors, are named by their names in the namespace:
    `actor.0.weight`.

    Raises:
        CheckpointError: some have no name.
    """
    wanted = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    all_names: dict[Any, str] = {}
    by_module: list[dict[Any, str]] = []
    for bound, value in list(namespace.items()):
        if bound.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            names = {parameter: clean_name(_without_ddp(value, full)) for full, parameter in value.named_parameters()}
            if wanted <= names.keys():
                by_module.append(names)
            all_names = {**{parameter: f"{bound}.{fqn}" for parameter, fqn in names.items()}, **all_names}
        elif isinstance(value, torch.Tensor):
            all_names.setdefault(value, bound)
    found = sorted(by_module, key=len, reverse=True)
    if (missing := wanted - all_names.keys()) and not found:
        raise CheckpointError(
            f"{len(missing)} of the {len(wanted)} parameters of `{name}` have no name: bind the module that has them "
            "to a name on the ranks"
        )
    if not missing:
        found.append(all_names)
    return [{parameter: names[parameter] for parameter in wanted} for names in found]


def _without_ddp(module: nn.Module, name: str) -> str:
    return name.removeprefix("module.") if isinstance(module, DistributedDataParallel) else name


def flatten(path: Path, value: Any, state: NamedState, *, descend: bool = False) -> None:
    """Sort a state dict into tensors and values; dicts without tensors are one value."""
    if isinstance(value, torch.Tensor):
        state.tensors[path] = value
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and (descend or _has_tensor(value)):
        for key, inner in value.items():
            flatten((*path, key), inner, state)
    else:
        _check_value(key_of(path), value)
        state.values[path] = value


def _has_tensor(value: Mapping[Any, Any]) -> bool:
    inner = value.values()
    return any(isinstance(each, torch.Tensor) or (isinstance(each, Mapping) and _has_tensor(each)) for each in inner)


def _check_value(key: str, value: Any) -> None:
    if any(isinstance(each, DTensor) for each in _leaves(value)):
        raise CheckpointError(f"`{key}` has DTensors inside a list or tuple; keep them in a dict, or in names")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _check_tensor(key: str, tensor: torch.Tensor) -> None:
    problem = ""
    if type(tensor) not in _TENSOR_TYPES:
        problem = f"is a {type(tensor).__name__}, which DCP does not know; convert it to a torch.Tensor"
    elif tensor.is_meta:
        problem = "is on the meta device and has no data; materialize it (to_empty, then initialize)"
    elif tensor.layout is not torch.strided:
        problem = f"is of layout {tensor.layout}; convert it with to_dense()"
    elif isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        problem = "is a DTensor with a Partial placement; redistribute it to Shard or Replicate"
    if problem:
        raise CheckpointError(f"`{key}` {problem}")
