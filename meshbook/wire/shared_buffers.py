"""The shared buffers in a message, wherever they are in it: found, and replaced by others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from meshbook.wire.messages import SharedBuffer

T = TypeVar("T")

_TAG = b"shared"  # of SharedBuffer, in every encoded message that has one


def may_have_shared(body: bytes) -> bool:
    """Whether an encoded message may have shared buffers; quick, and seldom wrong."""
    return _TAG in body


def find_shared(thing: Any) -> list[SharedBuffer]:
    """Return the shared buffers of a message, each once, in order."""
    return list(dict.fromkeys(_iter_shared(thing)))


def replace_shared(thing: T, others: Mapping[SharedBuffer, SharedBuffer]) -> T:
    """Return a message with other shared buffers."""
    return _replaced(thing, others)  # type: ignore[no-any-return]


def _iter_shared(thing: Any) -> Iterator[SharedBuffer]:
    if isinstance(thing, SharedBuffer):
        yield thing
    elif isinstance(thing, msgspec.Struct):
        for name in thing.__struct_fields__:
            yield from _iter_shared(getattr(thing, name))
    elif isinstance(thing, (tuple, list)):
        for item in thing:
            yield from _iter_shared(item)
    elif isinstance(thing, dict):
        for item in thing.values():
            yield from _iter_shared(item)


def _replaced(thing: Any, others: Mapping[SharedBuffer, SharedBuffer]) -> Any:
    if isinstance(thing, SharedBuffer):
        return others.get(thing, thing)
    if isinstance(thing, msgspec.Struct):
        changed = {}
        for name in thing.__struct_fields__:
            before = getattr(thing, name)
            after = _replaced(before, others)
            if after is not before:
                changed[name] = after
        return msgspec.structs.replace(thing, **changed) if changed else thing
    if isinstance(thing, (tuple, list)):
        items = [_replaced(item, others) for item in thing]
        return type(thing)(items) if any(a is not b for a, b in zip(items, thing, strict=True)) else thing
    if isinstance(thing, dict):
        values = {key: _replaced(value, others) for key, value in thing.items()}
        return values if any(values[key] is not thing[key] for key in thing) else thing
    return thing
