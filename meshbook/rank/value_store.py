"""What a rank holds for the clients of its mesh: the values behind their handles, and segments they have yet to read.

A client's calls bear its id (`ids.client_of`), and so does what they leave. When the client is gone, killed or
detached, everything goes with it: nobody else has its handles. Names in the namespace are the mesh's, and stay.

The main thread keeps and sends, the service thread releases; each step is one operation on a dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshbook.ids import client_of_call
from meshbook.wire import pickling
from meshbook.wire.buffers import SegmentPool
from meshbook.wire.messages import Payload, SharedBuffer


class ValueStore(Mapping[str, Any]):
    """The values behind handles, by the call that made them."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._values: dict[str, Any] = {}
        self._segments: dict[str, str] = {}  # of our pool, and the client that has yet to release each
        self._disconnected_clients: set[str] = set()  # a call of theirs may end after they have

    def __getitem__(self, ref: str) -> Any:
        return self._values[ref]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def store(self, call: str, value: Any) -> None:
        """Hold what a call gave until its client releases it, or is gone."""
        self._values[call] = value
        if client_of_call(call) in self._disconnected_clients:  # looked at last: it may have gone this moment
            self._values.pop(call, None)

    def dump(self, call: str, value: Any) -> Payload:
        """What a call gave, for its client to read. Raises TransferError."""
        payload = pickling.dump(value, pool=self._pool)
        client = client_of_call(call)
        segments = {buffer.segment for buffer in payload.buffers if isinstance(buffer, SharedBuffer)}
        for segment in segments:
            self._segments[segment] = client
        if client in self._disconnected_clients:
            self._drop_segments(client)
        return payload

    def release(self, refs: tuple[str, ...], segments: tuple[str, ...]) -> None:
        """A client needs these no more. Names of other ranks' segments are among them, and mean nothing here."""
        for ref in refs:
            self._values.pop(ref, None)
        for segment in segments:
            self._segments.pop(segment, None)
            self._pool.release(segment)

    def drop_client(self, client: str) -> None:
        """A client is gone: let go of all that was held for it."""
        self._disconnected_clients.add(client)
        for ref in [ref for ref in list(self._values) if client_of_call(ref) == client]:
            self._values.pop(ref, None)
        self._drop_segments(client)

    def _drop_segments(self, client: str) -> None:
        for segment in [segment for segment, owner in list(self._segments.items()) if owner == client]:
            self._segments.pop(segment, None)
            self._pool.release_all(segment)
