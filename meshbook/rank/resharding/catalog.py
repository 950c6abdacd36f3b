"""All DTensors that the user's names lead to, by where they are found: the same place leads to the same on other ranks.

Depends on the internals of torch's DTensor.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from meshbook.rank.previews.digests import PLAIN_TYPES
from meshbook.rank.process_groups.resized_world import axes_of
from meshbook.rank.resharding.boxes import Box, Cut, box_of, shape_of

# The name, then names of parameters, keys, attributes. Two names may lead to one tensor.
Path = tuple[str, ...]

# Objects that are looked at. What refers to more of them (a large data set) has no DTensors after these.
_MAX_OBJECTS = 1_000_000
_MAX_DEPTH = 40
# Objects through which every other one can be reached.
_NOT_FOLLOWED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)


@dataclass
class Entry:
    """A DTensor.

    Attributes:
        paths: where it is found, all of them.
        held: parts of it that this rank has, and their memory.
        target: this rank's part in the mesh of the new axes; None: not yet allocated.
        padded: the same with the padding of FSDP2, of which `target` is the beginning.
        param: FSDP2's record of it, if it is a parameter of FSDP2.
    """

    tensor: DTensor
    paths: list[Path]
    cut: Cut
    held: list[tuple[Box, torch.Tensor]] = field(default_factory=list)
    target: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    param: Any = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def read_catalog(
    namespace: Mapping[str, Any], names: Sequence[str], root: DeviceMesh, rank: int, params: Mapping[int, Any]
) -> tuple[list[Entry], dict[str, str]]:
    """Return the DTensors that names lead to, and by name why one of them cannot be cut anew.

    Args:
        root: of all ranks.
        params: FSDP2's records of parameters, by the parameters' ids.
    """
    assert root.mesh_dim_names is not None
    sizes = dict(zip(root.mesh_dim_names, root.mesh.shape, strict=True))
    entries: dict[int, Entry] = {}
    problems: dict[str, str] = {}
    for name in names:
        for path, tensor in walk(namespace[name], name):
            if (entry := entries.get(id(tensor))) is not None:
                entry.paths.append(path)
                continue
            try:
                cut = _cut_of(tensor, root, params.get(id(tensor)))
                box = box_of(tensor.shape, cut, sizes, rank)
                local = _local_memory(tensor)
                if tuple(local.shape) != shape_of(box):
                    raise ValueError(f"{'.'.join(path)} is cut in a way that is not known here: {tensor._spec}")
            except ValueError as error:
                problems.setdefault(name, str(error))
                continue
            entries[id(tensor)] = Entry(tensor, [path], cut, [(box, local)], param=params.get(id(tensor)))
    _cut_as_parameters(list(entries.values()))
    known = {*entries, *params}
    for name in names:
        if name not in problems and (other := _find_other(namespace[name], known)) is not None:
            problems[name] = f"it refers to a DTensor of shape {tuple(other.shape)} that is no parameter, state or item"
    return list(entries.values()), problems


def placements_of(cut: Cut, sizes: Mapping[str, int]) -> tuple[Placement, ...]:
    """Return torch's placements of a tensor on the mesh of these axes."""
    found: list[Placement] = []
    for at, dim in enumerate(cut.dims):
        factor = cut.split_factor(at, sizes)
        if dim < 0:
            found.append(Replicate())
        else:
            found.append(Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor))
    return tuple(found)


def walk(value: Any, *path: str) -> Iterator[tuple[Path, DTensor]]:
    """Yield all DTensors that a value leads to, in an order that is equal for equal values on other ranks."""
    yield from _walk(value, path, set(), 0)


def _walk(value: Any, path: Path, seen: set[int], depth: int) -> Iterator[tuple[Path, DTensor]]:
    if type(value) in PLAIN_TYPES or isinstance(value, (_NOT_FOLLOWED, DeviceMesh)) or id(value) in seen:
        return
    seen.add(id(value))
    if depth > _MAX_DEPTH or len(seen) > _MAX_OBJECTS:
        return
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            yield path, value
        if value.is_leaf and isinstance(value.grad, DTensor):
            yield (*path, "grad"), value.grad
        return
    for key, inner in _items(value):
        yield from _walk(inner, (*path, key), seen, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, torch.optim.Optimizer):
        params = [param for group in value.param_groups for param in group["params"]]
        for at, param in enumerate(params):
            yield f"param {at}", param
            for key, state in value.state.get(param, {}).items():
                yield f"state {at}.{key}", state
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield (str(key) if type(key) in PLAIN_TYPES else type(key).__name__), inner
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            yield str(at), inner
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from list(vars(value).items())


def _local_memory(tensor: DTensor) -> torch.Tensor:
    local: Any = tensor._local_tensor
    if hasattr(local, "wait"):  # the result of a collective that is under way
        local = tensor._local_tensor = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"its parts are of class {type(local).__name__}")
    if local.layout is not torch.strided or local.is_meta or local.is_quantized:
        raise ValueError("its parts are no dense memory")
    found: torch.Tensor = local.detach()
    return found


def _cut_of(tensor: DTensor, root: DeviceMesh, param: Any) -> Cut:
    """Raises ValueError: it cannot be cut anew; the text says why."""
    axes = axes_of(tensor.device_mesh, root)
    if axes is None:
        raise ValueError(
            f"it uses {tensor.device_mesh}, which is no slice of `mesh`: what it would be with other ranks is not known"
        )
    dims, late = [], []
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError("it holds partial sums; redistribute it first")
        dims.append(-1 if placement.is_replicate() else placement.dim)  # type: ignore[attr-defined]
        late.append(isinstance(placement, _StridedShard) and placement.split_factor > 1)
    spec: Any = tensor._spec
    order = getattr(spec, "shard_order", None)
    if order is not None and order != spec.compute_default_shard_order(tensor.placements):
        raise ValueError(f"its axes cut it in an order of their own: {order}")
    if (
        param is not None and param.is_dtensor
    ):  # FSDP2 cuts what tensor parallelism has cut, also where that is one part
        of_fsdp = param.mesh_info.mesh.mesh_dim_names or ()
        late = [
            dim >= 0 and axis in of_fsdp and dim in [d for a, d in zip(axes, dims, strict=True) if a not in of_fsdp]
            for axis, dim in zip(axes, dims, strict=True)
        ]
    return Cut(axes, tuple(dims), tuple(late))


def _cut_as_parameters(entries: Sequence[Entry]) -> None:
    """Have gradients and an optimizer's state be cut as the parameters of FSDP2 that they belong to."""
    cuts = {(entry.cut.axes, entry.cut.dims, entry.tensor.shape): entry.cut for entry in entries if entry.param}
    for entry in entries:
        entry.cut = cuts.get((entry.cut.axes, entry.cut.dims, entry.tensor.shape), entry.cut)


def _find_other(value: Any, known: set[int]) -> DTensor | None:
    """Return a DTensor that a value refers to in any way, and that is none of these."""
    if isinstance(value, _NOT_FOLLOWED):
        return None
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _MAX_OBJECTS:
        one = pending.pop()
        if isinstance(one, DTensor) and id(one) not in known:
            return one
        if type(one).__name__ == "FSDPParam":  # its own parts are made anew
            continue
        for inner in gc.get_referents(one):
            if id(inner) not in seen and gc.is_tracked(inner) and not isinstance(inner, _NOT_FOLLOWED):
                seen.add(id(inner))
                pending.append(inner)
    return None
