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
from meshbook.wire.messages import StoreAnswered
from meshbook.wire.refusals import Refusals

log = logging.getLogger("meshbook.store")

Answers = list[tuple[bytes, StoreAnswered]]  # each with the peer it is for


@dataclass
class _Waiting:
    """A question that cannot be answered before these keys are there."""

    peer: bytes
    asked: messages.StoreGet
    missing: set[str]


class KeyStore:
    """Keys and their values, and who waits for which."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Waiting] = []

    def handle(self, peer: bytes, asked: messages.StoreCommand) -> Answers:
        """Answer a peer, and others for whom this was what they waited for."""
        match asked:
            case messages.StoreSet(number=number, pairs=pairs):
                self._values.update(pairs)
                return [(peer, StoreAnswered(number)), *self._arrived(dict(pairs))]
            case messages.StoreAppend(number=number, key=key, value=value):
                self._values[key] = self._values.get(key, b"") + value
                return [(peer, StoreAnswered(number)), *self._arrived((key,))]
            case messages.StoreAdd(number=number, key=key, amount=amount):
                total = int(self._values.get(key) or b"0") + amount
                self._values[key] = b"%d" % total
                return [(peer, StoreAnswered(number, count=total)), *self._arrived((key,))]
            case messages.StoreCompareSet(number=number, key=key, expected=expected, desired=desired):
                found = self._values.get(key)
                if found == expected or (found is None and not expected):
                    self._values[key] = desired
                    return [(peer, StoreAnswered(number, (desired,))), *self._arrived((key,))]
                return [(peer, StoreAnswered(number, (expected if found is None else found,)))]
            case messages.StoreGet(keys=names):
                missing = {name for name in names if name not in self._values}
                if not missing:
                    return [(peer, self._found(asked))]
                self._waiting.append(_Waiting(peer, asked, missing))
                return []
            case messages.StoreCheck(number=number, keys=names):
                return [(peer, StoreAnswered(number, count=int(all(name in self._values for name in names))))]
            case messages.StoreDelete(number=number, key=key):
                return [(peer, StoreAnswered(number, count=int(self._values.pop(key, None) is not None)))]
            case messages.StoreCount(number=number):
                return [(peer, StoreAnswered(number, count=len(self._values)))]
            case messages.StoreForget(number=number):
                self._waiting = [one for one in self._waiting if (one.peer, one.asked.number) != (peer, number)]
        return []

    def drop(self, prefix: str) -> None:
        """Forget all keys that begin so, and who waits for such."""
        self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}
        self._waiting = [one for one in self._waiting if not any(key.startswith(prefix) for key in one.missing)]

    def __len__(self) -> int:
        return len(self._values)

    def _arrived(self, names: tuple[str, ...] | dict[str, bytes]) -> Answers:
        if not self._waiting:
            return []
        for one in self._waiting:
            one.missing.difference_update(names)
        ready = [one for one in self._waiting if not one.missing]
        if not ready:
            return []
        self._waiting = [one for one in self._waiting if one.missing]
        answers: Answers = []
        for one in ready:  # a key that was deleted meanwhile is waited for again
            answers += self.handle(one.peer, one.asked)
        return answers

    def _found(self, asked: messages.StoreGet) -> StoreAnswered:
        return StoreAnswered(asked.number, tuple(self._values[name] for name in asked.keys) if asked.values else ())


class StoreServer:
    """A store behind a socket. `close()` ends it."""

    def __init__(self, loop: Loop, context: zmq.Context[zmq.Socket[bytes]], address: str, token: str) -> None:
        self.address = address
        self.store = KeyStore()
        self._loop, self._token = loop, token
        self._known: set[bytes] = set()  # peers that have shown the token
        self._refusals = Refusals(log)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.harden(self._socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        self._socket.bind(address)
        loop.watch_socket(self._socket, self._hear)

    def begin_epoch(self, epoch: int) -> None:
        """Groups are formed anew: what was written before the epoch before is nobody's any more."""
        self.store.drop(f"e{epoch - 2}/")

    def close(self) -> None:
        self._loop.unwatch(self._socket)
        self._socket.close(linger=0)

    def _hear(self, frames: list[bytes]) -> None:
        peer = frames[0]
        known = peer in self._known
        try:
            asked = (codec.store_commands if known else codec.store_hellos).decode(frames[1:])
        except (VersionMismatch, ProtocolError) as error:
            self._refusals.tell("a message from %r was refused: %s", peer[:16], error)
            return
        if isinstance(asked, messages.StoreHello):
            if hmac.compare_digest(asked.token.encode(), self._token.encode()):
                self._known.add(peer)
            else:
                self._refusals.tell("%r showed the store a wrong token, and was refused", peer[:16])
            return
        for waiter, answer in self.store.handle(peer, asked):
            with contextlib.suppress(zmq.ZMQError):  # a rank that is gone waits for nothing
                self._socket.send_multipart([waiter, codec.PROTOCOL, codec.encode_body(answer)])
