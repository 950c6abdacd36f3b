"""Who am I: the actor and the message that the running code belongs to.

Kept in a context variable, so that it is right on an actor's thread and in each task of an async actor. Code outside
any actor (a cell, a script) has the context of its process: no actor, and one point without axes.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshbook.actors.runtime.post import here
from meshbook.actors.shape import Extent, Point
from meshbook.wire.messages import ActorAddress, Address

if TYPE_CHECKING:
    from meshbook.actors.runtime.cabin import Cabin

NOWHERE = Point(0, Extent((), ()))


@dataclass(frozen=True)
class Home:
    """A mesh of processes as it is known everywhere: enough to spawn on it and to stop it."""

    name: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    addresses: tuple[Address, ...]
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
        home: Home | None,
        creator: ActorAddress | None,
        cabin: Cabin | None,
    ) -> None:
        self.name, self.actor_id, self.rank, self.creator = name, actor_id, rank, creator
        self.home, self.cabin = home, cabin

    @property
    def proc(self) -> Any:
        """The process it lives in, as a ProcMesh of one."""
        return _procs().this_proc()

    @property
    def proc_mesh(self) -> Any:
        """The mesh of processes it was spawned on."""
        return _procs().ProcMesh.of_home(self.home) if self.home is not None else self.proc

    def stop(self, reason: str = "stopped itself") -> None:
        """End this actor after the messages that it has already been sent."""
        self._cabin().stop(reason)

    def abort(self, reason: str | None = None) -> None:
        """Fail: this actor ends, and whoever spawned it is told."""
        self._cabin().abort(reason or "aborted")

    kill = abort

    def _cabin(self) -> Cabin:
        if self.cabin is None:
            raise RuntimeError("this code does not run in an actor, so there is none to stop")
        return self.cabin

    @property
    def address(self) -> ActorAddress:
        return ActorAddress(here().address, self.actor_id if self.cabin is not None else "")

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


current: ContextVar[Context] = ContextVar("meshbook_actor")
message: ContextVar[tuple[int, int] | None] = ContextVar("meshbook_message", default=None)  # `cabin.Key` of what runs
_outside = Context(Instance("client", "client", NOWHERE, None, None, None), NOWHERE)


def context() -> Context:
    """The actor and the message that this code runs for."""
    return current.get(_outside)


def current_rank() -> Point:
    """The running actor's point in the mesh that was called; an int is `current_rank().rank`."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Axis -> size of the mesh that was called."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """The id of the running actor; "client" outside any."""
    return context().actor_instance.actor_id


def _procs() -> Any:
    # A floor above: who asks an actor for its processes has ProcMesh in hand anyway.
    return importlib.import_module("meshbook.actors.procs")
