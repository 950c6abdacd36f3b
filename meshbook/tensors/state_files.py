"""Saves and loads a remote module and its optimizer by parts, in torch's own format of distributed checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer

from meshbook.errors import UsageError
from meshbook.rank.tensors import state_files
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.module_client import call_on_ranks


def save(engine: TensorEngine, module: nn.Module, optimizer: Optimizer | None, folder: str) -> None:
    """See `RemoteModule.save_checkpoint`."""
    call_on_ranks(engine, state_files.save_state, _state_of(module, optimizer), folder)


def load(engine: TensorEngine, module: nn.Module, optimizer: Optimizer | None, folder: str) -> None:
    """See `RemoteModule.load_checkpoint`."""
    if optimizer is not None and not optimizer.state:
        _init_optim_state(optimizer)
    state = _state_of(module, optimizer)
    loaded = call_on_ranks(engine, state_files.load_state, state, folder)[0]
    if optimizer is None:
        return
    for name, entry in state["optimizer"].items():
        own = optimizer.state[module.get_parameter(name)]
        for key, value in entry.items():
            if not isinstance(value, MeshTensor):
                own[key] = loaded["optimizer"][name][key]
    for group, saved in zip(optimizer.param_groups, loaded["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _state_of(module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": dict(module.state_dict())}
    if optimizer is None:
        return state
    names = {parameter: name for name, parameter in module.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in given):
        raise UsageError("this optimizer has parameters that are not the module's; save what they are of with it")
    state["optimizer"] = {names[one]: dict(optimizer.state[one]) for one in given if one in optimizer.state}
    state["groups"] = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return state
