"""Values between this process and the ranks: pickled, large ones in shared memory, and released when unused here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.ids import Ranks
from meshbook.wire import messages, pickling
from meshbook.wire.buffers import ReceiveBuffer, SegmentPool, SegmentReader

# Seconds after which a pooled segment that nobody uses is freed.
_SEGMENT_IDLE_S = 30.0


class ValueTransfer:
    """The shared memory and the references to the ranks' values of one session.

    Args:
        persistent_id: returns the pickling key of an object that the ranks replace by their own; None for others.
        has_other_machines: returns whether ranks are on machines where they cannot write into this process's memory.
    """

    def __init__(self, persistent_id: Callable[[Any], str | None], *, has_other_machines: Callable[[], bool]) -> None:
        self._persistent_id, self._has_other_machines = persistent_id, has_other_machines
        self._pool = SegmentPool()
        self._reader = SegmentReader()
        self._unused_refs: deque[str] = deque()

    def dump(self, thing: Any, ranks: Ranks, names: Sequence[str] | None = None) -> messages.Payload:
        """Pickle an object for these ranks. Raises TransferError, which names the part that cannot be pickled.

        Args:
            names: what an error calls the elements of a tuple.
        """
        name = "value" if names is None else names
        return pickling.dump(thing, pool=self._pool, readers=ranks, persistent=self._persistent_id, name=name)

    def load(self, payload: messages.Payload) -> Any:
        return pickling.load(payload, reader=self._reader)

    def allocate_buffer(self, nbytes: int) -> ReceiveBuffer | None:
        """Return a buffer that ranks write into and that can back a value here; None: their parts are to be sent."""
        return None if self._has_other_machines() else self._pool.receive_buffer(nbytes)

    def discard_ref(self, ref: str) -> None:
        """Queue a reference that is unused here for release. Called by finalizers, which may run inside a send."""
        self._unused_refs.append(ref)

    def drain_unused(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the references and segments that became unused since the last call; free idle segments of our own."""
        refs = []
        while self._unused_refs:
            refs.append(self._unused_refs.popleft())
        self._pool.trim(_SEGMENT_IDLE_S)
        return tuple(refs), self._reader.drain_released()

    def on_segments_released(self, report: messages.SegmentsReleased) -> None:
        for segment in report.segments:
            self._pool.release(segment, reader=report.rank)

    def remove_rank(self, rank: int) -> None:
        """Forget a lost rank: it reads nothing any more."""
        self._pool.remove_reader(rank)

    def close(self) -> None:
        self._pool.close()
