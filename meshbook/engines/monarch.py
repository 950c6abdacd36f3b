"""The monarch engine: a Monarch job gives hosts, and an actor on each starts Meshbook's own host there."""

from __future__ import annotations

from pathlib import Path

from meshbook.engines.actor_engine import ActorEngine
from meshbook.engines.addresses import Address
from meshbook.engines.driver_messages import AllocateJob
from meshbook.engines.monarch_driver import MonarchDriver


class MonarchEngine(ActorEngine):
    """Hosts on the first hosts of a job's mesh, each with a ProcMesh of its own, so that the loss of one is its own."""

    name = "monarch"

    def _new_driver(self, folder: Path) -> MonarchDriver:
        return MonarchDriver(folder)

    def _first_command(self) -> AllocateJob:
        return job_to_allocate(self._address, self._spec.num_hosts)

    def _has_workers_of_its_own(self) -> bool:
        return self._address.job in ("process", "local")


def job_to_allocate(address: Address, num_hosts: int) -> AllocateJob:
    """Return what is asked of Monarch."""
    options = dict(address.options)
    if address.python is not None:
        options["python"] = address.python
    file, _, name = address.job.rpartition(":")
    return AllocateJob("" if file else address.job, num_hosts, options, file, name if file else "")
