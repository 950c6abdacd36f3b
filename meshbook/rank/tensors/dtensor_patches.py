"""Adds what DTensor lacks, through torch's own extension APIs. Used for running and for planning operations.

- Random numbers: an operation of a remote tensor brings its seed, and DTensor would have shards of a CPU mesh draw the
  same numbers. Here each shard has its own seed, made of the operation's seed and the shard's index: shards differ,
  replicas agree, and the same seeds give the same numbers.
- Shapes: what an operation makes of tensors of global shapes is found once, whatever their placements.
- Costs: which placements DTensor chooses may depend on how many devices it finds in a host. The controller has none of
  the ranks' devices, so both count one.
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
from torch.distributed.tensor import DTensor, Replicate, Shard, _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops._pointwise_ops import _register_single_dim_pointwise
from torch.distributed.tensor.experimental import register_sharding as _register_sharding
from torch.utils._python_dispatch import return_and_correct_aliasing

from meshbook.rank.tensors import attention

aten = torch.ops.aten

register_sharding: Any = _register_sharding  # torch gives it no types


def _matrix_rank_into(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Write the result into `out`: of a subclass's tensors, torch's own gives another tensor and leaves `out` alone."""
    rank = torch.linalg.matrix_rank(*args, **kwargs)
    return torch.Tensor.resize_(out, rank.shape).copy_(rank) if out.shape != rank.shape else out.copy_(rank)


_installed = False


def install() -> None:
    """Install the patches. Idempotent."""
    global _installed
    if not _installed:
        _installed = True
        _collective_utils._mesh_resources = _HostsOfOneDevice()  # type: ignore[assignment, attr-defined]
        attention.register_shardings(register_sharding)
        _register_fused_steps()
        _register_other_ops()
        for overload in ("out", "out_tol_tensor", "atol_rtol_tensor_out", "atol_rtol_float_out"):
            # The key that tensors of subclasses have, above that of autograd, under which torch decomposes it.
            _aten_library.impl(f"linalg_matrix_rank.{overload}", _matrix_rank_into, "PythonTLSSnapshot")
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        handlers |= dict.fromkeys(DECOMPOSED, torch_decomposition)
        handlers |= dict.fromkeys(_SHAPES_IN_PLACE, _change_shape_in_place)
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator._propagate_tensor_meta_non_cached = _ResultMetas(propagator._propagate_tensor_meta_non_cached)
        for name in ("_collective_utils", "_redistribute"):
            logging.getLogger(f"torch.distributed.tensor.{name}").addFilter(_should_log)


class _ResultMetas:
    """Shape, stride and dtype of results, by the operation and its arguments without their placements.

    DTensor runs each operation on fake tensors of the global shapes, again for each combination of placements. That is
    half of what planning an operation takes.
    """

    def __init__(self, propagate: Any) -> None:
        self._propagate = propagate
        self._found: dict[Any, Any] = {}

    def __call__(self, op_schema: Any) -> Any:
        try:
            key = (op_schema.op, _key(op_schema.args_schema), _key(op_schema.kwargs_schema), torch.get_default_dtype())
            if key in self._found:
                return self._found[key]
        except TypeError:  # of SymInts, or of what cannot be compared
            return self._propagate(op_schema)
        found = self._propagate(op_schema)
        if not isinstance(found, list):
            if len(self._found) >= _MAX_RESULT_METAS:
                self._found.clear()
            self._found[key] = found
        return found


_MAX_RESULT_METAS = 10_000  # about 5 MB


def _key(argument: Any) -> Any:
    """Return what tells an argument of an operation from others, except for placements; 1, 1.0 and True differ."""
    if isinstance(argument, DTensorSpec):
        meta = argument.tensor_meta
        if meta is None:
            raise TypeError
        return (argument.mesh.device_type, _key(tuple(meta.shape)), _key(tuple(meta.stride)), meta.dtype)
    if isinstance(argument, (list, tuple)):
        return (type(argument), *map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    if not isinstance(argument, _COMPARED_ARGUMENTS):
        raise TypeError
    return (type(argument), argument)


_COMPARED_ARGUMENTS = (
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _HostsOfOneDevice:
    """What DTensor's estimates ask of its mesh resources."""

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        return 1


class _RemoteOpDepth(threading.local):
    """Whether this thread runs, or plans, an operation of a remote tensor."""

    depth = 0


_remote_op_depth = _RemoteOpDepth()


@contextlib.contextmanager
def in_remote_op() -> Iterator[None]:
    """Suppress torch's warnings about DTensor collectives in this context.

    They say that gloo moves a sharding from dim to dim by gathering, and that two axes are reduced one after the other.
    That is true, repeated by every rank, and of no use to the user. Warnings about other DTensors are not affected.
    """
    _remote_op_depth.depth += 1
    try:
        yield
    finally:
        _remote_op_depth.depth -= 1


def _should_log(record: logging.LogRecord) -> bool:
    return not _remote_op_depth.depth or record.levelno >= logging.ERROR


_aten_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # its end would end the registrations


def _register_fused_steps() -> None:
    """Register the steps of fused optimizers for which torch has no sharding (all but Adam's), or no meta kernel.

    They work on each element independently, and give nothing.
    """
    rules = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    for step in (aten._fused_sgd_, aten._fused_adagrad_, aten._fused_adam_, aten._fused_adamw_):
        for operator in (step.default, step.tensor_lr):
            if operator not in rules:
                _register_single_dim_pointwise(operator)
            if not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
                _aten_library.impl(operator, lambda *args, **kwargs: None, "Meta")


def _register_other_ops() -> None:
    """Register operators that work on each image, or each element, independently."""

    # torch's own rule of the second cuts the rows of an image without a batch, too.
    DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.pop(
        aten._adaptive_avg_pool2d_backward.default, None
    )
    for operator in (aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default):

        @register_sharding(operator)  # type: ignore[untyped-decorator]
        def pool_backward(grad: Any, tensor: Any, *others: Any, **named: Any) -> Any:
            return [
                ([strategy], [strategy, strategy, *[None] * len(others)])
                for strategy in (Replicate(), Shard(0), Shard(1))[: 3 if len(tensor.shape) == 4 else 2]
            ]

    for operator in (
        aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.hardtanh_backward.default,
    ):  # fmt: skip

        @register_sharding(operator)  # type: ignore[untyped-decorator]
        def pointwise(grad: Any, tensor: Any, *others: Any) -> Any:
            strategies = [Replicate(), *map(Shard, range(len(tensor.shape)))]
            return [([strategy], [strategy, strategy, *[None] * len(others)]) for strategy in strategies]

    @register_sharding(aten._conj_physical.default)  # type: ignore[untyped-decorator]
    def conjugate(tensor: Any) -> Any:
        return [([strategy], [strategy]) for strategy in (Replicate(), *map(Shard, range(len(tensor.shape))))]

    @register_sharding(aten._prelu_kernel_backward.default)  # type: ignore[untyped-decorator]
    def slopes(grad: Any, tensor: Any, weight: Any) -> Any:
        strategies: list[Any] = [([Replicate()] * 2, [Replicate()] * 3)]
        for dim, (length, slopes) in enumerate(zip(tensor.shape, weight.shape, strict=True)):
            strategy = Shard(dim)
            strategies.append(
                ([strategy, strategy], [strategy, strategy, strategy if slopes == length else Replicate()])
            )
        return strategies


DECOMPOSED = (
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.native_group_norm_backward.default, aten.mse_loss.default, aten.mse_loss_backward.default,
    aten.huber_loss.default, aten.huber_loss_backward.default, aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default, aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default,
)  # fmt: skip

_CAST_TO_FIRST_DTYPE = (aten.huber_loss.default, aten.soft_margin_loss.default)


def torch_decomposition(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the decomposition of torch's compiler.

    DTensor averages the means of shards even where these differ in size, and passes global sizes to a shard's kernel.
    """
    from torch._decomp import decomposition_table  # slow to import

    made = decomposition_table[func](*args, **kwargs)
    if func in _CAST_TO_FIRST_DTYPE and isinstance(made, torch.Tensor):
        made = made.to(args[0].dtype)
    return made


def _change_shape_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Have a DTensor become its view of another shape.

    torch does so itself, with the results of GRU and RNN, and of a product of a vector and a matrix, which keeps its
    dim of length 1 in DTensor (2.13).
    """
    tensor = args[0]
    view: Any = getattr(torch, func._opname.removesuffix("_"))(*args, **kwargs)
    tensor._local_tensor, tensor._spec = view._local_tensor, view._spec
    return return_and_correct_aliasing(func, args, kwargs, tensor)  # type: ignore[no-untyped-call]


_SHAPES_IN_PLACE = (
    aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims, aten.unsqueeze_.default, aten.t_.default,
    aten.transpose_.default,
)  # fmt: skip


_ops_with_scalar_keys: set[Any] = set()


def include_scalars_in_cache_key(operator: Any) -> None:
    """Include an operator's int, bool and dtype arguments in DTensor's sharding cache key.

    Without this, DTensor uses the cached result of `topk(2)` for `topk(3)`, and that of `sum()` for
    `sum(dtype=torch.float64)`: by default the key omits arguments after the tensors. Integers and booleans determine
    shapes, so they belong in the key, and so does a dtype.
    """
    if operator in _ops_with_scalar_keys or not isinstance(operator, torch._ops.OpOverload):
        return
    _ops_with_scalar_keys.add(operator)
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    schema_infos = propagator.op_to_schema_info
    if operator in getattr(propagator, "op_single_dim_strategy_funcs", ()):
        schema_infos = propagator.op_to_schema_info_for_single_dim_strategy
    elif operator not in propagator.op_strategy_funcs:
        return
    info = schema_infos.get(operator) or RuntimeSchemaInfo()
    static_argnum, static_kwargs = info.static_argnum, list(info.static_kwargkey or ())
    for at, argument in enumerate(operator._schema.arguments):
        if argument.kwarg_only:
            if argument.name == "dtype" and "dtype" not in static_kwargs:
                static_kwargs.append("dtype")
        elif any(kind in str(argument.type) for kind in ("int", "bool")):
            static_argnum = min(static_argnum, at)
    if (
        updated := dataclasses.replace(info, static_argnum=static_argnum, static_kwargkey=static_kwargs or None)
    ) != info:
        schema_infos[operator] = updated


def include_scalars_in_all_cache_keys() -> None:
    """Do so for all operators that DTensor has a rule for: a module's own code may call any."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for operator in (*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs):
        include_scalars_in_cache_key(operator)


def with_actual_dtype(tensor: DTensor) -> DTensor:
    """Return a result with the dtype that its local tensor has.

    DTensor's cache does not distinguish a number, `x * 0.5`, from a zero-dim float64 tensor in the same position, and
    so reports the dtype of whichever it has seen first.
    """
    spec = tensor._spec
    meta = spec.tensor_meta._replace(dtype=tensor._local_tensor.dtype)  # type: ignore[union-attr]
    new_spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(tensor._local_tensor, new_spec, requires_grad=False)  # type: ignore[no-untyped-call]


class ShardedRNGTracker(dtensor_random.OffsetBasedRNGTracker):
    """DTensor's RNG tracker for operations of remote tensors, and for cells of ranks on a CPU.

    On a GPU torch requires this base class and asks it for offsets. It is not initialised: torch's own would look for a
    device, and broadcast the state of rank 0's generator to ranks that may not take part.
    """

    distribute_region_enabled = True

    def __init__(self) -> None:
        # Seed of the running operation; None: it has none, and draws from torch's generators.
        self.seed: int | None = None

    def _compute_rng_offsets(self, spec: Any) -> tuple[int, int]:
        if self.seed is not None:  # the generators have the seed of this shard
            return 0, 0
        offsets: tuple[int, int] = super()._compute_rng_offsets(spec)
        return offsets

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        if self.seed is not None:  # the code that set it has seeded the generators, too
            yield
            return
        # Replicas with equal seeds draw the same number; the stream advances by one.
        source = generator if generator is not None else torch.default_generator
        seed = int(torch.randint(0, 1 << 52, (), generator=source, device=source.device))
        with fork_rng_with_seed(mix_seed(seed, shard_index_of(spec)), generator):
            yield

    def _manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


# The one of this process.
RNG_TRACKER = ShardedRNGTracker()


def install_rng_tracker() -> None:
    """Have cells on a CPU, for which DTensor has no tracker, use this one, unless other code installed its own."""
    if dtensor_random._rng_tracker is None:
        dtensor_random._rng_tracker = RNG_TRACKER


@contextlib.contextmanager
def own_rng_tracker() -> Iterator[None]:
    """Have DTensor use this tracker in this context, and what it used before afterwards. Main thread of a rank only."""
    before, dtensor_random._rng_tracker = dtensor_random._rng_tracker, RNG_TRACKER
    try:
        yield
    finally:
        dtensor_random._rng_tracker = before


def shard_index_of(spec: Any) -> int:
    """Return the index of this rank's shard; replicas have the same one."""
    mesh = spec.mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    shard = 0
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard():
            shard = shard * mesh.size(axis) + coordinate[axis]
    return shard


def generators() -> list[torch.Generator]:
    """Return the process's generators: of the CPU and, if it uses one that has any, of its accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    of_devices = getattr(module, "default_generators", ())
    if not of_devices or not module.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, of_devices[module.current_device()]]


@contextlib.contextmanager
def fork_rng_with_seed(seed: int, generator: torch.Generator | None = None) -> Iterator[None]:
    """Seed the generators for this context, and restore their states afterwards.

    Args:
        generator: None: the process's own generators.
    """
    generators_used = generators() if generator is None else [generator]
    states = [each.get_state() for each in generators_used]
    for each in generators_used:
        each.manual_seed(seed)
    try:
        yield
    finally:
        for each, state in zip(generators_used, states, strict=True):
            each.set_state(state)


# Whether oneDNN was enabled before each of the LSTMs that are running.
_onednn_was_enabled: list[bool] = []


def disable_fused_lstm(module: torch.nn.LSTM) -> None:
    """Disable oneDNN while an LSTM runs: its one operation for a complete LSTM on a CPU has no DTensor rule."""

    def before(module: Any, args: Any) -> None:
        _onednn_was_enabled.append(torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)

    def after(module: Any, args: Any, result: Any) -> None:
        if _onednn_was_enabled:
            torch._C._set_mkldnn_enabled(_onednn_was_enabled.pop())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def is_strided_shard(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def without_strided_shards(tensor: Any) -> Any:
    """Gather a DTensor over the axes that cut every n-th piece of a dim, which the controller cannot plan with.

    torch places so what it makes of `flatten`, if an inner dim was cut. Anything else is returned as it is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if is_strided_shard(each) else each for each in tensor.placements]
    with torch.set_grad_enabled(tensor.requires_grad):
        return tensor if placements == list(tensor.placements) else tensor.redistribute(placements=placements)


def mix_seed(seed: int, index: int) -> int:
    """Return a seed for one of several indices; neighbours are far apart (multiples of the golden ratio)."""
    return (seed ^ (index * 0x9E3779B97F4A7C15)) & ((1 << 63) - 1)


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress torch's output to standard error about operations that are only planned."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with in_remote_op(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before
