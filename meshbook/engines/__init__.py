"""How hosts are started: on this machine, or through an external launcher."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.engines.base import HostEngine
from meshbook.engines.local import LocalEngine
from meshbook.engines.monarch import MonarchEngine
from meshbook.engines.ray import RayEngine
from meshbook.engines.slurm import SlurmEngine
from meshbook.engines.ssh import SshEngine
from meshbook.wire.messages import MeshSpec

# By the names that `create_mesh(engine=…)` takes.
ENGINES: dict[str, Callable[[MeshSpec], HostEngine]] = {
    "local": LocalEngine,
    "ssh": SshEngine,
    "slurm": SlurmEngine,
    "ray": RayEngine,
    "monarch": MonarchEngine,
}
