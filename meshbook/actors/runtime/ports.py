"""Ports: a place to send values to, that can itself be sent; and the receiver at its other end."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any, Generic, TypeVar

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.peer import PeerGone
from meshbook.actors.runtime.post import encode, here
from meshbook.wire import messages

R = TypeVar("R")


class Port(Generic[R]):
    """The sending end. May be passed to actors, kept, and used from any thread; messages of one sender keep order."""

    def __init__(self, address: messages.PortAddress | None) -> None:
        self._address = address  # None: nobody waits for an answer
        self.return_undeliverable = True

    def send(self, obj: R) -> None:
        """Send a value. Does not wait for the receiver; a receiver that is gone is no error.

        Raises:
            TransferError: it cannot be pickled; the message names the part.
        """
        self._send(obj, is_exception=False)

    def exception(self, obj: BaseException) -> None:
        """Send an error: the receiver's `recv()` raises it."""
        self._send(obj, is_exception=True)

    def _send(self, obj: Any, *, is_exception: bool) -> None:
        if self._address is None:
            return
        post = here()
        with contextlib.suppress(PeerGone):
            peer = post.peer(self._address.address)
            if is_exception:
                word: Any = faults.describe(obj, call=self._address.port, skip=1)
                word = messages.Failure(
                    word.call, word.kind, word.ename, word.text, word.traceback, word.pickled, self._address.rank
                )
            else:
                plain, payload = post.parcels.pack(obj, (peer,), name="the message")
                word = messages.ToPort(self._address.port, self._address.rank, plain, payload)
            peer.send(encode(word))

    @property
    def rank(self) -> int | None:
        """The sender's place, for receivers that tell senders apart."""
        return self._address.rank if self._address is not None else None

    def __reduce__(self) -> Any:
        return Port, (self._address,)


class _Slot:
    """What has come through a port, and who waits for more. The post holds this, and not the receiver."""

    def __init__(self, *, once: bool) -> None:
        self.post = here()
        self.once = once
        self.ranked = False
        self._lock = threading.Lock()
        self._came: deque[Any] = deque()
        self._waiting: deque[Future[Any]] = deque()

    def next(self) -> Future[Any]:
        future: Future[Any] = Future("recv()")
        with self._lock:
            if not self._came:
                self._waiting.append(future)
                return future
            peer, word = self._came.popleft()
        future.settle(lambda: self._open(peer, word))
        return future

    def arrived(self, peer: Any, word: Any) -> bool:
        with self._lock:
            if not self._waiting:
                self._came.append((peer, word))
                return self.once
            future = self._waiting.popleft()
        future.settle(lambda: self._open(peer, word))
        return self.once

    def lost(self, peer: Any, reason: str) -> bool:
        return False

    def _open(self, peer: Any, word: Any) -> Any:
        if isinstance(word, messages.Failure):
            raise faults.rebuild(word)
        value = self.post.parcels.unpack(peer, word.plain, word.payload)
        return (word.rank or 0, value) if self.ranked else value


class PortReceiver(Generic[R]):
    """The receiving end; it stays where it was opened."""

    def __init__(self, *, once: bool = False) -> None:
        self._slot = _Slot(once=once)
        self._number = self._slot.post.expect(self._slot)

    @property
    def port(self) -> Port[R]:
        return Port(messages.PortAddress(self._slot.post.address, self._number))

    def recv(self) -> Future[R]:
        """The next message, as a Future; several may be asked for ahead of time."""
        future = self._slot.next()
        if not future.done():
            future.add_done_callback(lambda _: self)  # who waits keeps the receiver
        return future

    def ranked(self) -> RankedPortReceiver[R]:
        """The same receiver, giving (rank of the sender, value)."""
        return RankedPortReceiver(self)

    def close(self) -> None:
        """Listen no more; what still comes is dropped."""
        self._slot.post.forget(self._number)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class RankedPortReceiver(Generic[R]):
    """Gives (rank in the called mesh of who sent it, value)."""

    def __init__(self, receiver: PortReceiver[R]) -> None:
        self._receiver = receiver
        receiver._slot.ranked = True

    def recv(self) -> Future[tuple[int, R]]:
        return self._receiver.recv()  # type: ignore[return-value]


class Channel:
    """Makes ports."""

    def __class_getitem__(cls, item: Any) -> type[Channel]:
        return cls

    @staticmethod
    def open(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """A port and its receiver, in this process. `once`: for a single message."""
        receiver: PortReceiver[Any] = PortReceiver(once=once)
        return receiver.port, receiver

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[Any], RankedPortReceiver[Any]]:
        """As `open`; what is received says which rank of the called mesh sent it."""
        port, receiver = Channel.open(once)
        return port, receiver.ranked()
