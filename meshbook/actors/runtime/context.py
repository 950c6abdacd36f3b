"""The current context: the actor and the message that the running code belongs to.

Stored in a context variable, so it is correct on an actor's thread and in each task of an async actor. Code outside any
actor (a cell, a script) has its process's context: no actor, and one point without axes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from meshbook.actors.runtime.refs import ProcMeshRef
from meshbook.actors.runtime.transport import local_transport
from meshbook.actors.shape import Extent, Point
from meshbook.wire.messages import ActorAddress

SINGLE_POINT = Point(0, Extent((), ()))


class ActorControl(Protocol):
    """The actor behind an `Instance`, as code that runs in it may use it."""

    @property
    def thread_id(self) -> int:
        """The thread that runs its `def` endpoints; 0 if it runs an event loop."""

    def stop(self, reason: str) -> None: ...

    def abort(self, reason: str) -> None: ...


class Instance:
    """The running actor: `context().actor_instance`.

    Attributes:
        name: its name in `spawn`; "client" outside any actor.
        mesh_id: the id of its mesh of actors; "" outside any actor.
        rank: its point in the mesh that it was spawned in.
        creator: the actor that spawned it, as an `ActorAddress`; None for a client.
    """

    def __init__(
        self,
        name: str,
        mesh_id: str,
        rank: Point,
        procs_ref: ProcMeshRef | None,
        creator: ActorAddress | None,
        runner: ActorControl | None,
        open_procs: Callable[[ProcMeshRef], Any],
    ) -> None:
        self.name, self.mesh_id, self.rank, self.creator = name, mesh_id, rank, creator
        self.procs_ref, self.runner, self.open_procs = procs_ref, runner, open_procs

    @property
    def actor_id(self) -> str:
        """Unique over all actors of all meshes, "trainers-5f2a9c01[3]"; "client" outside any actor."""
        return f"{self.mesh_id}[{self.rank.rank}]" if self.mesh_id else "client"

    @property
    def own_process(self) -> ProcMeshRef:
        """The process that this code runs in."""
        address = local_transport().address
        mesh = self.procs_ref.mesh if self.procs_ref is not None else None
        return ProcMeshRef(f"process {address.pid}", (), (), (address,), mesh)

    @property
    def proc(self) -> Any:
        """Its process, as a ProcMesh of one."""
        return self.open_procs(self.own_process)

    @property
    def proc_mesh(self) -> Any:
        """The mesh of processes that it was spawned on."""
        return self.open_procs(self.procs_ref or self.own_process)

    def stop(self, reason: str = "stopped itself") -> None:
        """Stop this actor after the messages that it has already been sent."""
        self._require_runner().stop(reason)

    def abort(self, reason: str | None = None) -> None:
        """Fail: this actor ends, and its owner is notified."""
        self._require_runner().abort(reason or "aborted")

    kill = abort

    def _require_runner(self) -> ActorControl:
        if self.runner is None:
            raise RuntimeError("this code does not run in an actor, so there is none to stop")
        return self.runner

    @property
    def address(self) -> ActorAddress:
        return ActorAddress(local_transport().address, self.mesh_id)

    def __repr__(self) -> str:
        return f"<{self.name} {self.rank}>"


class Context(NamedTuple):
    """The result of `context()`.

    Attributes:
        actor_instance: the actor whose code runs.
        message_rank: its point in the mesh that the message was sent to, which may be a slice of its own mesh.
    """

    actor_instance: Instance
    message_rank: Point


context_var: ContextVar[Context] = ContextVar("meshbook_actor")
# `calls.MessageKey` of the running message
message_var: ContextVar[tuple[int, int] | None] = ContextVar("meshbook_message", default=None)


def _open_no_procs(procs_ref: ProcMeshRef) -> Any:
    raise RuntimeError("import meshbook.actor in this process first")


# Its `open_procs` is set by `actors.procs`, a layer above this module.
client_instance = Instance("client", "", SINGLE_POINT, None, None, None, _open_no_procs)
_client_context = Context(client_instance, SINGLE_POINT)


def context() -> Context:
    """Return the actor and the message that this code runs for."""
    return context_var.get(_client_context)


def current_rank() -> Point:
    """Return the running actor's point in the called mesh; `current_rank().rank` is an int."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Return axis -> size of the called mesh."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """Return the id of the running actor; "client" outside any actor."""
    return context().actor_instance.actor_id
