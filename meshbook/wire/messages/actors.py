"""The words of actors: what processes say to each other directly, and the one question by which they are found.

A call goes from the caller's process straight to the actor's, over a socket between the two; no supervisor and no
notebook is in between. These words are arrays on the wire, without field names: a call has to be small and quick.
"""

from __future__ import annotations

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.core import Message, Payload


class OpenActors(Message):
    """To ranks' service threads: let others reach the actors of your process; the answer is an address, as a list."""

    call: CallId
    ranks: Ranks


class ActorMessage(Struct, tag=True, array_like=True, frozen=True, gc=False):
    """What processes with actors say to each other."""


class NodeAddress(Struct, array_like=True, frozen=True, gc=False):
    """A process with actors, or one that calls them."""

    node: str  # random, made by the process; its socket's name
    key: str  # who connects has to show it
    pid: int


class ActorAddress(Struct, array_like=True, frozen=True, gc=False):
    address: NodeAddress
    actor: str  # its id; "": the process itself, outside any actor


class PortAddress(Struct, array_like=True, frozen=True, gc=False):
    address: NodeAddress
    port: int
    rank: int | None = None  # whose message it will be, for receivers that tell senders apart


class ActorMeshSlice(Struct, array_like=True, frozen=True, gc=False):
    """The mesh that a message was sent to, where it is not all of the actor's own."""

    dim_names: tuple[str, ...]
    sizes: tuple[int, ...]
    indices: tuple[int, ...]  # in the actor's own mesh, in the order of the view


class PeerHello(ActorMessage):
    """First word of a connection, from who made it."""

    protocol: str
    key: str
    address: NodeAddress


class CallActor(ActorMessage):
    """Run an endpoint. The arguments are in `plain` (a pickle of builtin values) or in `payload`."""

    actor: str
    method: str  # with "=" in front: something of Meshbook's own, see runtime.life
    call: int  # the caller's number for the answer; 0: nobody waits for one
    pickled: bytes | None = None
    payload: Payload | None = None
    reply_port: PortAddress | None = None  # where the answer goes instead
    mesh_slice: ActorMeshSlice | None = None


class SpawnActor(ActorMessage):
    """Make an actor. Answered once it can be called, which is before its `__init__` has run."""

    call: int
    actor: str
    name: str
    payload: Payload  # of (Class, args, kwargs, home)
    dim_names: tuple[str, ...]
    sizes: tuple[int, ...]
    index: int
    owner: ActorAddress


class StopActor(ActorMessage):
    """End an actor, after the messages that came before; answered when it has ended."""

    call: int
    actor: str
    reason: str


class InterruptActor(ActorMessage):
    """End what an actor runs, or what waits in its mailbox: a call of the sender's, or everything."""

    actor: str
    call: int  # the sender's number; 0: all that the actor has been sent until now, by whomever


class ActorReply(ActorMessage):
    call: int
    pickled: bytes | None = None
    payload: Payload | None = None


class ActorFailure(ActorMessage):
    """A call that did not end well."""

    call: int
    kind: str  # "raised", "stopped", "unknown", "name", "init", "transfer"
    ename: str
    text: str
    traceback: str = ""
    pickled: bytes | None = None  # the exception, when it can be pickled and is small
    rank: int | None = None  # for a port: whose


class PortMessage(ActorMessage):
    """A message through a port."""

    port: int
    rank: int | None = None
    pickled: bytes | None = None
    payload: Payload | None = None


class ReleaseSegments(ActorMessage):
    """Shared segments of the other side that nobody here looks at any more."""

    segments: tuple[str, ...]


class PrepareShutdown(ActorMessage):
    """To a process that will be ended on purpose: say so to everybody who would take it for a failure."""

    call: int
    reason: str


class ShutdownNotice(ActorMessage):
    """The end of this connection, when it comes, is no failure."""

    reason: str


class FaultReport(ActorMessage):
    """To the owner of something that failed."""

    actor: str  # the owner's id in the process that hears this
    mesh_name: str
    indices: tuple[int, ...]
    text: str
    traceback: str = ""


class ActorEnded(ActorMessage):
    """To the owner of an actor: it has ended, on purpose, and nothing more will be heard of it."""

    actor: str


PeerMessage = (
    PeerHello | CallActor | SpawnActor | StopActor | InterruptActor | ActorReply | ActorFailure | PortMessage
    | ReleaseSegments | PrepareShutdown | ShutdownNotice | FaultReport | ActorEnded
)  # fmt: skip
