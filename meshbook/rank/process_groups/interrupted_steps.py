"""Resets models that were in the middle of a step when their process groups broke.

DDP refuses a forward pass while it waits for gradients of the last one. FSDP2 continues from where each rank was, which
differs between ranks, so that its collectives no longer match. Both are made to forget the step: its gradients are
lost, and parameters, which no collective writes, are unchanged.

Depends on the internals of DDP and FSDP2, and not on process groups.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from meshbook.rank.process_groups import gradient_buckets
from meshbook.rank.process_groups.live_objects import instances_of

# Attribute of a DDP model: its buckets are no longer those of the beginning.
_REBUCKETED = "_meshbook_rebucketed"


def is_mid_step(backward_incomplete: bool) -> bool:
    """Whether a model of this process is in the middle of a step. Call it when no model runs.

    Args:
        backward_incomplete: whether a backward pass did not complete; DDP does not report that.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if not backward_incomplete and (fsdp is None or not fsdp.FSDPModule.__subclasses__()):
        return False
    return any(
        backward_incomplete if isinstance(model, DistributedDataParallel) else _is_fsdp_mid_step(model)
        for model in _iter_models()
    )


def has_unreduced_gradients(model: torch.nn.Module) -> bool:
    """Whether a model holds gradients that FSDP2 has yet to reduce, as between two micro-batches."""
    for module in model.modules():
        state = fsdp_state(module) if hasattr(module, "_get_fsdp_state") else None
        for group in fsdp_param_groups(state) if state is not None else ():
            if any(getattr(one, "unsharded_accumulated_grad", None) is not None for one in group.fsdp_params):
                return True
    return False


def num_rebucketed_models() -> int:
    """Return how often DDP models have rebuilt their gradient buckets: since their last reset, and at all before it.

    DDP rebuilds them once, before the second step. A reset has it rebuild them again, and leaves them as they are until
    then: after it the model differs from one that is new.
    """
    return sum(
        gradient_buckets.may_be_rebuilt(model) + bool(model.__dict__.get(_REBUCKETED, False))
        for model in _iter_models()
        if isinstance(model, DistributedDataParallel) and not gradient_buckets.needs_new_reducer(model)
    )


def reset_interrupted_steps(*, same_buckets: bool = True) -> None:
    """Reset every model of this process. Call it when no collective is in flight.

    Args:
        same_buckets: whether all ranks have the same `num_rebucketed_models`. If not, gradients are in other buckets on
            some ranks, and the next step begins on all with buckets in the order of the parameters.
    """
    for model in _iter_models():
        if isinstance(model, DistributedDataParallel):
            _reset_ddp(model)
            _begin_like_others(model, same_buckets=same_buckets)
        else:
            _reset_fsdp(model)


def begin_like_other_ranks(*, same_buckets: bool) -> None:
    """Have every DDP model of a new process begin its next step as `reset_interrupted_steps` has had those of others.

    Args:
        same_buckets: as there.
    """
    for model in _iter_models():
        if isinstance(model, DistributedDataParallel):
            if gradient_buckets.needs_new_reducer(model):
                gradient_buckets.replace_reducer(model)
            _begin_like_others(model, same_buckets=same_buckets)


def _begin_like_others(model: Any, *, same_buckets: bool) -> None:
    reducer = model.__dict__.get("reducer")
    if not same_buckets and reducer is not None and not gradient_buckets.needs_new_reducer(model):
        reducer._push_all_rebuilt_params()


def _iter_models() -> Iterator[Any]:
    """Return all DDP models, and the FSDP2 models and their submodules."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # imported only if user code uses it
    model_types = (DistributedDataParallel, *([fsdp.FSDPModule] if fsdp is not None else []))
    return instances_of(*model_types)


def reset_interrupted_step(model: torch.nn.Module) -> None:
    """Reset one model."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _reset_ddp(module)
        elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
            _reset_fsdp(module)


def fsdp_state(model: Any) -> Any:
    """Return FSDP2's state of a model; None for one that an interrupt left half built, in `fully_shard` for example."""
    try:
        return model._get_fsdp_state()
    except (AssertionError, AttributeError):
        return None


def _is_fsdp_mid_step(model: Any) -> bool:
    state = fsdp_state(model)
    if state is None:
        return False
    if state._training_state != type(state._training_state).IDLE:
        return True
    if not state._is_root:
        return False
    context = state._state_ctx
    return (
        context.iter_forward_root is not None
        or context.post_backward_final_callback_queued
        or not _is_lazy_init_done(state)
    )


def _reset_ddp(model: Any) -> None:
    # A forward without gradients clears it, and a new process, which has made none, would send buffers alone.
    model.require_forward_param_sync = True
    if gradient_buckets.needs_new_reducer(model):
        gradient_buckets.replace_reducer(model)
        return
    reducer = model.__dict__.get("reducer")
    if hasattr(reducer, "_reset_state"):
        reducer._reset_state()
        model.__dict__[_REBUCKETED] = model.__dict__.get(_REBUCKETED, False) or gradient_buckets.may_be_rebuilt(model)
        model._has_rebuilt_buckets = False


def _reset_fsdp(model: Any) -> None:
    """Do what `FSDPModule.reset_iter_state` does from torch 2.13 on, without waiting for aborted operations.

    Skips attributes that a version of torch does not have.
    """
    state = fsdp_state(model)
    if state is None:
        return
    state._training_state = type(state._training_state).IDLE
    _clear_if_present(state, "_modules_to_run_forward")
    if not state._is_root:  # None before the first forward pass, False for submodules
        return
    if not _is_lazy_init_done(state):
        _reset_lazy_init(state)
        return
    context, communication = state._state_ctx, state._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        _set_if_present(communication, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        _clear_if_present(communication, name)
    for child_state in context.all_states:
        for group in fsdp_param_groups(child_state):
            for name in (
                "_all_gather_result",
                "_all_reduce_state",
                "_partial_reduce_output",
                "_post_reduce_event",
                "_reshard_after_forward_event",
            ):
                _set_if_present(group, name, None)
            _clear_if_present(group, "_post_forward_indices")
            for parameter in group.fsdp_params:  # unreduced gradients: the next step's would be added to them
                _set_if_present(parameter, "unsharded_accumulated_grad", None)
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _fsdp_states(root: Any) -> list[Any]:
    """Return the states of a root's modules, including its own."""
    states: dict[int, Any] = {id(root): root}
    for fsdp_module in root._modules:
        for module in fsdp_module.modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            if state is not None:
                states[id(state)] = state
    return list(states.values())


def _is_lazy_init_done(root: Any) -> bool:
    """Whether FSDP2's lazy initialisation in a model's first forward pass, which registers hooks, has completed."""
    for state in _fsdp_states(root):
        for group in fsdp_param_groups(state):
            modules = {parameter._module_info.module for parameter in group.fsdp_params}
            hooks = getattr(group, "_module_to_pre_load_state_dict_hook_handle", None)
            if hooks is not None and len(hooks) < len(modules):
                return False
    return True


def _reset_lazy_init(root: Any) -> None:
    """Have the next forward pass repeat an interrupted lazy initialisation from the beginning."""
    for state in _fsdp_states(root):
        state._is_root = None
        for group in fsdp_param_groups(state):
            for name in ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle"):
                for handle in getattr(group, name, {}).values():
                    handle.remove()
                _clear_if_present(group, name)
    root._state_ctx.all_states.clear()


def fsdp_param_groups(state: Any) -> Any:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before 2.13 there was at most one
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return groups


def _set_if_present(owner: Any, name: str, value: object) -> None:
    if hasattr(owner, name):
        setattr(owner, name, value)


def _clear_if_present(owner: Any, name: str) -> None:
    if hasattr(owner, name):
        getattr(owner, name).clear()
