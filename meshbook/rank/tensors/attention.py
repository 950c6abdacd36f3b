"""Scaled dot-product attention as two operators, `forward` and `backward`, for which each rank chooses torch's kernel.

torch chooses attention's kernel by the device of the query before `__torch_dispatch__` sees the operation. Remote
tensors report a CPU, so they would bring the kernel of a CPU to ranks on GPUs. These operators stand in its place: on a
CPU they are that kernel, on another device torch chooses there, with its autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

aten: Any = torch.ops.aten
_cpu_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_library: Any = torch.library.Library("meshbook_attention", "DEF")  # type: ignore[no-untyped-call]  # its end would end the registrations
_library.define(
    "forward(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, bool needs_grad)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor saved, Tensor? mask,"
    " bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)"
)
forward: Any = torch.ops.meshbook_attention.forward.default
backward: Any = torch.ops.meshbook_attention.backward.default

_Key = torch._C.DispatchKey
# What a kernel of an operator is not to dispatch to, because it runs below it.
_AUTOGRAD_KEYS = (_Key.AutogradFunctionality, _Key.AutogradOther, _Key.AutogradNestedTensor, _Key.ADInplaceOrView)


def _forward_by_cpu_kernel(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: Any, _: bool) -> Any:
    return _cpu_forward(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)


def _backward_by_cpu_kernel(
    grad: Any, query: Any, key: Any, value: Any, out: Any, saved: Any, mask: Any, is_causal: bool, scale: Any
) -> Any:
    return _cpu_backward(grad, query, key, value, out, saved, 0.0, is_causal, attn_mask=mask, scale=scale)


def _forward_by_torch(
    query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: Any, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention by torch's choice of kernel.

    Returns:
        The result, and a tensor without memory that carries torch's graph from here to `backward`.
    """
    saved = query.new_empty((), dtype=torch.float32).expand(query.shape[:-1])
    if needs_grad:
        graph = _graph_of(query, key, value, mask, is_causal, scale)
        saved._meshbook_graph = graph
        out = graph[1].detach()
    else:
        out = _attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)
    (out,) = _as_planned([out], forward, query, key, value, mask, is_causal, scale, needs_grad)
    return out, saved


def _backward_by_torch(
    grad: Any, query: Any, key: Any, value: Any, out: Any, saved: Any, mask: Any, is_causal: bool, scale: Any
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value; forward runs again if its graph is on another rank or gone."""
    graph = getattr(saved, "_meshbook_graph", None) or _graph_of(query, key, value, mask, is_causal, scale)
    inputs, result = graph
    # The graph lives as long as `saved`: the controller may run backward twice.
    made = torch.autograd.grad(result, inputs, grad, retain_graph=True)
    return tuple(_as_planned(made, backward, grad, query, key, value, out, saved, mask, is_causal, scale))


def _graph_of(
    query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: Any
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return attention's inputs as leaves, and its result with a graph to these."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in (query, key, value))
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key_of_autograd in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key_of_autograd)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        return inputs, _attention(*inputs, mask=mask, is_causal=is_causal, scale=scale)


def _attention(query: Any, key: Any, value: Any, *, mask: Any, is_causal: bool, scale: Any) -> torch.Tensor:
    has_groups = query.shape[-3] != key.shape[-3]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=has_groups
    )


def _as_planned(results: Sequence[torch.Tensor], operator: Any, *args: Any) -> list[torch.Tensor]:
    """Return results with the strides that the controller expects: it plans views by them."""
    layouts = (_Layout(arg.shape, arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return [
        result
        if all(own == other or n == 1 for own, other, n in zip(result.stride(), strides, result.shape, strict=True))
        else torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
        for result, strides in zip(results, _planned_strides(operator, *layouts), strict=False)
    ]


class _Layout(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(4096)
def _planned_strides(operator: Any, *args: Any) -> list[tuple[int, ...]]:
    """Return the strides of an operator's results in a plan, where it runs without data."""
    empties = (
        torch.empty_strided(arg.shape, arg.strides, dtype=arg.dtype, device="meta") if isinstance(arg, _Layout) else arg
        for arg in args
    )
    return [result.stride() for result in operator(*empties)]


for _key in ("CPU", "Meta"):
    _library.impl("forward", _forward_by_cpu_kernel, _key)
    _library.impl("backward", _backward_by_cpu_kernel, _key)
_library.impl("forward", _forward_by_torch, "CompositeExplicitAutograd")
_library.impl("backward", _backward_by_torch, "CompositeExplicitAutograd")


def register_shardings(register_sharding: Any) -> None:
    """Register that batch and heads may be sharded, and the mask with them where it has them.

    For torch's kernel of a CPU too, which DTensors of cells use and DTensor has no rule for.
    """

    @register_sharding(forward)  # type: ignore[untyped-decorator]
    def shard_forward(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return [
            ([strategy] * 2, [strategy] * 3 + [_mask_placement(query, mask, strategy)] + [None] * len(rest))
            for strategy in _strategies(query, key)
        ]

    @register_sharding(backward)  # type: ignore[untyped-decorator]
    def shard_backward(grad: Any, query: Any, key: Any, value: Any, out: Any, saved: Any, mask: Any, *rest: Any) -> Any:
        return [
            ([strategy] * 3, [strategy] * 6 + [_mask_placement(query, mask, strategy)] + [None] * len(rest))
            for strategy in _strategies(query, key)
        ]

    @register_sharding(_cpu_forward)  # type: ignore[untyped-decorator]
    def shard_cpu_forward(query: Any, key: Any, value: Any, *rest: Any, attn_mask: Any = None, **named: Any) -> Any:
        return [
            ([strategy] * 2, [strategy] * 3 + [None] * len(rest) + _named(query, attn_mask, strategy, named))
            for strategy in _strategies(query, key)
        ]

    @register_sharding(_cpu_backward)  # type: ignore[untyped-decorator]
    def shard_cpu_backward(grad: Any, query: Any, key: Any, *rest: Any, attn_mask: Any = None, **named: Any) -> Any:
        return [
            ([strategy] * 3, [strategy] * 6 + [None] * (len(rest) - 3) + _named(query, attn_mask, strategy, named))
            for strategy in _strategies(query, key)
        ]


def _named(query: Any, mask: Any, strategy: Any, named: Any) -> list[Any]:
    """Return the placements of keyword arguments that are given."""
    return [None] * len(named) if mask is None else [_mask_placement(query, mask, strategy), *[None] * len(named)]


def _strategies(query: Any, key: Any) -> list[Any]:
    has_groups = query.shape[1] != key.shape[1]  # which heads of the key belong to a shard depends on its size
    return [Replicate(), Shard(0)] if has_groups else [Replicate(), Shard(0), Shard(1)]


def _mask_placement(query: Any, mask: Any, strategy: Any) -> Any:
    """Return where a mask lies: sharded as the query along a dim that it has, else replicated."""
    if mask is None:
        return None
    if strategy.is_shard() and len(mask.shape) == 4 and mask.shape[strategy.dim] == query.shape[strategy.dim]:
        return strategy
    return Replicate()
