"""How a model of `fully_shard` (FSDP2) is pickled and rebuilt: a model without parameters, what it was sharded by, and
this rank's shards. Depends on the internals of FSDP2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.rank.healing.transfer import rebuild_dtensor
from meshbook.wire.pickler import NotSendable

_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
# Of these there is one per hook, by its number.
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# What `fully_shard` sets on modules.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "__composable_api_state_key")


class ShardedModels:
    """The FSDP2 models in a namespace."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        # by the id of parameters and inner modules: the outermost module, and the name in it
        self._places: dict[int, tuple[Any, str]] = {}
        self._skeletons: dict[int, _Skeleton] = {}  # by the id of their module
        if self._fsdp is None:
            return
        for value in namespace.values():
            if isinstance(value, torch.nn.Module):
                for root in self._outermost(value):
                    parts = [*root.named_parameters(), *list(root.named_modules())[1:]]
                    for name, part in parts:
                        if isinstance(part, (DTensor, torch.nn.Module)):
                            self._places.setdefault(id(part), (root, name))

    def place_of(self, tensor: DTensor) -> Any:
        """Return how a parameter of a sharded model is pickled; None: it is none."""
        found = self._places.get(id(tensor))
        return None if found is None else (_parameter_of, found)

    def reduce(self, thing: Any) -> Any:
        """Return how a module is pickled; NotImplemented: as usual."""
        if self._fsdp is None:
            return NotImplemented
        if type(thing) is _Skeleton:
            return self._reduce_skeleton(thing.module)
        if isinstance(thing, torch.nn.Module) and (place := self._places.get(id(thing))) is not None:
            return _module_of, place
        if isinstance(thing, self._fsdp):
            plans = self._plans_of(thing)
            shards = {
                name: (part.to_local().detach(), part.device_mesh, part.placements, part.shape, part.stride())
                for name, part in thing.named_parameters()
                if isinstance(part, DTensor)
            }
            return _shard_again, (self._skeleton(thing), plans, shards)
        return NotImplemented

    def _plans_of(self, root: Any) -> list[tuple[str, Any, dict[str, Any]]]:
        modules = _children_first(root, self._fsdp)
        groups = [module._get_fsdp_state()._fsdp_param_group for _, module in modules]
        mesh = next((group.mesh_info.mesh for group in groups if group is not None), None)
        return [_plan_of(path, module, mesh) for path, module in modules]

    def _outermost(self, module: Any) -> Iterator[Any]:
        if isinstance(module, self._fsdp):
            yield module
            return
        for child in module.children():
            yield from self._outermost(child)

    def _reduce_skeleton(self, module: Any) -> Any:
        state = {name: value for name, value in vars(module).items() if not name.startswith(_MARKS)}
        for name in _HOOKS:
            hooks = state.get(name)
            if hooks:
                kept = {number: hook for number, hook in hooks.items() if not _is_of_fsdp(hook)}
                state[name] = type(hooks)(kept)
        for name in _HOOK_FLAGS:
            flags = state.get(name)
            if flags:
                hooks = state["_forward_pre_hooks" if "_pre_" in name else "_forward_hooks"]
                state[name] = type(flags)({number: flag for number, flag in flags.items() if number in hooks})
        state["_parameters"] = {
            name: _EmptyParameter(part) if isinstance(part, DTensor) else part
            for name, part in module._parameters.items()
        }
        # torch's class of a sharded module is made at run time, and has the module's own behind FSDPModule
        is_sharded = isinstance(module, self._fsdp)
        state["_modules"] = {
            name: None if child is None else self._skeleton(child) for name, child in module._modules.items()
        }
        return _make_blank, (type(module).__mro__[2] if is_sharded else type(module),), state, None, None, _set_state

    def _skeleton(self, module: Any) -> _Skeleton:
        return self._skeletons.setdefault(id(module), _Skeleton(module))


class _Skeleton:
    """Stands for a module, pickled as what it was before it was sharded."""

    def __init__(self, module: Any) -> None:
        self.module = module


class _EmptyParameter:
    """A parameter before its module is sharded: a shape without memory."""

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter

    def __reduce__(self) -> Any:
        part = self.parameter
        return _empty_parameter, (tuple(part.shape), part.dtype, part.requires_grad)


def _empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)


def _make_blank(kind: Any) -> Any:
    return kind.__new__(kind)


def _set_state(module: Any, state: dict[str, Any]) -> None:
    vars(module).update(state)


def _children_first(root: Any, fsdp: Any) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in reversed(list(root.named_modules())) if isinstance(module, fsdp)]


def _is_of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps hooks of state dicts
    owner = getattr(hook, "__self__", None) or getattr(hook, "__wrapped__", hook)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return str(module).startswith("torch.distributed.fsdp")


def _plan_of(path: str, module: Any, mesh: Any) -> tuple[str, Any, dict[str, Any]]:
    """Return the path of a sharded module, its DeviceMesh, and the other arguments of `fully_shard`.

    Args:
        mesh: that of another module, for one whose parameters are all those of inner ones.
    """
    state = module._get_fsdp_state()
    group = state._fsdp_param_group
    if len(state._modules) != 1:
        raise NotSendable("fully_shard was given several modules at once")
    if group is None:
        return path, mesh, {"mp_policy": state._mp_policy}
    if group._training_state.name != "IDLE" or not group.is_sharded:
        raise NotSendable("its parameters are gathered: a cell has left it between forward and backward")
    after = group.post_forward_mesh_info
    if getattr(state, "_auto_reshard_after_forward", False):
        reshard: bool | int | None = None
    elif after is None or after is group.mesh_info:
        reshard = after is not None
    else:
        reshard = after.shard_mesh_size
    policies = {"mp_policy": group.mp_policy, "offload_policy": group.offload_policy}
    return path, group.mesh_info.mesh, {"reshard_after_forward": reshard, **policies}


def _shard_again(
    model: Any, plans: list[tuple[str, Any, dict[str, Any]]], shards: dict[str, tuple[Any, Any, Any, Any, Any]]
) -> Any:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for path, mesh, arguments in plans:
        fully_shard(model.get_submodule(path), mesh=mesh, **arguments)
    for name, layout in shards.items():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        grad = owner._parameters[attribute].requires_grad
        owner._parameters[attribute] = rebuild_dtensor(*layout, grad, True)
    for _, module in _children_first(model, FSDPModule):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.reset_sharded_param()
    return model


def _parameter_of(model: Any, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def _module_of(model: Any, name: str) -> Any:
    return model.get_submodule(name)
