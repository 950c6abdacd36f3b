"""Ports: send ends that can themselves be sent in messages, and their receivers."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, Self, TypeVar

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.payloads import PendingPayload
from meshbook.actors.runtime.peer import PeerLost
from meshbook.actors.runtime.transport import Transport, encode, local_transport
from meshbook.wire import messages

R = TypeVar("R")


class Port(Generic[R]):
    """The sending end. May be passed to actors and stored. Any thread; messages of one sender keep their order."""

    def __init__(self, address: messages.PortAddress | None) -> None:
        self._address = address  # None: no reply is expected
        self.return_undeliverable = True

    def send(self, obj: R) -> None:
        """Send a value. Does not wait for the receiver; a lost receiver is not an error.

        Raises:
            TransferError: the value cannot be pickled; the message names the part.
        """
        if self._address is not None:
            transport, address = local_transport(), self._address
            with contextlib.suppress(PeerLost):
                peer = transport.peer(address.address)
                plain, payload = transport.payloads.pack(obj, (peer,), name="the message")
                transport.reply(peer, messages.PortMessage(address.port, address.rank, plain, payload))

    def exception(self, obj: BaseException) -> None:
        """Send an error: the receiver's `recv()` raises it."""
        if self._address is not None:
            failure = faults.describe_exception(obj, call=self._address.port, rank=self._address.rank)
            with contextlib.suppress(PeerLost):
                local_transport().peer(self._address.address).send(encode(failure))

    @property
    def rank(self) -> int | None:
        """The sender's rank in the called mesh, by which receivers distinguish senders."""
        return self._address.rank if self._address is not None else None

    def __reduce__(self) -> Any:
        return Port, (self._address,)


class ReplyPort(Port[R]):
    """The port that an endpoint gets for one call. The caller gets an error once nobody can answer through it any more.

    Passed on to another actor, it is a `Port` there, and whoever has that may answer.
    """

    def __init__(self, address: messages.PortAddress | None, transport: Transport, endpoint: str) -> None:
        """endpoint: that it was given to, "trainers.step"."""
        super().__init__(address)
        self._transport, self._endpoint = transport, endpoint
        self._is_unanswered = address is not None

    def send(self, obj: R) -> None:
        super().send(obj)
        self._is_unanswered = False

    def exception(self, obj: BaseException) -> None:
        super().exception(obj)
        self._is_unanswered = False

    def disarm(self) -> None:
        """Leave the caller's error to others."""
        self._is_unanswered = False

    def give_up(self, why: str) -> None:
        """Send the caller an error, if it has no answer. Any thread, also in the middle of another send.

        Args:
            why: nobody can answer any more, as a phrase that follows the endpoint's name.
        """
        address, transport = self._address, self._transport
        if self._is_unanswered and address is not None and transport.address.pid == os.getpid():  # not a forked copy
            self._is_unanswered = False
            text = f"{self._endpoint} {why}"
            failure = messages.ActorFailure(address.port, "ended", "SupervisionError", text, rank=address.rank)

            def send() -> None:
                with contextlib.suppress(PeerLost):
                    transport.peer(address.address).send(encode(failure))

            transport.reactor.call_soon(send)

    def __reduce__(self) -> Any:
        self._is_unanswered = False
        return super().__reduce__()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.give_up("dropped the port of this call without an answer")


class _PortQueue:
    """The messages received through a port, and the pending `recv()` futures.

    The transport references this object, not the receiver.
    """

    caller = None  # a receiver may wait for ever

    def __init__(self, *, once: bool) -> None:
        self.transport = local_transport()
        self.once = once
        self.ranked = False
        self._lock = threading.Lock()
        self._received: deque[PendingPayload] = deque()
        self._waiting_receives: deque[weakref.ref[_ReceiveFuture]] = deque()
        self._pinned: set[_ReceiveFuture] = set()  # those with a callback or an `await`

    def next_message(self, receiver: PortReceiver[Any]) -> Future[Any]:
        future = _ReceiveFuture(self, receiver)
        with self._lock:
            if not self._received:
                self._waiting_receives.append(weakref.ref(future))
                return future
            pending = self._received.popleft()
        future.resolve(lambda: self._unpack(pending))
        return future

    def pin(self, future: _ReceiveFuture, change: int) -> None:
        with self._lock:
            future.num_pins += change
            (self._pinned.add if future.num_pins > 0 and not future.done() else self._pinned.discard)(future)

    def on_reply(self, peer: Any, message: Any) -> bool:
        pending = PendingPayload(self.transport.payloads, peer, message)
        future = None
        with self._lock:
            while future is None and self._waiting_receives:
                future = self._waiting_receives.popleft()()
            if future is None:
                self._received.append(pending)
                return self.once
            self._pinned.discard(future)
        future.resolve(lambda: self._unpack(pending))
        return self.once

    def on_peer_lost(self, peer: Any, reason: str) -> bool:
        return False

    def awaited_replies(self) -> list[messages.PendingEndpointCall]:
        return []

    def _unpack(self, pending: PendingPayload) -> Any:
        message = pending.message
        if isinstance(message, messages.ActorFailure):
            raise faults.rebuild_exception(message)
        value = pending.unpack()
        return (message.rank or 0, value) if self.ranked else value


class _ReceiveFuture(Future[Any]):
    """The future of the next message.

    A waiter that gives up (a timeout, a cancelled `await`) must not consume a message: the queue references this future
    weakly, and strongly only while a callback or an `await` waits.
    """

    __slots__ = ("_queue", "_receiver", "num_pins")

    def __init__(self, queue: _PortQueue, receiver: PortReceiver[Any]) -> None:
        super().__init__("recv()")
        self._queue, self._receiver = queue, receiver  # a pending future keeps the receiver alive
        self.num_pins = 0

    def add_done_callback(self, callback: Callable[[Self], Any]) -> None:
        self._queue.pin(self, 1)
        super().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from super().__await__())
        finally:
            if not self.done():
                self._queue.pin(self, -1)


class PortReceiver(Generic[R]):
    """The receiving end; it stays in the process that opened it."""

    def __init__(self, *, once: bool = False) -> None:
        self._queue = _PortQueue(once=once)
        self._port_id = self._queue.transport.replies.add(self._queue)

    @property
    def port(self) -> Port[R]:
        return Port(messages.PortAddress(self._queue.transport.address, self._port_id))

    def recv(self) -> Future[R]:
        """Return a Future of the next message; several may be requested ahead of time."""
        return self._queue.next_message(self)

    def ranked(self) -> RankedPortReceiver[R]:
        """Return the same receiver with results of the form (rank of the sender, value)."""
        return RankedPortReceiver(self)

    def close(self) -> None:
        """Stop receiving; later messages are dropped."""
        self._queue.transport.replies.remove(self._port_id)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class RankedPortReceiver(Generic[R]):
    """A receiver of (rank of the sender in the called mesh, value)."""

    def __init__(self, receiver: PortReceiver[R]) -> None:
        self._receiver = receiver
        receiver._queue.ranked = True

    def recv(self) -> Future[tuple[int, R]]:
        return self._receiver.recv()  # type: ignore[return-value]


class Channel:
    """Factory for ports."""

    def __class_getitem__(cls, item: Any) -> type[Channel]:
        return cls

    @staticmethod
    def open(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """Return a port and its receiver, in this process. `once`: for a single message."""
        receiver: PortReceiver[Any] = PortReceiver(once=once)
        return receiver.port, receiver

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[Any], RankedPortReceiver[Any]]:
        """Return a port and a receiver that also reports the sender's rank in the called mesh."""
        port, receiver = Channel.open(once)
        return port, receiver.ranked()
