"""Values on their way between processes with actors: as a plain pickle, or with their buffers in shared memory.

Keeps account of shared segments in both directions: who still reads ours, and whose we still read.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.wire import messages, pickling
from meshbook.wire.buffers import SegmentPool, SegmentReader

_PLAIN_BYTES = 32 << 10  # of text or bytes; more goes the way of large values
_PLAIN_ITEMS = 64  # of a container, in all; more is pickled in C, where counting is cheap
_SCALAR_TYPES = frozenset({int, float, str, bytes, bool, type(None), complex})

PICKLED_NONE = pickle.dumps(None, 5)
PICKLED_NO_ARGUMENTS = pickle.dumps(((), {}), 5)


def _subtract_items(value: Any, left: int) -> int:
    """How much of the allowance is left after `value`, below 0 when it is not plain."""
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


class PendingPayload:
    """A value that has come, until somebody asks for it. If nobody ever does, its memory goes back."""

    __slots__ = ("_codec", "_is_unpacked", "_peer", "message")

    def __init__(self, codec: PayloadCodec, peer: Any, message: Any) -> None:
        self._codec, self._peer, self.message = codec, peer, message
        self._is_unpacked = False

    def unpack(self) -> Any:
        """As `PayloadCodec.unpack`. Once."""
        self._is_unpacked = True
        return self._codec.unpack(self._peer, self.message.pickled, self.message.payload)

    def __del__(self) -> None:
        if not self._is_unpacked:
            with contextlib.suppress(Exception):
                self._codec.discard(self._peer, self.message)


class PayloadCodec:
    """Packs and unpacks, for one process."""

    def __init__(self) -> None:
        self.pool = SegmentPool()
        self.reader = SegmentReader()
        self.persistent_id: Callable[[Any], str | None] | None = None  # keys of objects that the receiver has itself
        self.resolve: Callable[[str], Any] | None = None  # ... and on the receiver, what is behind them
        self.on_segments_used: Callable[[], None] = lambda: None
        self._segment_owners: dict[str, Any] = {}  # segment -> peer that owns it

    @property
    def has_segments(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._segment_owners or self.pool.used_bytes or self.pool.free_bytes)

    def pack(
        self, value: Any, peers: Sequence[Any], *, name: str | Sequence[str] = "the value", persistent_id: Any = None
    ) -> tuple[bytes | None, messages.Payload | None]:
        """A value for these peers: (plain, None) or (None, payload).

        Raises:
            TransferError: it cannot be pickled; the message names the part.
        """
        if _subtract_items(value, _PLAIN_ITEMS) >= 0:
            return pickle.dumps(value, 5), None
        readers = [peer.id for peer in peers]
        payload = pickling.dump(
            value, pool=self.pool, readers=readers, persistent=persistent_id or self.persistent_id, name=name
        )
        if payload.buffers:
            self.on_segments_used()
        return None, payload

    def pack_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Sequence[Any], *, persistent_id: Any = None
    ) -> tuple[bytes | None, messages.Payload | None]:
        if not args and not kwargs:
            return PICKLED_NO_ARGUMENTS, None
        return self.pack((args, kwargs), peers, name=("args", "kwargs"), persistent_id=persistent_id)

    def unpack(self, peer: Any, plain: bytes | None, payload: messages.Payload | None) -> Any:
        """What was packed. Runs user code (`__setstate__`, imports): not on the reading thread.

        Raises:
            TransferError: its owner is gone, or it cannot be rebuilt here.
        """
        if plain is not None:
            return pickle.loads(plain)
        if payload is None:
            return None
        if payload.buffers:
            for buffer in payload.buffers:
                if isinstance(buffer, messages.SharedBuffer):
                    self._segment_owners[buffer.segment] = peer
            self.on_segments_used()
        return pickling.load(payload, reader=self.reader, resolve=self.resolve)

    def discard(self, peer: Any, message: Any) -> None:
        """A value that nobody will unpack."""
        payload = getattr(message, "payload", None)
        if payload is not None and payload.buffers:
            for buffer in payload.buffers:
                if isinstance(buffer, messages.SharedBuffer):
                    self._segment_owners[buffer.segment] = peer
            self.reader.discard(payload.buffers)
            self.on_segments_used()

    def drain_released(self) -> list[tuple[Any, tuple[str, ...]]]:
        """Segments that nobody here looks at any more, by owner."""
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
        """A process has ended, and reads nothing any more."""
        self.pool.remove_reader(peer.id)
        for segment in [segment for segment, owner in list(self._segment_owners.items()) if owner is peer]:
            self._segment_owners.pop(segment, None)

    def close(self) -> None:
        self.pool.close()
