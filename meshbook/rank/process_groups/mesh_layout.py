"""The ranks and axes for which the groups of a process are formed, and the DeviceMesh of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshbook.rank.process_groups.group_table import GroupTable
from meshbook.rank.process_groups.torch_patches import c10d

# Numbers that torch gives to groups, and names them by, between two layouts of the mesh. Processes that join later
# give the groups of the axes the same names as those that have made other groups before.
_NUMBERS_PER_LAYOUT = 1_000_000


@dataclass(frozen=True)
class MeshLayout:
    """What must be unchanged for groups to be formed again in place, unless the mesh was resized."""

    rank: int
    world_size: int
    device: torch.device
    axes: tuple[tuple[str, int], ...]
    num_resizes: int = 0
    requested_backend: str | None = None  # None: what the device needs

    @property
    def place(self) -> tuple[int, int]:
        """The rank, and the world's size."""
        return self.rank, self.world_size

    @property
    def backend(self) -> str:
        """The backend of the groups: "gloo", or "nccl"."""
        return self.requested_backend or ("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks share a GPU, which NCCL refuses."""
        return self.device.type == "cuda" and self.backend == "gloo"

    def follows(self, former: MeshLayout | None) -> bool:
        """Whether the groups of a former layout can be formed again for this one."""
        if former is None:
            return False
        is_resized = self.num_resizes > former.num_resizes
        return self == former or (is_resized and (self.rank, self.device) == (former.rank, former.device))


def make_mesh(layout: MeshLayout, table: GroupTable) -> DeviceMesh:
    """Return a new DeviceMesh of all ranks; make and connect the groups of its axes. Blocks. The world is connected."""
    before = table.names
    names, sizes = zip(*layout.axes, strict=True)
    if layout.num_resizes:
        c10d._world.group_count = layout.num_resizes * _NUMBERS_PER_LAYOUT
    try:
        return init_device_mesh(layout.device.type, sizes, mesh_dim_names=names)
    except BaseException:
        for name in table.names - before:  # the next attempt gives its groups these names
            dist.destroy_process_group(table[name])
        raise


def group_names(mesh: DeviceMesh) -> set[str]:
    """Return the names of the groups of the axes of a mesh of all ranks, and of the world's."""
    world: Any = dist.group.WORLD
    groups: Any = mesh.get_all_groups()
    return {world.label.name, *(group.label.name for group in groups)}
