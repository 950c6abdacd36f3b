"""References to meshes of processes and of actors: plain data that any process can send and use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshbook.actors.base import EndpointInfo
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.transport import local_transport
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import NodeAddress


@dataclass(frozen=True)
class ProcMeshRef:
    """A location-independent reference to a mesh of processes: enough to spawn on it and to stop it."""

    name: str
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    addresses: tuple[NodeAddress, ...]
    mesh: str | None  # name of its Meshbook mesh; None: a process that is no rank of a mesh


class ObjectReferences(Protocol):
    """Knows the keys of objects that the ranks of a mesh hold themselves."""

    def persistent_id_for(self, ranks: Sequence[int], pinned: list[Any]) -> Callable[[Any], str | None]:
        """Return a function from an object to its key on these ranks; keeps what it has found in `pinned`."""


class ActorRef:
    """The location-independent description of a mesh of actors, shared by all its slices."""

    def __init__(
        self,
        id: str,
        name: str,
        class_name: str,
        endpoints: dict[str, EndpointInfo],
        methods: frozenset[str],
        addresses: tuple[NodeAddress, ...],
        procs_ref: ProcMeshRef | None,
        Class: type | None = None,
    ) -> None:
        self.id, self.name, self.class_name = id, name, class_name
        self.endpoints, self.methods = endpoints, methods
        self.addresses, self.procs_ref = addresses, procs_ref
        self.Class = Class  # only where it was spawned; not pickled
        self.references: ObjectReferences | None = None
        self.mesh_ranks: tuple[int, ...] = ()  # ranks in the mesh of `references`
        self._peers: list[Any] = [None] * len(addresses)

    @property
    def axes(self) -> MeshAxes:
        """The axes of all its actors, as they were spawned."""
        num_actors = len(self.addresses)
        if self.procs_ref is None:
            return MeshAxes(("rank",), (num_actors,), tuple(range(num_actors)))
        return MeshAxes(self.procs_ref.axis_names, self.procs_ref.axis_sizes, tuple(range(num_actors)))

    def peer(self, rank: int) -> Any:
        """Return the connection to the actor at `rank`; for a lost one, an object that raises PeerLost on `send`."""
        found = self._peers[rank]
        if found is None or found.lost_reason is not None:
            try:
                found = local_transport().peer(self.addresses[rank])
            except PeerLost as error:
                found = _LostPeer(rank, str(error), self.addresses[rank], getattr(found, "announced_exit", None))
            self._peers[rank] = found
        return found

    def __reduce__(self) -> Any:
        return ActorRef, (
            self.id, self.name, self.class_name, self.endpoints, self.methods, self.addresses, self.procs_ref,
        )  # fmt: skip


class _LostPeer:
    is_local = True

    def __init__(self, rank: int, reason: str, address: NodeAddress, announced_exit: str | None) -> None:
        self.id, self.lost_reason, self.address, self.announced_exit = -1 - rank, reason, address, announced_exit

    def send(self, data: bytes) -> None:
        raise PeerLost(self.lost_reason)
