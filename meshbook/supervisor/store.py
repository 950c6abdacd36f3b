"""The store by which a mesh's ranks rendezvous: a torch.distributed Store, served without torch.

`KeyStore` is the state: pure, a request in, replies out, some of them later. `StoreServer` serves it on a socket in the
mesh's own folder and reads no request before the mesh's token. So no other user of the machine can write the rendezvous
keys, no rank is special, and any rank may die. If the supervisor ends, so do its ranks.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass

import zmq

from meshbook.errors import ProtocolError, VersionMismatch
from meshbook.wire import codec, keys, messages
from meshbook.wire.linked_sockets import LinkedRouter
from meshbook.wire.loop import Loop
from meshbook.wire.messages import StoreReply
from meshbook.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger("meshbook.store")

Replies = list[tuple[bytes, StoreReply]]  # each with the peer it is for


@dataclass
class _PendingGet:
    """A request that waits until these keys exist."""

    peer: bytes
    request: messages.StoreGet
    missing: set[str]


class KeyStore:
    """Keys, their values, and the requests that wait for keys."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._pending: list[_PendingGet] = []

    def handle(self, peer: bytes, request: messages.StoreCommand) -> Replies:
        """Return the reply to a request, and replies to other requests that it completes."""
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
        """Delete all keys with this prefix, and the requests that wait for such keys."""
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
        for pending_get in ready:  # it waits again if a key was deleted meanwhile
            replies += self.handle(pending_get.peer, pending_get.request)
        return replies

    def _reply_to_get(self, request: messages.StoreGet) -> StoreReply:
        return StoreReply(
            request.request_id, tuple(self._values[name] for name in request.keys) if request.want_values else ()
        )


class StoreServer:
    """A store on a socket. `close()` ends it."""

    def __init__(self, loop: Loop, context: zmq.Context[zmq.Socket[bytes]], address: str, token: str) -> None:
        self.address = address
        self._loop, self._context = loop, context
        # Each peer is known to one; with the key pair of one that listens on the network.
        self._routers: list[tuple[LinkedRouter, tuple[bytes, bytes] | None]] = []
        self.store = KeyStore()
        self._token = token
        self._rejections = RateLimitedLog(log)
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        socket.bind(address)
        self._serve(socket, None)

    def listen(self, host: str, key_pair: tuple[bytes, bytes]) -> str:
        """Serve on a port of an address of this machine too, encrypted; return where."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        endpoint = keys.bind_encrypted(socket, host, key_pair)
        self._serve(socket, key_pair)
        return endpoint

    def _serve(self, socket: zmq.Socket[bytes], key_pair: tuple[bytes, bytes] | None) -> None:
        router = LinkedRouter(
            self._loop, socket, self._on_request, lambda peer, frames: self._on_hello(router, peer, frames)
        )
        self._routers.append((router, key_pair))

    def begin_generation(self, generation: int) -> None:
        """Delete the keys of generations before the previous one, as groups are re-formed."""
        self.store.delete_prefix(f"e{generation - 2}/")

    def reopen(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        for router, key_pair in self._routers:
            router.reopen(context, curve_keys=key_pair)

    def close(self) -> None:
        for router, _ in self._routers:
            router.close()

    def _on_hello(self, router: LinkedRouter, peer: bytes, frames: list[bytes]) -> None:
        try:
            hello = codec.store_hellos.decode(frames)
        except (VersionMismatch, ProtocolError) as error:
            self._rejections.warning("a message from %r was refused: %s", peer[:16], error)
            return
        if hmac.compare_digest(hello.token.encode(), self._token.encode()):
            router.open_peer(peer)
        else:
            self._rejections.warning("%r showed the store a wrong token, and was refused", peer[:16])

    def _on_request(self, peer: bytes, body: bytes) -> None:
        try:
            request = codec.store_commands.decode_body(body)
        except ProtocolError as error:
            self._rejections.warning("a message from %r was refused: %s", peer[:16], error)
            return
        for receiver, reply in self.store.handle(peer, request):
            for router, _ in self._routers:
                router.send(receiver, codec.encode_body(reply))
