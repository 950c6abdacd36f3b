"""Who am I: the actor and the message that the running code belongs to.

Kept in a context variable, so that it is right on an actor's thread and in each task of an async actor. Code outside
any actor (a cell, a script) has the context of its process: no actor, and one point without axes.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshbook.actors.runtime.transport import local_transport
from meshbook.actors.shape import Extent, Point
from meshbook.wire.messages import ActorAddress, NodeAddress

if TYPE_CHECKING:
    from meshbook.actors.runtime.runner import ActorRunner

SINGLE_POINT = Point(0, Extent((), ()))


@dataclass(frozen=True)
class ProcMeshRef:
    """A mesh of processes as it is known everywhere: enough to spawn on it and to stop it."""

    name: str
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    addresses: tuple[NodeAddress, ...]
    mesh: str | None  # the Meshbook mesh behind it; None: a process that is none of a mesh's ranks


class Instance:
    """An actor, seen from inside: `context().actor_instance`.

    Attributes:
        name: what it was spawned as; "client" outside any actor.
        actor_id: unique over all meshes.
        rank: its place in the mesh it was spawned in.
        creator: the actor that spawned it, as an `ActorAddress`; None for a client.
    """

    def __init__(
        self,
        name: str,
        actor_id: str,
        rank: Point,
        procs_ref: ProcMeshRef | None,
        creator: ActorAddress | None,
        runner: ActorRunner | None,
    ) -> None:
        self.name, self.actor_id, self.rank, self.creator = name, actor_id, rank, creator
        self.procs_ref, self.runner = procs_ref, runner

    @property
    def proc(self) -> Any:
        """The process it lives in, as a ProcMesh of one."""
        return _import_procs().this_proc()

    @property
    def proc_mesh(self) -> Any:
        """The mesh of processes it was spawned on."""
        return _import_procs().ProcMesh.from_ref(self.procs_ref) if self.procs_ref is not None else self.proc

    def stop(self, reason: str = "stopped itself") -> None:
        """End this actor after the messages that it has already been sent."""
        self._require_runner().stop(reason)

    def abort(self, reason: str | None = None) -> None:
        """Fail: this actor ends, and whoever spawned it is told."""
        self._require_runner().abort(reason or "aborted")

    kill = abort

    def _require_runner(self) -> ActorRunner:
        if self.runner is None:
            raise RuntimeError("this code does not run in an actor, so there is none to stop")
        return self.runner

    @property
    def address(self) -> ActorAddress:
        return ActorAddress(local_transport().address, self.actor_id if self.runner is not None else "")

    def __repr__(self) -> str:
        return f"<{self.name} {self.rank}>"


class Context:
    """What `context()` gives.

    Attributes:
        actor_instance: the actor whose code runs.
        message_rank: its point in the mesh that the message was sent to, which may be a slice of its own.
    """

    __slots__ = ("actor_instance", "message_rank")

    def __init__(self, actor_instance: Instance, message_rank: Point) -> None:
        self.actor_instance, self.message_rank = actor_instance, message_rank


context_var: ContextVar[Context] = ContextVar("meshbook_actor")
message_var: ContextVar[tuple[int, int] | None] = ContextVar(
    "meshbook_message", default=None
)  # `cabin.Key` of what runs
_client_context = Context(Instance("client", "client", SINGLE_POINT, None, None, None), SINGLE_POINT)


def context() -> Context:
    """The actor and the message that this code runs for."""
    return context_var.get(_client_context)


def current_rank() -> Point:
    """The running actor's point in the mesh that was called; an int is `current_rank().rank`."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Axis -> size of the mesh that was called."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """The id of the running actor; "client" outside any."""
    return context().actor_instance.actor_id


def _import_procs() -> Any:
    # A floor above: who asks an actor for its processes has ProcMesh in hand anyway.
    return importlib.import_module("meshbook.actors.procs")
