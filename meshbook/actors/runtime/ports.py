"""Ports: a place to send values to, that can itself be sent; and the receiver at its other end."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from meshbook.actors.runtime import faults
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.parcels import Parcel
from meshbook.actors.runtime.peer import PeerGone
from meshbook.actors.runtime.post import here
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
            post.reply(peer, word)

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
        self._came: deque[Parcel] = deque()
        self._waiting: deque[weakref.ref[_Coming]] = deque()
        self._held: set[_Coming] = set()  # of those, the ones that a callback waits for

    def next(self, receiver: PortReceiver[Any]) -> Future[Any]:
        future = _Coming(self, receiver)
        with self._lock:
            if not self._came:
                self._waiting.append(weakref.ref(future))
                return future
            parcel = self._came.popleft()
        future.settle(lambda: self._open(parcel))
        return future

    def hold(self, future: _Coming, change: int) -> None:
        with self._lock:
            future.num_holds += change
            (self._held.add if future.num_holds > 0 and not future.done() else self._held.discard)(future)

    def arrived(self, peer: Any, word: Any) -> bool:
        parcel = Parcel(self.post.parcels, peer, word)
        future = None
        with self._lock:
            while future is None and self._waiting:
                future = self._waiting.popleft()()
            if future is None:
                self._came.append(parcel)
                return self.once
            self._held.discard(future)
        future.settle(lambda: self._open(parcel))
        return self.once

    def lost(self, peer: Any, reason: str) -> bool:
        return False

    def _open(self, parcel: Parcel) -> Any:
        word = parcel.word
        if isinstance(word, messages.Failure):
            raise faults.rebuild(word)
        value = parcel.open()
        return (word.rank or 0, value) if self.ranked else value


class _Coming(Future[Any]):
    """The next message. Who gives up (a timeout, a cancelled `await`) must not take a message along: its slot knows it
    weakly, and firmly only while a callback or an `await` waits."""

    __slots__ = ("_receiver", "_slot", "num_holds")

    def __init__(self, slot: _Slot, receiver: PortReceiver[Any]) -> None:
        super().__init__("recv()")
        self._slot, self._receiver = slot, receiver  # who waits keeps the receiver
        self.num_holds = 0

    def add_done_callback(self, callback: Callable[[Future[Any]], Any]) -> None:
        self._slot.hold(self, 1)
        super().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from super().__await__())
        finally:
            if not self.done():
                self._slot.hold(self, -1)


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
        return self._slot.next(self)

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
