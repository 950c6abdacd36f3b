"""Messages of ranks to the mesh's store, by which their process groups rendezvous.

A rank opens one connection per thread that uses the store. Each connection shows the token first, has one request open
at a time, and numbers its requests: the number identifies a reply to a cancelled request.
"""

from __future__ import annotations

from msgspec import Struct

from meshbook.wire.messages.payloads import Message


class StoreHello(Message):
    """The first message of every connection to the store."""

    token: str


class StoreSet(Message):
    request_id: int
    pairs: tuple[tuple[str, bytes], ...]


class StoreAppend(Message):
    request_id: int
    key: str
    value: bytes


class StoreGet(Message):
    """Get the values of keys, once all of them exist."""

    request_id: int
    keys: tuple[str, ...]
    want_values: bool = True  # False: only reply when they exist


class StoreAdd(Message):
    """Add to a number, initially 0. The reply is the sum."""

    request_id: int
    key: str
    amount: int


class StoreCompareSet(Message):
    """Set a key if it has the expected value; reply with its value then.

    An absent key matches an empty `expected`.
    """

    request_id: int
    key: str
    expected: bytes
    desired: bytes


class StoreCheck(Message):
    """Whether all of these keys exist: the reply is 1 or 0."""

    request_id: int
    keys: tuple[str, ...]


class StoreDelete(Message):
    """Delete a key. The reply is 1 if it existed, else 0."""

    request_id: int
    key: str


class StoreCount(Message):
    """Return the number of keys."""

    request_id: int


class StoreCancel(Message):
    """Cancel a request: its sender no longer waits."""

    request_id: int


class StoreReply(Struct, frozen=True):
    request_id: int
    values: tuple[bytes, ...] = ()
    count: int = 0


StoreCommand = (
    StoreHello
    | StoreSet
    | StoreAppend
    | StoreGet
    | StoreAdd
    | StoreCompareSet
    | StoreCheck
    | StoreDelete
    | StoreCount
    | StoreCancel
)
