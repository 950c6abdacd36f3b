"""Copies values by pickling them, within a bound, and finds those that cannot be pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from meshbook.errors import message_of
from meshbook.rank.recording.references import RecordedObjects
from meshbook.wire.messages import InlineBuffer, Payload
from meshbook.wire.pickler import PayloadPickler, PickleWriter, dump_tensor_table

_INLINE_BYTES = 64 << 10  # a smaller tensor is part of the stream


def copy(value: Any, objects: RecordedObjects, limit: int) -> Payload:
    """Pickle a value with copies of its tensors.

    Raises:
        LimitExceeded: it takes more than `limit` bytes.
        Exception: what pickling it raised.
    """
    writer = PickleWriter(limit)
    large: list[memoryview] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _INLINE_BYTES:
            return True  # stays in the stream
        large.append(view)
        return False

    pickler = PayloadPickler(writer, take_out, objects.key_of, limit=limit, reduce=objects.reduce)
    pickler.dump(value)
    num_bytes = sum(view.nbytes for view in large)
    storages: list[int | bytes] = []
    for view in pickler.tensors.extract_storages() if pickler.tensors else ():
        num_bytes += view.nbytes
        storages.append(len(large) if view.nbytes >= _INLINE_BYTES else bytes(view))
        if view.nbytes >= _INLINE_BYTES:
            large.append(view)
    stream = writer.join(dump_tensor_table(pickler, storages))
    writer.check_limit(num_bytes)  # until here these are the tensors' own memory
    return Payload(stream, tuple(InlineBuffer(bytes(view)) for view in large))


def find_unpicklable(values: Mapping[str, Any], make_objects: Callable[[], RecordedObjects]) -> dict[str, str]:
    """Return why values cannot be pickled, by name."""
    found = {}
    for name, value in values.items():
        objects = make_objects()
        pickler = PayloadPickler(PickleWriter(), lambda _: False, objects.key_of, reduce=objects.reduce)
        try:
            pickler.dump(value)
        except Exception as error:
            found[name] = message_of(error).strip() or type(error).__name__
    return found


def num_bytes(payload: Payload) -> int:
    return len(payload.pickled) + sum(len(part.data) for part in payload.buffers if isinstance(part, InlineBuffer))
