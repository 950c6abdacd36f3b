"""What DTensor lacks on CPU, put in at torch's own doors. Used where operations run, and where they are only planned.

- Attention: torch's CPU kernel has no sharding rule; batch and heads may be cut.
- Random numbers: on a CPU mesh every shard would draw the same ones. Here each draws from a seed of its own, made of
  the operation's seed and the shard's place: shards differ, replicas agree, and the same seeds give the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding as _register_sharding

aten = torch.ops.aten

register_sharding: Any = _register_sharding  # torch gives it no types

_installed = False


def install() -> None:
    """Idempotent. Leaves an RNG tracker that somebody else installed."""
    global _installed
    if not _installed:
        _installed = True
        _register_attention()
        _register_others()
        for name in ("_collective_utils", "_redistribute"):
            logging.getLogger(f"torch.distributed.tensor.{name}").addFilter(_is_of_others)
    if dtensor_random._rng_tracker is None:
        dtensor_random._rng_tracker = ShardedNumbers()  # type: ignore[assignment]


class _Ours(threading.local):
    """Whether this thread carries out, or plans, an operation of a remote tensor."""

    depth = 0


_ours = _Ours()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """What torch warns of inside is not passed on: that gloo moves a cut from dim to dim by gathering, that two axes
    are reduced one after the other. True, said by every rank, and of no use to anybody. Of other DTensors it warns."""
    _ours.depth += 1
    try:
        yield
    finally:
        _ours.depth -= 1


def _is_of_others(record: logging.LogRecord) -> bool:
    return not _ours.depth or record.levelno >= logging.ERROR


def _register_attention() -> None:
    ways = (Replicate(), Shard(0), Shard(1))

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)  # type: ignore[untyped-decorator]
    def forward(
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        attn_mask: Any = None,
        scale: Any = None,
    ) -> Any:
        # A mask spans batch and heads by broadcasting, so it stays whole, and then so must they.
        if attn_mask is not None:
            whole = Replicate()
            return [([whole, whole], [whole, whole, whole, None, None, whole, None][: 6 if scale is None else 7])]
        return [([way, way], [way, way, way, None, None]) for way in ways]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)  # type: ignore[untyped-decorator]
    def backward(
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        dropout_p: float,
        is_causal: bool,
        attn_mask: Any = None,
        scale: Any = None,
    ) -> Any:
        if attn_mask is not None:
            whole = Replicate()
            return [([whole] * 3, [whole] * 6 + [None, None, whole])]
        return [([way] * 3, [way] * 6 + [None, None]) for way in ways]


def _register_others() -> None:
    """Operators that work on each image, or each element, by itself."""
    batch_and_channels = (Replicate(), Shard(0), Shard(1))

    @register_sharding(aten.avg_pool2d.default)  # type: ignore[untyped-decorator]
    def pool(tensor: Any, *others: Any, **named: Any) -> Any:
        return [([way], [way, *[None] * len(others)]) for way in _first_dims(tensor, batch_and_channels)]

    @register_sharding(aten.avg_pool2d_backward.default)  # type: ignore[untyped-decorator]
    def pool_backward(grad: Any, tensor: Any, *others: Any, **named: Any) -> Any:
        return [([way], [way, way, *[None] * len(others)]) for way in _first_dims(tensor, batch_and_channels)]

    for operator in (
        aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.hardtanh_backward.default,
    ):  # fmt: skip

        @register_sharding(operator)  # type: ignore[untyped-decorator]
        def pointwise(grad: Any, tensor: Any, *others: Any) -> Any:
            ways = [Replicate(), *map(Shard, range(len(tensor.shape)))]
            return [([way], [way, way, *[None] * len(others)]) for way in ways]

    @register_sharding(aten._conj_physical.default)  # type: ignore[untyped-decorator]
    def conjugate(tensor: Any) -> Any:
        return [([way], [way]) for way in (Replicate(), *map(Shard, range(len(tensor.shape))))]

    @register_sharding(aten._prelu_kernel_backward.default)  # type: ignore[untyped-decorator]
    def slopes(grad: Any, tensor: Any, weight: Any) -> Any:
        ways: list[Any] = [([Replicate()] * 2, [Replicate()] * 3)]
        for dim, (length, slopes) in enumerate(zip(tensor.shape, weight.shape, strict=True)):
            way = Shard(dim)
            ways.append(([way, way], [way, way, way if slopes == length else Replicate()]))
        return ways


_told_apart: set[Any] = set()


def tell_numbers_apart(operator: Any) -> None:
    """DTensor takes `topk(3)` for the `topk(2)` that it has seen, and `sum(dtype=torch.float64)` for a `sum()`: the key
    to what it knows of operations leaves out what comes after the tensors, unless it is told. Integers and booleans
    tell shapes: they belong to it, and so does a dtype."""
    if operator in _told_apart or not isinstance(operator, torch._ops.OpOverload):
        return
    _told_apart.add(operator)
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    told = propagator.op_to_schema_info
    if operator in getattr(propagator, "op_single_dim_strategy_funcs", ()):
        told = propagator.op_to_schema_info_for_single_dim_strategy
    elif operator not in propagator.op_strategy_funcs:
        return
    info = told.get(operator) or RuntimeSchemaInfo()
    first, names = info.static_argnum, list(info.static_kwargkey or ())
    for at, argument in enumerate(operator._schema.arguments):
        if argument.kwarg_only:
            if argument.name == "dtype" and "dtype" not in names:
                names.append("dtype")
        elif any(kind in str(argument.type) for kind in ("int", "bool")):
            first = min(first, at)
    if (wanted := dataclasses.replace(info, static_argnum=first, static_kwargkey=names or None)) != info:
        told[operator] = wanted


def as_computed(tensor: DTensor) -> DTensor:
    """A result as the dtype that it has. DTensor's cache takes a number, `x * 0.5`, for the tensor without dims of
    float64 that it has seen in its place, or that for the number, and says the other's dtype of what it computes."""
    spec = tensor._spec
    meta = spec.tensor_meta._replace(dtype=tensor._local_tensor.dtype)  # type: ignore[union-attr]
    made = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(tensor._local_tensor, made, requires_grad=False)  # type: ignore[no-untyped-call]


def _first_dims(tensor: Any, ways: Any) -> Any:
    return ways if len(tensor.shape) == 4 else ways[:2]


class ShardedNumbers:
    """DTensor's idea of an RNG tracker, for a mesh of CPUs."""

    distribute_region_enabled = True

    def __init__(self) -> None:
        self.seed: int | None = (
            None  # of the operation that runs; None: it is a cell's, and draws from torch's generator
        )

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        if self.seed is not None:  # whoever set it has seeded the generators, too
            yield
            return
        # Replicas that were seeded alike draw the same; the stream moves on by one.
        source = generator if generator is not None else torch.default_generator
        seed = int(torch.randint(0, 1 << 52, (), generator=source, device=source.device))
        with numbers_from(mix(seed, shard_of(spec)), generator):
            yield

    def _manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def shard_of(spec: Any) -> int:
    """The number of this rank's shard: replicas have the same."""
    mesh = spec.mesh
    place = mesh.get_coordinate() or [0] * mesh.ndim
    shard = 0
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard():
            shard = shard * mesh.size(axis) + place[axis]
    return shard


def generators() -> list[torch.Generator]:
    """The process's own: of the CPU and, where it has one, of its GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


@contextlib.contextmanager
def numbers_from(seed: int, source: torch.Generator | None = None) -> Iterator[None]:
    """Random operations inside draw from `seed`; the generators then go on as if they had not been.

    Args:
        source: None: the process's own.
    """
    sources = generators() if source is None else [source]
    states = [each.get_state() for each in sources]
    for each in sources:
        each.manual_seed(seed)
    try:
        yield
    finally:
        for each, state in zip(sources, states, strict=True):
            each.set_state(state)


def mix(seed: int, place: int) -> int:
    """A seed for one of several places; neighbours' are far apart (the golden ratio's multiples)."""
    return (seed ^ (place * 0x9E3779B97F4A7C15)) & ((1 << 63) - 1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch has to say on standard error about operations that are only tried."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with ours(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before
