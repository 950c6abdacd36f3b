"""Encode values for other processes: as a plain pickle, or with their buffers in shared memory.

Tracks shared segments in both directions: which peers still read ours, and whose segments we still read.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.wire import messages, pickling
from meshbook.wire.buffers import SegmentPool, SegmentReader

_PLAIN_BYTES = 32 << 10  # maximum size of text or bytes in a plain pickle; larger ones use a payload
# maximum number of items, nested ones included; larger containers use a payload, pickled in C, where counting is cheap
_PLAIN_ITEMS = 64
_SCALAR_TYPES = frozenset({int, float, str, bytes, bool, type(None), complex})

# Called before a message is packed, and at the end of a call of a rank, on the thread that has done the work: what it
# leaves for others to read in memory that they share is to be ready for them. Do not block, nor raise.
handover_callbacks: list[Callable[[], None]] = []

PICKLED_NONE = pickle.dumps(None, 5)
PICKLED_NO_ARGUMENTS = pickle.dumps(((), {}), 5)


def _subtract_items(value: Any, left: int) -> int:
    """Return the remaining item allowance after `value`; negative if it is not plain."""
    kind = type(value)
    if kind in _SCALAR_TYPES:
        return left - 1 if (kind is not str and kind is not bytes) or len(value) <= _PLAIN_BYTES else -1
    if kind is tuple or kind is list:
        for item in value:
            left = _subtract_items(item, left)
            if left < 0:
                return -1
        return left - 1
    if kind is dict:
        for key, item in value.items():
            left = _subtract_items(item, _subtract_items(key, left))
            if left < 0:
                return -1
        return left - 1
    return -1


def hand_over() -> None:
    """Others are about to hear from this thread: call the callbacks."""
    for callback in handover_callbacks:
        callback()


class PendingPayload:
    """A received value that is not yet unpacked. If it never is, its memory is released."""

    __slots__ = ("_codec", "_is_unpacked", "_peer", "message")

    def __init__(self, codec: PayloadCodec, peer: Any, message: Any) -> None:
        self._codec, self._peer, self.message = codec, peer, message
        self._is_unpacked = False

    def unpack(self) -> Any:
        """Unpack the value, as `PayloadCodec.unpack`. Once."""
        self._is_unpacked = True
        return self._codec.unpack(self._peer, self.message.pickled, self.message.payload)

    def __del__(self) -> None:
        if not self._is_unpacked:
            with contextlib.suppress(Exception):
                self._codec.discard(self._peer, self.message)


class PayloadCodec:
    """Packs and unpacks values for one process."""

    def __init__(self) -> None:
        self.pool = SegmentPool()
        self.reader = SegmentReader()
        # the key of an object that the receiver holds itself
        self.persistent_id: Callable[[Any], str | None] | None = None
        self.resolve: Callable[[str], Any] | None = None  # on the receiver: the object for a key
        self.on_segments_used: Callable[[], None] = lambda: None
        self._segment_owners: dict[str, Any] = {}  # segment name -> owning peer

    @property
    def has_segments(self) -> bool:
        """Whether any shared segments are in use or retained."""
        return bool(self._segment_owners or self.pool.used_bytes or self.pool.free_bytes)

    def pack(
        self, value: Any, peers: Sequence[Any], *, name: str | Sequence[str] = "the value", persistent_id: Any = None
    ) -> tuple[bytes | None, messages.Payload | None]:
        """Pack a value for these peers: (plain, None) or (None, payload).

        What one of them cannot read, because it is on another machine, is in the payload for all: encode it at once,
        it is the value's own memory.

        Raises:
            TransferError: it cannot be pickled; the message names the part.
        """
        hand_over()
        if _subtract_items(value, _PLAIN_ITEMS) >= 0:
            return pickle.dumps(value, 5), None
        return None, self.pack_payload(value, peers, name=name, persistent_id=persistent_id or self.persistent_id)

    def pack_payload(
        self, value: Any, peers: Sequence[Any], *, name: str | Sequence[str], persistent_id: Any = None
    ) -> messages.Payload:
        """Pack a value as a payload, as `pack`."""
        pool = self.pool if all(peer.is_local for peer in peers) else None
        readers = [peer.id for peer in peers]
        payload = pickling.dump(value, pool=pool, readers=readers, persistent=persistent_id, name=name, copy=False)
        if pool is not None and payload.buffers:
            self.on_segments_used()
        return payload

    def pack_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Sequence[Any], *, persistent_id: Any = None
    ) -> tuple[bytes | None, messages.Payload | None]:
        if not args and not kwargs:
            hand_over()
            return PICKLED_NO_ARGUMENTS, None
        return self.pack((args, kwargs), peers, name=("args", "kwargs"), persistent_id=persistent_id)

    def unpack(self, peer: Any, plain: bytes | None, payload: messages.Payload | None) -> Any:
        """Unpack a value. Runs user code (`__setstate__`, imports): not on the reader thread.

        Raises:
            TransferError: its owner has exited, or it cannot be rebuilt here.
        """
        if plain is not None:
            return pickle.loads(plain)
        if payload is None:
            return None
        if payload.buffers:
            self._note_segments(peer, payload)
        return pickling.load(payload, reader=self.reader, resolve=self.resolve)

    def discard(self, peer: Any, message: Any) -> None:
        """Release the memory of a value that will not be unpacked."""
        payload = getattr(message, "payload", None)
        if payload is not None and payload.buffers:
            self._note_segments(peer, payload)
            self.reader.discard(payload.buffers)

    def _note_segments(self, peer: Any, payload: messages.Payload) -> None:
        for buffer in payload.buffers:
            if isinstance(buffer, messages.SharedBuffer):
                self._segment_owners[buffer.segment] = peer
        self.on_segments_used()

    def drain_released(self) -> list[tuple[Any, tuple[str, ...]]]:
        """Return segments that this process no longer uses, by owner."""
        found: dict[Any, list[str]] = {}
        for segment in self.reader.drain_released():
            owner = self._segment_owners.pop(segment, None)
            if owner is not None:
                found.setdefault(owner, []).append(segment)
        return [(peer, tuple(segments)) for peer, segments in found.items()]

    def release(self, peer: Any, segments: Sequence[str]) -> None:
        for segment in segments:
            self.pool.release(segment, reader=peer.id)

    def forget_peer(self, peer: Any) -> None:
        """Release everything that belongs to the connection of an exited process."""
        self.pool.remove_reader(peer.id)
        for segment in [segment for segment, owner in list(self._segment_owners.items()) if owner is peer]:
            self._segment_owners.pop(segment, None)

    def close(self) -> None:
        self.pool.close()
