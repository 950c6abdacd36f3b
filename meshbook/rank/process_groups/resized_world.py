"""What of a process's groups stays when the mesh has more or fewer ranks: the world group, and what is built on it.

Groups of all ranks, the world first, keep their objects: DDP models over them, and whatever else refers to them, go on
with another number of members. Groups of axes, groups with a member that has left, and DeviceMeshes of the former world
cannot go on: their use raises an error that says so.

Depends on the internals of torch's DeviceMesh and DistributedSampler.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.rank.process_groups.failures import GroupBroken, GroupFailure
from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.live_objects import instances_of
from meshbook.rank.process_groups.torch_patches import c10d
from meshbook.rank.process_groups.watched_group import WatchedGroup

T = TypeVar("T")


class FormerDeviceMesh(DeviceMesh):
    """A DeviceMesh of the mesh's ranks before it was resized."""

    def get_group(self, mesh_dim: int | str | None = None) -> NoReturn:
        raise GroupBroken(
            f"this DeviceMesh is of the {self.mesh.numel()} ranks that the mesh had before it was resized; use `mesh`, "
            "or make it anew"
        )

    def get_all_groups(self) -> NoReturn:
        self.get_group()


def adapt_groups(table: GroupTable, of_mesh: Collection[str], rank: int, world_size: int) -> list[Any]:
    """Give groups of all ranks the members that there are now, and drop what is of the world before a resize.

    Call it before the groups are connected anew; again if that failed.

    Args:
        of_mesh: names of the groups of the former mesh, the world's among them.

    Returns:
        the backends of the dropped groups.
    """
    world: Any = dist.group.WORLD
    former_size = world.size()
    of_axes, resized = set(of_mesh) - {world.label.name}, set[str]()
    dropped = []
    for group in table:
        if group.label.ranks == tuple(range(former_size)) and group.label.name not in of_axes:
            _set_members(group, world_size)
            resized.add(group.label.name)
        elif group.label.name in of_axes or max(group.label.ranks) >= world_size:
            table.remove(group)
            dropped.append(_break_for_good(group, former_size, world_size))
    _retire_device_meshes(table.names - resized)
    _deal_samplers_anew(rank, former_size, world_size)
    return dropped


def _set_members(group: WatchedGroup, world_size: int) -> None:
    """Make all ranks members of a group that had all ranks as members, before it is connected anew."""
    group.label.set_ranks(range(world_size))
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}


def _break_for_good(group: WatchedGroup, former_size: int, world_size: int) -> tuple[Any, ...]:
    """Have whoever uses a group learn that it is not formed again; return its backends."""
    backends = group.detach_backends()
    reason = f"the mesh was resized from {former_size} to {world_size} ranks; make the group anew"
    group.health.invalidate(GroupFailure(reason, for_good=True))
    return backends


def _retire_device_meshes(lasting: Collection[str]) -> None:
    """Have DeviceMeshes raise an error where their groups are asked for, unless all of these last (by name)."""
    for mesh in instances_of(DeviceMesh):
        names: Sequence[str] | None = getattr(mesh, "_dim_group_names", None)
        if type(mesh) is DeviceMesh and names is not None and not set(names) <= set(lasting):
            mesh.__class__ = FormerDeviceMesh


def axes_of(mesh: DeviceMesh, root: DeviceMesh) -> tuple[str, ...] | None:
    """Return the axes of `root`, the DeviceMesh of all ranks, that a DeviceMesh is a slice of.

    `("",)` stands for one of a single dim that has all ranks over the world's group, as `fully_shard` makes by default;
    None: it is neither.
    """
    names, of_root = mesh.mesh_dim_names, root.mesh_dim_names
    assert of_root is not None
    world: Any = dist.group.WORLD
    if names and set(names) <= set(of_root) and mesh._get_root_mesh() is root:
        is_slice = mesh is root or mesh == (root if names == of_root else root[names])
        return names if is_slice else None
    if mesh.ndim == 1 and getattr(mesh, "_dim_group_names", None) == [world.label.name]:
        return ("",)
    return None


class LastingMeshes:
    """The DeviceMeshes that stay the same objects when the mesh is resized: `mesh`, its slices, those of all ranks."""

    def __init__(self) -> None:
        self._found: list[tuple[DeviceMesh, tuple[str, ...]]] = []

    def find(self, root: DeviceMesh | None, names: Collection[str]) -> None:
        """Find them, before the groups are adapted; a no-op after an attempt that has failed since.

        Args:
            root: the DeviceMesh of all ranks.
            names: of the axes that the mesh is to have.
        """
        for mesh in instances_of(DeviceMesh) if not self._found else ():
            is_formed = root is not None and type(mesh) is DeviceMesh and hasattr(mesh, "_dim_group_names")
            axes = axes_of(mesh, root) if is_formed and root is not None else None
            if axes is not None and (mesh is root or axes == ("",) or set(axes) <= set(names)):
                self._found.append((mesh, axes))

    def become(self, root: DeviceMesh | None, mesh: DeviceMesh) -> DeviceMesh:
        """Have them be as those of the ranks that there are, and return the DeviceMesh of all.

        Args:
            root: that of before, which becomes equal to `mesh`; None: there was none.
            mesh: of the ranks that there are.
        """
        if root is None:
            return mesh
        _become(root, mesh)
        for one, axes in self._found:
            if one is root:
                continue
            if axes == ("",):
                ranks = list(range(mesh.mesh.numel()))
                _become(one, DeviceMesh(mesh.device_type, ranks, mesh_dim_names=one.mesh_dim_names))
            else:
                _become(one, root if axes == root.mesh_dim_names else root[axes])
                one._root_mesh = root
        self._found = []
        return root


def _become(mesh: DeviceMesh, other: DeviceMesh) -> None:
    mesh.__class__ = DeviceMesh
    vars(mesh).clear()
    vars(mesh).update(vars(other))
    mesh._flatten_mapping = {}


def _deal_samplers_anew(rank: int, former_size: int, world_size: int) -> None:
    """Have each DistributedSampler that dealt to all ranks deal to as many as there are now, from its next epoch on."""
    samplers: Any = sys.modules.get("torch.utils.data.distributed")
    if samplers is None:
        return
    for sampler in instances_of(samplers.DistributedSampler):
        if (sampler.num_replicas, sampler.rank) == (former_size, rank):
            epoch = sampler.epoch
            samplers.DistributedSampler.__init__(
                sampler, sampler.dataset, world_size, rank, sampler.shuffle, sampler.seed, sampler.drop_last
            )
            sampler.epoch = epoch
