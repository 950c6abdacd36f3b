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
