"""Models that were in the middle of a step when their process groups broke: have them start the next one afresh.

DDP refuses a forward pass while it waits for gradients of the last one. FSDP2 goes on from where each rank had come to,
which is another point on each, so that its collectives no longer match. Both are made to forget the step; its gradients
are lost, and parameters, which no collective writes, are as they were.

Knows the insides of DDP and FSDP2, and nothing of process groups.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def forget_unfinished_steps() -> None:
    """For every model of this process. To be called when no collective is under way."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # imported by whoever uses it
    kinds = (DistributedDataParallel, *([fsdp.FSDPModule] if fsdp is not None else []))
    concerned: dict[type, bool] = {}  # asked once per class: a process has some hundred thousand objects
    for candidate in gc.get_objects():
        kind = type(candidate)
        if kind not in concerned:
            concerned[kind] = issubclass(kind, kinds)
        if not concerned[kind]:
            continue
        if isinstance(candidate, DistributedDataParallel):
            _reset_ddp(candidate)
        else:
            _reset_fsdp(candidate._get_fsdp_state())


def forget_unfinished_step(model: torch.nn.Module) -> None:
    """For one model, and what an FSDP2 model had of gradients before they were reduced."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            _reset_ddp(part)
        elif fsdp is not None and isinstance(part, fsdp.FSDPModule):
            state: Any = part._get_fsdp_state()
            for group in _param_groups(state):
                for parameter in group.fsdp_params:
                    _set(parameter, "unsharded_accumulated_grad", None)
                    unsharded = getattr(parameter, "_unsharded_param", None)
                    if unsharded is not None:
                        unsharded.grad = None
            _reset_fsdp(state)


def _reset_ddp(model: Any) -> None:
    reducer = model.__dict__.get("reducer")
    if hasattr(reducer, "_reset_state"):
        reducer._reset_state()


def _reset_fsdp(state: Any) -> None:
    """What `FSDPModule.reset_iter_state` does from torch 2.13 on, without waiting for what will never come.

    Names that a version of torch does not have are passed over.
    """
    if not state._is_root:  # None before the first forward pass, False for the parts of a model
        return
    context, communication = state._state_ctx, state._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        _set(communication, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        _clear(communication, name)
    for part in context.all_states:
        part._training_state = type(part._training_state).IDLE
        _clear(part, "_modules_to_run_forward")
        for group in _param_groups(part):
            for name in (
                "_all_gather_result",
                "_all_reduce_state",
                "_partial_reduce_output",
                "_post_reduce_event",
                "_reshard_after_forward_event",
            ):
                _set(group, name, None)
            _clear(group, "_post_forward_indices")
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _param_groups(state: Any) -> Any:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before 2.13 there was one, or none
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return groups


def _set(owner: Any, name: str, value: object) -> None:
    if hasattr(owner, name):
        setattr(owner, name, value)


def _clear(owner: Any, name: str) -> None:
    if hasattr(owner, name):
        getattr(owner, name).clear()
