"""A rank's client of the mesh's store: torch's `Store`, in which process groups find their members.

torch's C++ calls it through pybind11's trampoline, on any thread that forms a group; a wait releases the GIL. The store
itself is in the supervisor, behind a socket in the mesh's folder (`supervisor/store.py`). Unlike torch's TCPStore,
which has no authentication, it serves only clients that present the mesh's token.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import zmq
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from meshbook.clock import monotonic
from meshbook.wire import codec, messages
from meshbook.wire.linked_sockets import LinkedDealer
from meshbook.wire.messages import StoreReply

# Interval at which a waiting thread checks for cancellation. An abort promises 0.2 s.
_POLL_MS = 20


class MeshStore(Store):
    """The mesh's store. Any thread; each has a connection of its own.

    Its creator must hold a reference for as long as groups may use it: torch's C++ holds only the C++ half of the
    object.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        token: str,
        *,
        timeout_s: float = 300.0,
        listen_on: str | None = None,
        server_key: str | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            timeout_s: seconds that a wait for keys may take, unless the call passes its own.
            listen_on: this machine's address at which clients on other machines reach this process; None: there are no
                other machines.
            server_key: the store's public CURVE key, if the address is a tcp one.
            clock: the seconds that count for timeouts.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._context, self._address, self._token, self._server_key = context, address, token, server_key
        self._clock = clock
        self._request_numbers = itertools.count(1)
        self._thread_local = threading.local()
        self._sockets: list[LinkedDealer] = []
        self._num_cancelled = 0
        # gloo has no authentication, so it listens on loopback where that is enough, else on one address only
        self.listen_on = listen_on or "127.0.0.1"

    def cancel_waits(self) -> None:
        """End every wait for keys that has begun, in all threads. Does not block."""
        self._num_cancelled += 1

    @contextlib.contextmanager
    def cancel_scope(self) -> Iterator[None]:
        """Wrap several requests of this thread: `cancel_waits` ends them all, also when it is called between two."""
        self._thread_local.given_up_before = self._num_cancelled
        try:
            yield
        finally:
            del self._thread_local.given_up_before

    def close(self) -> None:
        """Close all connections. No thread may have a request in flight."""
        while self._sockets:
            self._sockets.pop().close()
        self._thread_local = threading.local()

    # ---- torch's Store

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        pairs = tuple((key, _to_bytes(value)) for key, value in zip(keys, values, strict=True))
        self._request(messages.StoreSet(next(self._request_numbers), pairs))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._request(messages.StoreGet(next(self._request_numbers), tuple(keys))).values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request(messages.StoreGet(next(self._request_numbers), tuple(keys), want_values=False), timeout)

    def add(self, key: str, amount: int) -> int:
        return self._request(messages.StoreAdd(next(self._request_numbers), key, amount)).count

    def append(self, key: str, value: str | bytes | Sequence[int]) -> None:
        self._request(messages.StoreAppend(next(self._request_numbers), key, _to_bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = messages.StoreCompareSet(next(self._request_numbers), key, _to_bytes(expected), _to_bytes(desired))
        return self._request(request).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request(messages.StoreCheck(next(self._request_numbers), tuple(keys))).count)

    def delete_key(self, key: str) -> bool:
        return bool(self._request(messages.StoreDelete(next(self._request_numbers), key)).count)

    def num_keys(self) -> int:
        return self._request(messages.StoreCount(next(self._request_numbers))).count

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> MeshStore:
        return self

    deleteKey, getNumKeys = delete_key, num_keys

    # ---- the connection

    def _request(self, request: Any, timeout: timedelta | None = None) -> StoreReply:
        """Send a request and return its reply.

        Raises:
            DistStoreError: the request was cancelled or timed out.
        """
        socket = self._socket()
        num_cancelled_before = getattr(self._thread_local, "given_up_before", self._num_cancelled)
        socket.send(codec.encode_body(request))
        deadline = self._clock() + (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        try:
            while self._num_cancelled == num_cancelled_before:
                remaining_ms = int((deadline - self._clock()) * 1000)
                if socket.socket.poll(max(0, min(_POLL_MS, remaining_ms))):
                    body = socket.accept(socket.socket.recv_multipart(zmq.NOBLOCK))
                    reply = None if body is None else codec.store_replies.decode_body(body)
                    if reply is not None and reply.request_id == request.request_id:
                        return reply  # not the reply to an earlier, cancelled request
                elif remaining_ms <= 0:
                    raise DistStoreError(f"the mesh's store did not answer in time: {_describe_request(request)}")
        except BaseException:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(codec.encode_body(messages.StoreCancel(request.request_id)))
            raise
        raise DistStoreError(f"the wait for the mesh's store was given up: {_describe_request(request)}")

    def _socket(self) -> LinkedDealer:
        socket: LinkedDealer | None = getattr(self._thread_local, "socket", None)
        if socket is None:
            socket = LinkedDealer(
                self._context, self._address, secrets.token_hex(8).encode(), server_key=self._server_key
            )
            socket.introduce(codec.encode_body(messages.StoreHello(self._token)))
            self._thread_local.socket = socket
            self._sockets.append(socket)
        return socket


def _to_bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _describe_request(request: Any) -> str:
    if isinstance(request, messages.StoreGet):
        shown = ", ".join(request.keys[:4])
        return f"it waits for {shown}{' and others' if len(request.keys) > 4 else ''}, which nobody has set"
    return type(request).__name__
