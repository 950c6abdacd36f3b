"""FSDP2's own records of a model's parameters, made anew for another number of ranks.

Depends on the internals of FSDP2. Where it can, it has FSDP2 compute them: a parameter without memory is given to the
code that `fully_shard` runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshbook.rank.process_groups.interrupted_steps import fsdp_param_groups, fsdp_state
from meshbook.rank.process_groups.live_objects import instances_of
from meshbook.rank.resharding.boxes import Cut, box_of, shape_of, size_of


def param_groups_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of FSDP2 in a module."""
    for inner in module.modules():
        if hasattr(inner, "_get_fsdp_state") and (state := fsdp_state(inner)) is not None:
            yield from fsdp_param_groups(state)


def all_param_groups() -> Iterator[Any]:
    """Yield the parameter groups of all models that are alive, also of those that no name leads to."""
    from torch.distributed.fsdp import FSDPModule

    for module in instances_of(FSDPModule):
        if (state := fsdp_state(module)) is not None:
            yield from fsdp_param_groups(state)


def problem_of(group: Any, axes: tuple[str, ...] | None) -> str:
    """Return why a parameter group cannot be cut anew; "" if it can.

    Args:
        axes: of the group's DeviceMesh, as `Cut` has them; None: it is no slice of `mesh`.
    """
    info, after = group.mesh_info, group.post_forward_mesh_info
    if getattr(info, "is_spmd_mesh", False):
        return "it uses fully_shard(dp_mesh_dims=...)"
    if axes is None:
        return f"it uses {info.mesh}, which is no slice of `mesh`: what it would be with other ranks is not known"
    if after is not None and after is not info and after != info:
        return "it uses fully_shard(reshard_after_forward=<a number>)"
    for what in ("all_gather", "reduce_scatter"):
        comm = getattr(group, f"_{what}_comm", None)
        if comm is not None and not type(comm).__name__.startswith("Default"):
            return f"it uses a {what.replace('_', '-')} of its own ({type(comm).__name__})"
    if getattr(info, "reduce_scatter_process_group", None) is not None:
        return "it uses set_separate_reduce_scatter_group"
    if getattr(group, "_partial_reduce_output", None) is not None:
        return "it has gradients that are not reduced yet; finish the step first"
    for param in group.fsdp_params:
        unsharded = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
            return "it has gradients that are not reduced yet; finish the step first"
        if hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather"):
            return f"{param._param_fqn or param._module_info.param_name} has an all-gather of its own (quantized)"
    return ""


def why_uneven(param: Any, cut: Cut, sizes: Mapping[str, int]) -> str:
    """Return why FSDP2 cannot cut a parameter for the mesh of these axes; "" if it can: dims but the first evenly."""
    dim = param.fsdp_placement.dim
    if not dim:
        return ""
    of_fsdp = param.mesh_info.mesh.mesh_dim_names or cut.axes
    others = Cut(
        cut.axes, tuple(-1 if axis in of_fsdp else d for axis, d in zip(cut.axes, cut.dims, strict=True)), cut.late
    )
    parts = size_of(of_fsdp[-1], sizes)
    for rank in range(math.prod(sizes.values())):
        length = shape_of(box_of(param.sharded_param.shape, others, sizes, rank))[dim]
        if length % parts:
            return f"FSDP2 cuts dim {dim} evenly only, and its {length} are no multiple of {parts} ranks"
    return ""


def padded_shape(param: Any, cut: Cut, sizes: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's part with the padding that makes all parts equal: that of the first one."""
    names = param.mesh_info.mesh.mesh_dim_names or cut.axes
    return shape_of(box_of(param.sharded_param.shape, cut, sizes, rank, at=dict.fromkeys(names, 0)))


def renew_mesh_infos(groups: list[Any]) -> None:
    """Read the sizes, ranks and groups of DeviceMeshes anew, which have other ranks now."""
    infos = {id(info): info for group in groups for info in (group.mesh_info, group.post_forward_mesh_info) if info}
    infos |= {id(info): info for group in groups for param in group.fsdp_params if (info := param.mesh_info)}
    for info in infos.values():
        info.__post_init__()


@torch.no_grad()
def renew_param(param: Any, padded: torch.Tensor) -> None:
    """Make FSDP2's record of a parameter anew, around this memory; the parameter stays the same object."""
    parameter = param.sharded_param
    kept = {name: getattr(param, name) for name in ("_orig_param_uid",) if hasattr(param, name)}
    whole = _without_memory(param, parameter)
    dim = param.fsdp_placement.dim
    param._init_sharded_param(whole, param.device, lambda _: Shard(dim), param.mesh_info)
    assert tuple(param.padded_sharded_param_size) == tuple(padded.shape), (
        param.padded_sharded_param_size,
        padded.shape,
    )
    local = padded.narrow(dim, 0, param.sharded_size[dim])
    parameter._local_tensor, parameter._spec = local, param._sharding_spec
    param._sharded_param_data = padded.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    if param.post_forward_mesh_info:
        param._init_sharded_post_forward_param_metadata(whole)
    param._init_extensions()
    param.all_gather_outputs = []
    param.unsharded_accumulated_grad = None
    param.__dict__.pop("_unsharded_param", None)
    for name, value in kept.items():
        setattr(param, name, value)


def _without_memory(param: Any, parameter: DTensor) -> torch.nn.Parameter:
    """Return a parameter like the one that `fully_shard` was given, on the meta device."""
    spec = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)
    shape, dtype = parameter.shape, parameter.dtype
    if spec is None:
        return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), parameter.requires_grad)
    local_shape, _ = compute_local_shape_and_global_offset(shape, spec.mesh, spec.placements)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    renewed = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    local = torch.empty(local_shape, dtype=dtype, device="meta")
    return torch.nn.Parameter(DTensor(local, renewed, requires_grad=False), parameter.requires_grad)  # type: ignore[no-untyped-call]
