"""What ranks ask of the mesh's store, in which their process groups find each other.

A rank opens as many connections as it has threads that ask. Each shows the token first, asks one thing at a time, and
numbers what it asks: an answer to a question that was given up is known by its number.
"""

from __future__ import annotations

from msgspec import Struct

from meshbook.wire.messages.core import Message


class StoreHello(Message):
    """First word of every connection to the store."""

    token: str


class StoreSet(Message):
    request_id: int
    pairs: tuple[tuple[str, bytes], ...]


class StoreAppend(Message):
    request_id: int
    key: str
    value: bytes


class StoreGet(Message):
    """The values of keys, once all of them are there."""

    request_id: int
    keys: tuple[str, ...]
    want_values: bool = True  # False: only say when they are there


class StoreAdd(Message):
    """Add to a number, 0 at first. Answered with the sum."""

    request_id: int
    key: str
    amount: int


class StoreCompareSet(Message):
    """Set a key if it is what is expected. Answered with what it is then; expected and absent are one when empty."""

    request_id: int
    key: str
    expected: bytes
    desired: bytes


class StoreCheck(Message):
    """Whether all of these keys are there: answered with 1 or 0."""

    request_id: int
    keys: tuple[str, ...]


class StoreDelete(Message):
    """Answered with 1 if it was there, else 0."""

    request_id: int
    key: str


class StoreCount(Message):
    """How many keys there are."""

    request_id: int


class StoreCancel(Message):
    """Whoever asked this waits no longer."""

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
