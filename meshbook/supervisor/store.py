"""The store in which a mesh's ranks find each other: what torch.distributed calls a Store, served without torch.

`KeyStore` is the memory: pure, a question in, answers out, some of them later. `StoreServer` is its door: a socket in
the mesh's own folder, where nothing is heard before the mesh's token. So nobody else on the machine can write what
ranks rendezvous by, no rank is special, and any rank may die. If the supervisor ends, so do its ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
from dataclasses import dataclass

import zmq

from meshbook.errors import ProtocolError, VersionMismatch
from meshbook.wire import codec, keys, messages
from meshbook.wire.loop import Loop
from meshbook.wire.messages import StoreReply
from meshbook.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger("meshbook.store")

Replies = list[tuple[bytes, StoreReply]]  # each with the peer it is for


@dataclass
class _PendingGet:
    """A question that cannot be answered before these keys are there."""

    peer: bytes
    request: messages.StoreGet
    missing: set[str]


class KeyStore:
    """Keys and their values, and who waits for which."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._pending: list[_PendingGet] = []

    def handle(self, peer: bytes, request: messages.StoreCommand) -> Replies:
        """Answer a peer, and others for whom this was what they waited for."""
        match request:
            case messages.StoreSet(request_id=number, pairs=pairs):
                self._values.update(pairs)
                return [(peer, StoreReply(number)), *self._complete_pending(dict(pairs))]
            case messages.StoreAppend(request_id=number, key=key, value=value):
                self._values[key] = self._values.get(key, b"") + value
                return [(peer, StoreReply(number)), *self._complete_pending((key,))]
            case messages.StoreAdd(request_id=number, key=key, amount=amount):
                total = int(self._values.get(key) or b"0") + amount
                self._values[key] = b"%d" % total
                return [(peer, StoreReply(number, count=total)), *self._complete_pending((key,))]
            case messages.StoreCompareSet(request_id=number, key=key, expected=expected, desired=desired):
                current = self._values.get(key)
                if current == expected or (current is None and not expected):
                    self._values[key] = desired
                    return [(peer, StoreReply(number, (desired,))), *self._complete_pending((key,))]
                return [(peer, StoreReply(number, (expected if current is None else current,)))]
            case messages.StoreGet(keys=names):
                missing = {name for name in names if name not in self._values}
                if not missing:
                    return [(peer, self._reply_to_get(request))]
                self._pending.append(_PendingGet(peer, request, missing))
                return []
            case messages.StoreCheck(request_id=number, keys=names):
                return [(peer, StoreReply(number, count=int(all(name in self._values for name in names))))]
            case messages.StoreDelete(request_id=number, key=key):
                return [(peer, StoreReply(number, count=int(self._values.pop(key, None) is not None)))]
            case messages.StoreCount(request_id=number):
                return [(peer, StoreReply(number, count=len(self._values)))]
            case messages.StoreCancel(request_id=number):
                self._pending = [one for one in self._pending if (one.peer, one.request.request_id) != (peer, number)]
        return []

    def delete_prefix(self, prefix: str) -> None:
        """Forget all keys that begin so, and who waits for such."""
        self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}
        self._pending = [one for one in self._pending if not any(key.startswith(prefix) for key in one.missing)]

    def __len__(self) -> int:
        return len(self._values)

    def _complete_pending(self, names: tuple[str, ...] | dict[str, bytes]) -> Replies:
        if not self._pending:
            return []
        for pending_get in self._pending:
            pending_get.missing.difference_update(names)
        ready = [pending_get for pending_get in self._pending if not pending_get.missing]
        if not ready:
            return []
        self._pending = [pending_get for pending_get in self._pending if pending_get.missing]
        replies: Replies = []
        for pending_get in ready:  # a key that was deleted meanwhile is waited for again
            replies += self.handle(pending_get.peer, pending_get.request)
        return replies

    def _reply_to_get(self, request: messages.StoreGet) -> StoreReply:
        return StoreReply(
            request.request_id, tuple(self._values[name] for name in request.keys) if request.want_values else ()
        )


class StoreServer:
    """A store behind a socket. `close()` ends it."""

    def __init__(self, loop: Loop, context: zmq.Context[zmq.Socket[bytes]], address: str, token: str) -> None:
        self.address = address
        self.store = KeyStore()
        self._loop, self._token = loop, token
        self._authenticated: set[bytes] = set()  # peers that have shown the token
        self._rejections = RateLimitedLog(log)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(self._socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        self._socket.bind(address)
        loop.watch_socket(self._socket, self._on_message)

    def begin_generation(self, generation: int) -> None:
        """Groups are formed anew: what was written before the epoch before is nobody's any more."""
        self.store.delete_prefix(f"e{generation - 2}/")

    def close(self) -> None:
        self._loop.unwatch(self._socket)
        self._socket.close(linger=0)

    def _on_message(self, frames: list[bytes]) -> None:
        peer = frames[0]
        is_authenticated = peer in self._authenticated
        try:
            request = (codec.store_commands if is_authenticated else codec.store_hellos).decode(frames[1:])
        except (VersionMismatch, ProtocolError) as error:
            self._rejections.warning("a message from %r was refused: %s", peer[:16], error)
            return
        if isinstance(request, messages.StoreHello):
            if hmac.compare_digest(request.token.encode(), self._token.encode()):
                self._authenticated.add(peer)
            else:
                self._rejections.warning("%r showed the store a wrong token, and was refused", peer[:16])
            return
        for receiver, reply in self.store.handle(peer, request):
            with contextlib.suppress(zmq.ZMQError):  # a rank that is gone waits for nothing
                self._socket.send_multipart([receiver, codec.PROTOCOL, codec.encode_body(reply)])
