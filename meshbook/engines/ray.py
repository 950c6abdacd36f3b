"""The ray engine: a placement group holds the nodes of a mesh, and an actor on each starts its host."""

from __future__ import annotations

import math
from pathlib import Path

from meshbook.engines.actor_engine import ActorEngine
from meshbook.engines.addresses import Address
from meshbook.engines.driver_messages import AllocateNodes
from meshbook.engines.ray_driver import RayDriver
from meshbook.wire.messages import MeshSpec


class RayEngine(ActorEngine):
    """Hosts on the nodes of one placement group; bundle number n is host n."""

    name = "ray"

    def _new_driver(self, folder: Path) -> RayDriver:
        return RayDriver(folder)

    def _first_command(self) -> AllocateNodes:
        return nodes_to_allocate(self._address, self._spec)

    def _has_workers_of_its_own(self) -> bool:
        return self._address.head == "local"


def nodes_to_allocate(address: Address, spec: MeshSpec) -> AllocateNodes:
    """Return what is asked of Ray: a core for each rank, and a GPU for each if there are any; or what the user says."""
    options = dict(address.options)
    ranks_per_node = math.prod(spec.axes.values()) // spec.num_hosts
    num_gpus = {"cpu": 0.0, "cuda": float(ranks_per_node)}.get(spec.device)
    return AllocateNodes(
        address.head,
        num_nodes=spec.num_hosts,
        num_cpus=float(options.get("num_cpus", ranks_per_node)),
        num_gpus=float(options["num_gpus"]) if "num_gpus" in options else num_gpus,
        gpus_if_any=ranks_per_node,
    )
