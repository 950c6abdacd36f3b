"""`meshbook.distribute`: brings a tensor or a module to a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn

from meshbook.controller.mesh import Mesh
from meshbook.errors import UsageError
from meshbook.rank.tensors.pretrained import Pretrained
from meshbook.tensors import creation, modules
from meshbook.tensors.modules import RemoteModule
from meshbook.tensors.remote import RemoteTensor


@overload
def distribute(
    thing: torch.Tensor,
    mesh: Mesh | None = None,
    placements: Any = None,
    *,
    device_mesh: Mesh | None = None,
    sharding_spec: Sequence[Any] | None = None,
) -> RemoteTensor: ...


@overload
def distribute(
    thing: nn.Module | Callable[[], nn.Module] | str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    device_mesh: Mesh | None = None,
    strategy: Any = "fsdp",
    precision: str | None = None,
    compile: bool | str = False,
    axis: str | None = None,
    sample: Any = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    **strategy_options: Any,
) -> RemoteModule: ...


def distribute(
    thing: Any,
    mesh: Mesh | None = None,
    placements: Any = None,
    *,
    device_mesh: Mesh | None = None,
    sharding_spec: Sequence[Any] | None = None,
    strategy: Any = None,
    precision: str | None = None,
    compile: bool | str = False,
    axis: str | None = None,
    sample: Any = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    **strategy_options: Any,
) -> Any:
    """Bring a tensor to a mesh, or build a module there.

        model = meshbook.distribute("path/of/a/model", mesh, strategy="fsdp")  # of Hugging Face

    A tensor is copied into shared memory once; this does not wait. A module, or a function that makes one, is built on
    the ranks by a strategy; this waits until it is built. Of a Hugging Face model in a folder, or on the hub, each rank
    reads the parts that it will have.

    Args:
        device_mesh: the mesh, by the name that torch's own functions have for it.
        placements: of a tensor: torch's, one per axis of the mesh; default: replicated on every rank.
        sharding_spec: or, per tensor dim, the axis (or axes) that shards it: `["dp", None]`.
        strategy: of a module: "fsdp" (the default), "ddp", "hsdp", "tp", "fsdp+tp", "replicate", a Plan, a
            function of (module, DeviceMesh), or "auto": the fastest plan that fits, for `sample`.
        precision: of a module: "bf16" or "fp16" computes in it; parameters and gradients keep their dtype.
        compile: of a module: True has the ranks compile its repeated blocks by torch.compile; a str names the backend.
        axis: of a module: the axis that shards batches.
        sample: of a module: a batch as it will be called with (a tuple: its arguments; a dict: those by keyword). What
            plans would cost is then in `model.plan`.
        memory: of a module, with a sample: bytes that a rank may use; None: what is free.
        dtype: of a model in a folder: its parameters are converted to it; None: as they were saved.
        strategy_options: of a module: options of DistributedDataParallel (`find_unused_parameters=True`) or fully_shard
            (`reshard_after_forward=False`).

    Returns:
        RemoteTensor, a leaf with the tensor's `requires_grad`; or RemoteModule.

    Raises:
        PlacementError: placements that do not fit the tensor or the mesh; the text shows the arithmetic.
        CellError: building the module failed on ranks, with their traceback.
        UsageError: an argument for tensors was given with a module, or the other way round.
    """
    if (mesh is None) == (device_mesh is None):
        raise UsageError("which mesh? meshbook.distribute(model, mesh), or device_mesh=mesh, and one of them")
    mesh = mesh or device_mesh
    assert mesh is not None
    if isinstance(thing, torch.Tensor):
        given = (strategy, precision, compile or None, axis, sample, memory)
        if strategy_options or any(option is not None for option in given):
            raise UsageError(
                f"{', '.join(strategy_options) or 'strategy, precision and axis'} are for modules; a tensor takes "
                "placements or sharding_spec"
            )
        return creation.distribute(thing, mesh, placements, sharding_spec=sharding_spec)
    if isinstance(thing, (str, os.PathLike)):
        thing = Pretrained(os.path.abspath(thing) if os.path.exists(thing) else os.fspath(thing), dtype)
    elif dtype is not None:
        raise UsageError("dtype= is for models that are read from a folder; a module has its own")
    if not isinstance(thing, nn.Module) and not callable(thing):
        raise UsageError(
            f"a {type(thing).__name__} cannot be distributed; give a tensor (torch.as_tensor(x)), a module, or a "
            "function that makes one; other data goes by mesh.push or mesh.scatter"
        )
    if placements is not None or sharding_spec is not None:
        raise UsageError(
            "placements and sharding_spec are for tensors; a module takes a strategy, or goes by "
            "meshbook.module_to_mesh(module, mesh, placements)"
        )
    return modules.distribute_module(
        thing,
        mesh,
        strategy=strategy or "fsdp",
        precision=precision,
        compile=compile,
        axis=axis,
        sample=sample,
        memory=memory,
        options=strategy_options,
    )
