"""What a rank stores for the clients of its mesh: the values behind their handles, and unread segments.

A client's calls contain its id (`ids.client_of_call`), and so do the values that they leave. When the client
disconnects, is killed or is detached, all of them are dropped, because no other client has its handles. Names in the
namespace belong to the mesh and stay.

The main thread stores and sends, the service thread releases; each step is one operation on a dict.
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
        self._segments: dict[str, str] = {}  # segments of the pool, and the client that has yet to release each
        self._disconnected_clients: set[str] = set()  # one of their calls may end after they disconnect

    def __getitem__(self, ref: str) -> Any:
        return self._values[ref]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def store(self, call: str, value: Any) -> None:
        """Store the result of a call until its client releases it or disconnects."""
        self._values[call] = value
        if client_of_call(call) in self._disconnected_clients:  # checked last: it may have disconnected meanwhile
            self._values.pop(call, None)

    def dump(self, call: str, value: Any) -> Payload:
        """Return the result of a call, pickled for its client. Raises TransferError."""
        payload = pickling.dump(value, pool=self._pool)
        client = client_of_call(call)
        segments = {buffer.segment for buffer in payload.buffers if isinstance(buffer, SharedBuffer)}
        for segment in segments:
            self._segments[segment] = client
        if client in self._disconnected_clients:
            self._drop_segments(client)
        return payload

    def release(self, refs: tuple[str, ...], segments: tuple[str, ...]) -> None:
        """Release what a client no longer needs. Names of other ranks' segments among them are ignored."""
        for ref in refs:
            self._values.pop(ref, None)
        for segment in segments:
            self._segments.pop(segment, None)
            self._pool.release(segment)

    def drop_client(self, client: str) -> None:
        """Drop all that is stored for a client that has disconnected."""
        self._disconnected_clients.add(client)
        for ref in [ref for ref in list(self._values) if client_of_call(ref) == client]:
            self._values.pop(ref, None)
        self._drop_segments(client)

    def _drop_segments(self, client: str) -> None:
        for segment in [segment for segment, owner in list(self._segments.items()) if owner == client]:
            self._segments.pop(segment, None)
            self._pool.release_all(segment)
