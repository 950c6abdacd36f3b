"""One received call of an actor: the method that it runs, its arguments, and the way of its result to the caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, MutableSet
from typing import Any

import msgspec

from meshbook.actors import base
from meshbook.actors.runtime.payloads import PICKLED_NONE
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.ports import Port, ReplyPort
from meshbook.actors.runtime.transport import Transport, encode
from meshbook.actors.shape import Extent, Point
from meshbook.wire import messages

# (sender's peer id, call id of the reply); (-1, unique number) for a message without a reply
MessageKey = tuple[int, int]


class IncomingCall:
    """A call that this process has received, and its reply."""

    __slots__ = ("_transport", "is_interrupted", "key", "peer", "reply_port", "request")

    def __init__(self, transport: Transport, peer: Any, request: messages.CallActor) -> None:
        self._transport, self.peer, self.request = transport, peer, request
        self.key: MessageKey = (peer.id, request.call) if request.call else (-1, id(request))
        self.is_interrupted = False  # while it was in the mailbox
        self.reply_port: ReplyPort[Any] | None = None  # that the endpoint answers through, if it is marked so

    @property
    def is_internal(self) -> bool:
        """Whether it runs a function that was sent with it, as opposed to an endpoint."""
        return self.request.method[0] == "="

    @property
    def expects_reply(self) -> bool:
        return bool(self.request.call or self.request.reply_port)

    def ends_actor(self, error: BaseException) -> bool:
        """Whether the actor ends by what its endpoint has raised, as it does in Monarch.

        With an explicit port nobody else can know who has not got an answer; and `SystemExit` is meant to end
        something. An interrupt ends nothing.
        """
        if self.is_internal or isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return False
        return self.reply_port is not None or not isinstance(error, Exception)

    def point_for(self, own_point: Point) -> Point:
        """Return the actor's point in the called mesh, which may be a slice of its own."""
        view = self.request.mesh_slice
        if view is None:
            return own_point
        return Point(view.indices.index(own_point.rank), Extent(view.dim_names, view.sizes))

    def unpack(self) -> Any:
        """Return (args, kwargs). Runs user code."""
        return self._transport.payloads.unpack(self.peer, self.request.pickled, self.request.payload)

    def discard(self) -> None:
        """Release the arguments of a call that does not run."""
        self._transport.payloads.discard(self.peer, self.request)

    def bind(
        self, actor: Any, point: Point, name: str, reply_ports: MutableSet[ReplyPort[Any]]
    ) -> tuple[Callable[..., Any], Any, Any]:
        """Return the function to call, its positional and its keyword arguments. Runs user code.

        Args:
            name: the actor's.
            reply_ports: gets the port of a call whose caller waits for an answer through it.

        Raises:
            AttributeError: the actor has no such endpoint.
            TransferError: the arguments cannot be rebuilt here.
        """
        request = self.request
        args, kwargs = self._transport.payloads.unpack(self.peer, request.pickled, request.payload)
        method = request.method
        if method[0] == "=":
            function, *rest = args
            return function, (actor, *rest), kwargs
        Class = type(actor)
        mark = getattr(Class, method, None)
        if not isinstance(mark, base.EndpointProperty):
            names = list(base.endpoints_of(Class))
            raise AttributeError(base.no_such_endpoint(Class.__name__, names, method, is_method=mark is not None))
        if mark.explicit_response_port:
            # through a caller's own port, `Channel.open`, any number of messages may come, or none
            address, endpoint = self._reply_port_address(point.rank), f"{name}.{method}"
            self.reply_port = ReplyPort(address, self._transport, endpoint)
            if request.reply_port is not None:
                self.reply_port.disarm()
            else:
                reply_ports.add(self.reply_port)
            args = (self.reply_port, *args)
        return mark.method, (actor, *args), kwargs

    def _reply_port_address(self, rank: int) -> messages.PortAddress | None:
        if (port := self.request.reply_port) is not None:
            return messages.PortAddress(port.address, port.port, rank)
        return messages.PortAddress(self.peer.address, self.request.call, rank) if self.request.call else None

    def send_result(self, value: Any, own_point: Point) -> None:
        """Send the value to the caller, if it expects one.

        Raises:
            TransferError: the value cannot be pickled.
        """
        if self.reply_port is not None:
            return
        if self.request.reply_port is not None:
            Port(self._reply_port_address(self.point_for(own_point).rank)).send(value)
        elif self.request.call:
            plain, payload = self._transport.payloads.pack(value, (self.peer,), name="the result")
            self._transport.reply(self.peer, messages.ActorReply(self.request.call, plain, payload))

    def send_failure(self, failure: messages.ActorFailure, own_point: Point) -> None:
        """Send the failure to the caller, if it expects a reply."""
        rank = self.point_for(own_point).rank
        if self.reply_port is not None:
            self.reply_port.disarm()
        with contextlib.suppress(PeerLost):
            if (port := self.request.reply_port) is not None:
                peer = self._transport.peer(port.address)
                peer.send(encode(failure_reply(failure, port.port, rank)))
            elif self.request.call:
                self.peer.send(encode(failure_reply(failure, self.request.call, rank)))


class StopRequest:
    """A request to end an actor, after the messages received before it."""

    __slots__ = ("_is_confirmed", "peer", "request")

    def __init__(self, peer: Any, request: messages.StopActor) -> None:
        self.peer, self.request = peer, request  # peer: None if the actor's own process ends it
        self._is_confirmed = False

    @classmethod
    def own(cls, actor: str, reason: str) -> StopRequest:
        """Return the request of the actor's own process."""
        return cls(None, messages.StopActor(0, actor, reason))

    def confirm(self) -> None:
        """Tell the requester that the actor has ended; once."""
        if self.peer is not None and self.request.call and not self._is_confirmed:
            self._is_confirmed = True
            with contextlib.suppress(PeerLost):
                self.peer.send(encode(messages.ActorReply(self.request.call, PICKLED_NONE)))


def failure_reply(failure: messages.ActorFailure, call: int, rank: int | None) -> messages.ActorFailure:
    return msgspec.structs.replace(failure, call=call, rank=rank)
