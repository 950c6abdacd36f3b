"""The buckets in which DDP sums gradients: read from a model, and arranged as they once were.

With three ranks or more, the order in which the addends of an element are summed depends on where in its bucket it
lies. DDP begins with buckets in the order of the parameters and rebuilds them once in the order in which gradients
come, and a model whose process groups were formed again begins anew. So a step that is computed again has the same
bits only in the same buckets.

**Static graphs.** The first step of a `static_graph=True` model is unlike the others: its reducer counts gradients, and
sums them at the end. A reducer cannot be made to forget that it has had it. So ranks that begin anew replace it, and
only before the first forward pass that is not in `no_sync`, because it would count the gradients of that too.

Depends on the internals of DDP, and not on process groups.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# What DDP's gradients are summed in: by bucket, which parameters, by their numbers among those that need gradients.
Buckets = list[list[int]]

# Attribute of a model with what `read` has found, and whether the buckets had been rebuilt then: reading takes memory.
_CACHE = "_meshbook_buckets"
# Attribute of a model with a static graph: the buckets of the reducer that replaces its own (None: those that DDP
# computes), before the next forward pass whose gradients are summed.
_REPLACEMENT = "_meshbook_next_buckets"


def read(model: Any) -> Buckets | None:
    """Return a DDP model's buckets between two steps; None: their order does not matter, or this torch does not tell.

    If the next forward pass would rebuild them, they are rebuilt at once, which is a collective of the model's group.
    """
    reducer: Any = model.reducer
    if not _can_arrange(model):
        return None
    if _REPLACEMENT in model.__dict__:
        if model.__dict__[_REPLACEMENT] is None:
            rebuild(model, None)
            replace_reducer(model, _buckets_of(model))
        return list(model.__dict__[_REPLACEMENT])
    with contextlib.suppress(RuntimeError):  # a forward pass without a backward pass: the next forward does it
        if reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True
    known = model.__dict__.get(_CACHE)
    if known is not None and known[0] == model._has_rebuilt_buckets and not model._join_config.enable:
        return list(known[1])
    found = _buckets_of(model)
    model.__dict__[_CACHE] = model._has_rebuilt_buckets, found
    return found


def current(model: Any) -> Buckets | None:
    """Return the buckets of a DDP model that has rebuilt them; None: it has those that it began with. No collective."""
    if not model.__dict__.get("_has_rebuilt_buckets") or not hasattr(model.reducer, "_get_zeros_like_grad_buckets"):
        return None
    known = model.__dict__.get(_CACHE)
    if known is None or not known[0]:
        known = model.__dict__[_CACHE] = True, _buckets_of(model)
    return list(known[1])


def may_be_rebuilt(model: Any) -> bool:
    """Whether a DDP model has buckets other than those that it began with, as far as it knows.

    A rank that has run out of batches in `model.join()` may have rebuilt them without a note of it.
    """
    join = model.__dict__.get("_join_config")
    return bool(model.__dict__.get("_has_rebuilt_buckets")) or (join is not None and join.enable)


def _buckets_of(model: Any) -> Buckets:
    parameters, _ = model._build_params_for_reducer()
    numbers = {id(parameter): at for at, parameter in enumerate(parameters)}
    return [
        [numbers[id(parameter)] for parameter in bucket.parameters()]
        for bucket in model.reducer._get_zeros_like_grad_buckets()
    ]


def arrange(model: Any, buckets: Buckets | None) -> None:
    """Give a DDP model these buckets, on every rank of its group, between two steps. No collective."""
    if buckets is not None and _can_arrange(model):
        _begin_with(model, buckets)


def begin_anew(model: Any) -> None:
    """Give a DDP model the buckets of a new one, on every rank of its group, between two steps. No collective."""
    if _can_arrange(model):
        _begin_with(model, None)


def _begin_with(model: Any, buckets: Buckets | None) -> None:
    if needs_new_reducer(model):
        replace_reducer(model, buckets)
    else:
        rebuild(model, buckets)


def needs_new_reducer(model: Any) -> bool:
    """Whether a DDP model has to begin anew with `replace_reducer`, because its graph is static."""
    return bool(model.__dict__.get("static_graph")) and "reducer" in model.__dict__ and _can_rebuild(model)


def replace_reducer(model: Any, buckets: Buckets | None = None) -> None:
    """Have a DDP model begin as a new one, on every rank of its group, between two steps. No collective."""
    reducer = model.reducer
    reducer._reset_state()
    reducer._remove_autograd_hooks()
    model._static_graph_delay_allreduce_enqueued = True  # else torch has it sum at the end of backward in `no_sync` too
    model.__dict__[_REPLACEMENT] = buckets
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward)


def _before_forward(model: Any, _: Any) -> None:
    """A hook of the model's, until its reducer is replaced."""
    if _REPLACEMENT in model.__dict__ and model.require_backward_grad_sync and torch.is_grad_enabled():
        rebuild(model, model.__dict__.pop(_REPLACEMENT))
        hooks = model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _before_forward]:
            del hooks[key]


def rebuild(model: Any, buckets: Buckets | None) -> None:
    """Have a DDP model begin with these buckets; None: with those that it computes itself. No collective."""
    parameters, expects_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model.reducer._remove_autograd_hooks()
    given: Any = contextlib.nullcontext()
    if buckets is not None:
        # the helper reverses what it computes
        computed = list(reversed(buckets)), [model.bucket_bytes_cap] * len(buckets)
        given = mock.patch.object(dist, "_compute_bucket_assignment_by_size", return_value=computed)
    with given:
        model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    model._has_rebuilt_buckets = False
    model.__dict__.pop(_CACHE, None)
    if model.static_graph:  # `model._set_static_graph` does nothing the second time
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, state in getattr(model, "_comm_hooks", ()):
        torch._C._distributed_c10d._register_comm_hook(model.reducer, state, hook)


def _can_arrange(model: Any) -> bool:
    """Whether the buckets matter and can be arranged. The sum of two numbers is the same in any order."""
    return _can_rebuild(model) and dist.get_world_size(model.process_group) > 2


def _can_rebuild(model: Any) -> bool:
    is_plain = model.mixed_precision is None and not model._delay_all_reduce_params
    return is_plain and hasattr(model.reducer, "_remove_autograd_hooks")
