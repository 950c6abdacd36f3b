"""Creates remote tensors: from a local tensor, by a factory function, from a name that a cell bound."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue, handle_tensor_meta
from meshbook.errors import MeshShapeError, PlacementError
from meshbook.placement import parse_placements
from meshbook.rank.tensors import operators
from meshbook.tensors import dispatch, optimizers
from meshbook.tensors.call_sites import capture_call_site
from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.remote import RemoteTensor
from meshbook.tensors.views import placements_of
from meshbook.wire.messages import TensorMeta

_engines_lock = threading.Lock()
assert optimizers.__name__  # imported so that steps of optimizers are wrapped


def engine_of(mesh: Mesh) -> TensorEngine:
    """Return the engine of this mesh or slice; the same for all `Mesh` objects with equal ranks and axis names.

    Raises:
        MeshShapeError: a slice without process groups of its own, such as `mesh.slice(dp=slice(0, 2))`.
    """
    session, axes = mesh.session, mesh.grid
    session.check_attached()
    with _engines_lock:
        engines = session.extras.setdefault("tensors", {})
        engine: TensorEngine | None = engines.get(axes)
        if engine is not None and engine.sender.may_reopen:
            engine.reopen()
        if engine is None or (engine.sender.is_closed_for_good and not session.lost):
            _check_slice(mesh)
            engine = engines[axes] = TensorEngine(session, axes)
    return engine


def _check_slice(mesh: Mesh) -> None:
    full_axes, slice_axes = mesh.session.axes, mesh.grid
    assert full_axes is not None
    spec = mesh.session.info.spec
    if spec is not None and not (spec.process_group and spec.torch):
        raise MeshShapeError("remote tensors need process groups: start the mesh without --no-process-group")
    fixed = {}
    for name, size in zip(full_axes.names, full_axes.shape, strict=True):
        if name not in slice_axes.names:
            fixed[name] = {full_axes.point(rank)[name] for rank in slice_axes.ranks}
        elif slice_axes.size_of(name) != size:
            fixed[name] = {0, 1}
    ordered = [name for name in full_axes.names if name in slice_axes.names] == list(slice_axes.names)
    if not ordered or any(len(positions) > 1 for positions in fixed.values()) or not slice_axes.names:
        raise MeshShapeError(
            f"tensors lie on all of a mesh, or on a part with whole axes, such as mesh.slice({full_axes.names[0]}=0) "
            f"of {full_axes}; {slice_axes} is neither"
        )


def distribute(tensor: torch.Tensor, mesh: Mesh, placements: Any = None, *, sharding_spec: Any = None) -> RemoteTensor:
    """Place a tensor on a mesh. Copies it into shared memory once; does not wait for the ranks.

    Args:
        placements: torch's, one per axis of the mesh; default: replicated on every rank.
        sharding_spec: or, per tensor dim, the axis (or axes) that shards it: `["dp", None]`.

    Returns:
        A leaf with the tensor's `requires_grad`. Shards are split as by torch.chunk; the last may be shorter.

    Raises:
        PlacementError: they do not fit the tensor or the mesh; the text shows the arithmetic.
    """
    if isinstance(tensor, RemoteTensor):
        raise PlacementError("this tensor is on a mesh already; x.redistribute(...) places it otherwise")
    engine = engine_of(mesh)
    checked_placements = placements_of(tensor.shape, engine.axes, placements, sharding_spec)
    if any(placement.is_partial() for placement in checked_placements):
        raise PlacementError("a whole tensor is not a part of a sum; place it with Shard(dim) or Replicate()")
    result: RemoteTensor = dispatch.upload(engine, tensor, checked_placements)
    result.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return result


class activate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with mesh.activate():` makes tensors created inside, such as `torch.rand(3, 4)`, on every rank, one each."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine = engine_of(mesh)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, RemoteTensor) for leaf in leaves):
            return dispatch.dispatch(func, args, kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return func(*args, **kwargs)
        if not _returns_one_tensor(func):
            return func(*args, **kwargs)
        return run_factory(self._engine, func, args, kwargs)


def _returns_one_tensor(func: Any) -> bool:
    returned = func._schema.returns
    return func.namespace == "aten" and len(returned) == 1 and str(returned[0].type) == "Tensor"


# Factories whose result has a length that depends on floats.
_SHAPE_FROM_FLOATS = (torch.ops.aten.arange, torch.ops.aten.range)


def run_factory(engine: TensorEngine, func: Any, args: Any, kwargs: dict[str, Any]) -> RemoteTensor:
    """Run a factory function on every rank separately. Random results differ between ranks."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
    leaves = pytree.tree_leaves((args, kwargs))
    floats = [leaf for leaf in leaves if leaf.__class__ is float]
    floats_in_key = func.overloadpacket in _SHAPE_FROM_FLOATS
    key = (
        func,
        torch.get_default_dtype(),
        len(args),
        *kwargs,
        *(len(arg) if isinstance(arg, (list, tuple)) else None for arg in args),
        *(float if leaf.__class__ is float and not floats_in_key else (leaf.__class__, leaf) for leaf in leaves),
    )
    plan_kwargs = kwargs | {"device": torch.device("cpu")}
    template = engine.templates.find_or_plan(key, engine.planner.plan, func, args, plan_kwargs, [])
    made: RemoteTensor = dispatch.execute_template(engine, template, func, args, kwargs, [0], [], floats)
    return made


def adopt(mesh: Mesh, key: str, meta: TensorMeta) -> RemoteTensor | None:
    """Return a remote tensor for the one that ranks have under a key (`name:w`), with its storage. Does not wait.

    Args:
        meta: its metadata, equal on all ranks.

    Returns:
        None where this is impossible: it is on a slice of this mesh only, or the mesh has no process groups.
    """
    try:
        engine = engine_of(mesh)
        placements = None
        if meta.placements is not None:
            placements = placements_of(meta.shape, engine.axes, parse_placements(meta.placements))
    except (MeshShapeError, PlacementError):
        return None
    dtype = getattr(torch, meta.dtype)
    spec = engine.specs.intern(meta.shape, dtype, placements, meta.stride)
    adopt_args = (key, tuple(meta.shape), meta.dtype, placements, operators.MESH)
    template = engine.templates.find_or_plan(
        ("adopt", key, spec), engine.planner.plan_rank_function, "adopt", adopt_args, [spec], returns="one"
    )
    handle = engine.new_handle()
    # another name, or a repeated look-up of the same one, may share the storage
    handle.version_counter = engine.foreign_version_counter
    engine.emit([template.number, handle.id], capture_call_site())
    tensor: RemoteTensor = dispatch.wrap_handle(spec, handle)
    if meta.requires_grad and (dtype.is_floating_point or dtype.is_complex):
        tensor.requires_grad_()
    return tensor


def with_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch, with remote tensors in place of the handles among its arguments."""
    return func(*pytree.tree_map(to_remote_tensor, args), **pytree.tree_map(to_remote_tensor, kwargs))


def to_remote_tensor(leaf: Any) -> Any:
    """Return the remote tensor for a handle of a tensor; anything else unchanged.

    Raises:
        TypeError: a handle of something else.
    """
    if not isinstance(leaf, RemoteValue):
        return leaf
    session, ranks = leaf._meshbook_session, leaf._meshbook_ranks
    meta = handle_tensor_meta(leaf)
    key = leaf._meshbook_key(session)
    assert session.axes is not None
    full_mesh = Mesh.of(session, session.axes)
    found = adopt(full_mesh, key, meta) if meta is not None and len(ranks) == session.axes.size else None
    if found is None and meta is not None and meta.placements is not None:
        raise PlacementError(
            f"{leaf._meshbook_path} is a DTensor with the placements {meta.placements}, and a remote tensor has Shard, "
            f"Replicate or Partial on each axis of {session.axes}; {leaf._meshbook_path}.full_tensor() is all of it on "
            "every rank, and its redistribute(placements=…), here or in a cell, gives it others"
        )
    if found is None:
        raise TypeError(
            f"{leaf._meshbook_path} is not one tensor on every rank of {session.name!r} (alike in shape, dtype and "
            "placements); work with it in a cell, or pull it first"
        )
    if leaf._meshbook_values is not None:  # keeps the object on the ranks until the operation has read it
        found._keep_alive = leaf
    return found
