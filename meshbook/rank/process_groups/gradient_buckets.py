"""The buckets in which DDP sums gradients: read from a model, and arranged as they once were.

With three ranks or more, the order in which the addends of an element are summed depends on where in its bucket it
lies. DDP begins with buckets in the order of the parameters and rebuilds them once in the order in which gradients
come, and a model whose process groups were formed again begins anew. So a step that is computed again has the same
bits only in the same buckets.

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


def read(model: Any) -> Buckets | None:
    """Return a DDP model's buckets between two steps; None: their order does not matter, or this torch does not tell.

    If the next forward pass would rebuild them, they are rebuilt at once, which is a collective of the model's group.
    """
    reducer: Any = model.reducer
    if not _can_arrange(model):
        return None
    with contextlib.suppress(RuntimeError):  # a forward pass without a backward pass: the next forward does it
        if reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True
    known = model.__dict__.get(_CACHE)
    if known is not None and known[0] == model._has_rebuilt_buckets:
        return list(known[1])
    parameters, _ = model._build_params_for_reducer()
    numbers = {id(parameter): at for at, parameter in enumerate(parameters)}
    found = [
        [numbers[id(parameter)] for parameter in bucket.parameters()]
        for bucket in reducer._get_zeros_like_grad_buckets()
    ]
    model.__dict__[_CACHE] = model._has_rebuilt_buckets, found
    return found


def arrange(model: Any, buckets: Buckets | None) -> None:
    """Give a DDP model these buckets, on every rank of its group, between two steps. No collective."""
    if buckets is not None and _can_arrange(model):
        _rebuild(model, buckets)


def begin_anew(model: Any) -> None:
    """Give a DDP model the buckets of a new one, on every rank of its group, between two steps. No collective."""
    if _can_arrange(model):
        _rebuild(model, None)


def _rebuild(model: Any, buckets: Buckets | None) -> None:
    """Have a DDP model begin with these buckets; None: with those that it computes itself."""
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
    if model.static_graph:
        model._set_static_graph()
    for hook, state in getattr(model, "_comm_hooks", ()):
        torch._C._distributed_c10d._register_comm_hook(model.reducer, state, hook)


def _can_arrange(model: Any) -> bool:
    """Whether the buckets matter and can be arranged. The sum of two numbers is the same in any order."""
    is_plain = model.mixed_precision is None and not model._delay_all_reduce_params
    return (
        is_plain and dist.get_world_size(model.process_group) > 2 and hasattr(model.reducer, "_remove_autograd_hooks")
    )
