"""Build modules on a rank, from a factory or an instance, distributed by a strategy.

Initial values are those that one process would have drawn. `build` is called on every rank of a mesh with the same
arguments. What shards a factory's module has it made on the meta device first, where its values follow from that
(`initial_values`); else it is built completely on each rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import PlacementError, UsageError
from meshbook.rank.state.random_states import random_states, set_random_states
from meshbook.rank.tensors import dtensor_patches, initial_values
from meshbook.rank.tensors.blocks import find_blocks
from meshbook.rank.tensors.compiled_blocks import compile_blocks
from meshbook.rank.tensors.cut_checks import CutCheck, copy_without_data
from meshbook.rank.tensors.pipeline import pipeline_blocks
from meshbook.rank.tensors.pretrained import Pretrained, forward_without_cache, refuse_what_blocks_keep
from meshbook.rank.tensors.strategies import NAMES, Plan
from meshbook.rank.tensors.tensor_parallel import TensorCut, apply_cut, find_cut, other_dim

Source = nn.Module | Callable[[], nn.Module]
Strategy = Plan | str | Callable[[nn.Module, Any], nn.Module | None]


class Built(NamedTuple):
    """A module on this rank."""

    module: nn.Module
    states_after: Mapping[str, Any]  # of random generators, as if they had made the module
    cut: TensorCut | None  # how its layers are cut
    checks: list[CutCheck]  # of its cut layers, which run with the first forward


# Options that must be given in another way, and how.
_RESERVED_OPTIONS = {
    "module": "it is the first argument",
    "device_ids": "each rank has its own device",
    "output_device": "each rank has its own device",
    "dim": "batches are cut along dim 0",
    "process_group": "say axis=, over which batches are cut",
    "device_mesh": "say axis=, over which batches are cut",
    "mesh": "say axis=, over which batches are cut",
    "dp_mesh_dims": "say axis=, over which batches are cut",
    "delay_all_reduce_named_params": "parameters of the ranks cannot be named here",
    "param_to_hook_all_reduce": "parameters of the ranks cannot be named here",
    "ignored_params": "parameters of the ranks cannot be named here",
    "mp_policy": 'say precision="bf16"',
    "mixed_precision": 'say precision="bf16"',
}
_SIGNATURES: dict[str, Callable[..., Any]] = {"ddp": DistributedDataParallel.__init__, "fsdp": fully_shard}


def check_options(strategy: Strategy, options: Mapping[str, Any], precision: str | None) -> None:
    """Check the options of a strategy.

    Raises:
        UsageError: the strategy does not accept one of them, or it must be given in another way.
    """
    if not options:
        return
    name = ", ".join(options)
    if callable(strategy):
        raise UsageError(f"{name}: a strategy of your own gets (module, mesh); bind them to it with functools.partial")
    kind = strategy if isinstance(strategy, str) else strategy.kind
    if isinstance(strategy, Plan) and strategy.tp is not None and "shard_placement_fn" in options:
        raise UsageError(
            "shard_placement_fn is not an option with tp: what is cut over one dim is sharded over another"
        )
    function = _SIGNATURES.get(kind)
    if function is None:
        raise UsageError(f'{name}: strategy="{kind}" has no options')
    known = [known for known in inspect.signature(function).parameters if known != "self"]
    for option in options:
        alternative = _RESERVED_OPTIONS.get(option) if option in known else None
        if option == "mp_policy" and precision is None:
            continue
        if alternative is not None:
            raise UsageError(f"{option} is not an option here: {alternative}; or give a strategy of your own")
        if option not in known:
            given = ", ".join(known for known in known if known not in _RESERVED_OPTIONS)
            raise UsageError(f'distribute and strategy="{kind}" have no option {option}; the strategy has {given}')


def build(
    source: Source,
    strategy: Strategy,
    dtype: torch.dtype | None,
    mesh: DeviceMesh,
    states: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Built:
    """Build the module on this rank.

    Args:
        dtype: what forward computes in; None: the dtype of the parameters.
        states: of the random generators that the module's initial values are drawn from.
        options: arguments of the strategy's class in torch.
    """
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    previous_states = random_states()
    set_random_states(states)
    try:
        if isinstance(source, Pretrained):
            module, cut, checks = _build_pretrained(source, strategy, dtype, mesh, device, options)
        elif (from_meta := _build_on_meta(source, strategy, mesh)) is not None:
            module, cut, checks = apply_strategy(from_meta.module, strategy, mesh, dtype, device, options)
            set_random_states(states)  # discard what the meta device drew
            from_meta.fill(module, device)
        else:
            set_random_states(states)
            module, cut, checks = apply_strategy(_build_whole(source), strategy, mesh, dtype, device, options)
        states_after = {kind: state for kind, state in random_states().items() if kind in states}
        return Built(module, states_after, cut, checks)
    finally:
        set_random_states(previous_states)


def _build_on_meta(source: Source, strategy: Strategy, mesh: DeviceMesh) -> initial_values.FromMeta | None:
    """Return a factory's module on the meta device, if a plan shards it and it can be filled afterwards."""
    is_sharded = isinstance(strategy, Plan) and (strategy.fsdp is not None or strategy.pp is not None)
    if not is_sharded or isinstance(source, nn.Module):
        return None
    return initial_values.build_on_meta(source, lambda num_bytes: initial_values.fits_on_all_ranks(num_bytes, mesh))


def _build_pretrained(
    source: Pretrained,
    strategy: Strategy,
    dtype: torch.dtype | None,
    mesh: DeviceMesh,
    device: torch.device,
    options: Mapping[str, Any],
) -> tuple[nn.Module, TensorCut | None, list[CutCheck]]:
    """Build a model that is read from files: where a plan cuts it, each rank reads its parts."""

    def apply(module: nn.Module) -> tuple[nn.Module, TensorCut | None, list[CutCheck]]:
        return apply_strategy(module, strategy, mesh, dtype, device, options)

    if isinstance(strategy, Plan) and strategy.kind != "ddp":
        applied: list[Any] = []
        module = source.load(device, lambda module: applied.append(apply(module)))
        _, cut, checks = applied[-1]
    else:
        module, cut, checks = apply(source.load(device, None))
    return module, cut, checks


def _build_whole(source: Source) -> nn.Module:
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise TypeError(f"the factory gave a {type(module).__name__}, not a torch.nn.Module")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "this module is on the meta device and has no values; pass the function that makes it instead, or "
            "materialise it first with module.to_empty(device='cpu') and initialise it"
        )
    return module


def without_data(source: Source) -> Source:
    """Return a factory as it is, and of a module a copy on the meta device."""
    return copy_without_data(source) if isinstance(source, nn.Module) else source


def apply_strategy(
    module: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    device: torch.device,
    options: Mapping[str, Any],
) -> tuple[nn.Module, TensorCut | None, list[CutCheck]]:
    """Distribute a module. Tensors from shared memory are copied, so that the rank owns them."""
    use_dense_gradients(module)
    if not isinstance(strategy, (Plan, str)):
        return strategy(module.to(device), mesh) or module, None, []
    if strategy == "replicate":
        _copy_to_device(module, device)
        _replicate(module, mesh)
        return module, None, []
    if not isinstance(strategy, Plan):
        raise ValueError(f"there is no strategy {strategy!r}; known: {', '.join(NAMES)}, a Plan, or a function")
    cut, checks = None, []
    if strategy.tp is not None:
        cut = find_cut(module, mesh[strategy.tp].size(), strategy.tp_plan)
        checks = apply_cut(module, cut, mesh[strategy.tp], whole_biases=strategy.fsdp is not None)
        if strategy.fsdp is not None:
            _check_second_dims(module, mesh[strategy.fsdp].size(), strategy.fsdp)
            options = {"shard_placement_fn": other_dim, **options}
    if (interval := strategy.checkpoint_interval) is not None:
        blocks = find_blocks(module)
        if len(blocks) < interval:
            raise UsageError(
                f"ac={strategy.ac!r}: {len(blocks)} repeated blocks were found in this {type(module).__name__}; call "
                "torch.utils.checkpoint.checkpoint in its forward instead"
            )
        for block in blocks[interval - 1 :: interval] if strategy.pp is None else ():
            checkpoint(block)
        forward_without_cache(module)
    if (backend := strategy.compile_backend) is not None:
        compile_blocks(find_blocks(module) or [module], backend)
    if strategy.fsdp is not None:
        axes = strategy.batch_axes
        return _apply_fsdp(module, mesh[axes if len(axes) > 1 else axes[0]], dtype, device, options), cut, checks
    if strategy.pp is not None:
        microbatches, interval = strategy.microbatches, strategy.checkpoint_interval
        pipeline_blocks(module, mesh[strategy.pp], microbatches=microbatches, checkpoint_interval=interval)
        refuse_what_blocks_keep(module)
    _copy_to_device(module, device)
    if strategy.ddp is None or strategy.pp is not None:  # a pipeline's gradients are averaged after its backward
        return module, cut, checks
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("no parameter of the module requires a gradient; use strategy='replicate' for inference")
    return wrap_ddp(module, mesh, strategy.ddp, options), cut, checks


def use_dense_gradients(module: nn.Module) -> None:
    """Have embeddings give dense gradients, the same numbers: no strategy has sparse ones, nor have remote tensors."""
    for submodule in module.modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)):
            submodule.sparse = False


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Like torch's `distribute_module`, which would make a tensor that has two names two tensors."""
    dtensor_patches.include_scalars_in_all_cache_keys()
    made: dict[torch.Tensor, torch.Tensor] = {}
    for submodule in module.modules():
        if isinstance(submodule, nn.LSTM):
            dtensor_patches.disable_fused_lstm(submodule)
        parameters: dict[str, Any] = submodule._parameters
        for held in (parameters, submodule._buffers):
            for name, tensor in held.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if tensor not in made:
                    whole: torch.Tensor = distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)
                    if isinstance(tensor, nn.Parameter):
                        whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
                    made[tensor] = whole
                held[name] = made[tensor]


def _check_second_dims(module: nn.Module, size: int, axis: str) -> None:
    for name, parameter in module.named_parameters():
        if (other := other_dim(parameter)) is not None and parameter.shape[other.dim] % size:
            width = parameter.shape[other.dim]
            raise PlacementError(
                f"{name} is cut over tp along dim 0, and its dim {other.dim} of {width} cannot be sharded evenly over "
                f"{axis}={size}: {width} = {width // size} x {size} + {width % size}"
            )


def _copy_to_device(module: nn.Module, device: torch.device) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor) and not tensor.is_meta:
                tensor.data = tensor.data.to(device, copy=True)


def wrap_ddp(module: nn.Module, mesh: DeviceMesh, axis: str | int, options: Mapping[str, Any]) -> nn.Module:
    """Wrap the module in DDP, which averages the gradients of the parameters that require one now."""
    return DistributedDataParallel(module, process_group=mesh.get_group(axis), **options)


def _apply_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    device: torch.device,
    user_options: Mapping[str, Any],
) -> nn.Module:
    options: dict[str, Any] = {**user_options, "mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in find_blocks(module):
        _move_to_device(block, device)
        fully_shard(block, **options)
    _move_to_device(module, device)
    fully_shard(module, **options)
    return module


def _move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move to the device what is not sharded yet and has values."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)


def averages_gradients(module: nn.Module) -> bool:
    """Whether the module averages gradients over the ranks that have other rows."""
    return isinstance(module, (FSDPModule, DistributedDataParallel))


def runs_locally(module: nn.Module, strategy: Strategy, mesh: DeviceMesh) -> bool:
    """Whether forward takes and returns this rank's plain tensors; otherwise DTensors of the complete mesh."""
    if isinstance(strategy, Plan):
        return True
    meshes = {tensor.device_mesh for tensor in module.parameters() if isinstance(tensor, DTensor)}
    return averages_gradients(module) or meshes != {mesh}


def inner_module(module: nn.Module) -> nn.Module:
    """Return the user's module, without DDP around it."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every parameter and buffer under each of its names, and whether it is a parameter."""
    inner = inner_module(module)
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in inner.named_buffers(remove_duplicate=False):
        yield name, buffer, False


def as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the same storage as a DTensor of the complete mesh, replicated over axes that its own mesh lacks."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.device_mesh == mesh:
        return tensor
    placement_of_axis = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    placements = [placement_of_axis.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]
    return DTensor.from_local(
        tensor.to_local(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
