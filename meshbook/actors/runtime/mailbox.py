"""The mailbox of one actor. Filled by any thread, emptied by the actor's."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from meshbook.actors.runtime.calls import IncomingCall, StopRequest
from meshbook.actors.runtime.faults import MeshFailure

_INTERRUPT_MARKER = object()  # messages queued before it were interrupted


class Mailbox:
    """Queues an actor's calls and stop requests; failures, of what it owns and its own, come first."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._first: deque[MeshFailure | StopRequest] = deque()
        self._markers: deque[None] = deque()  # one per `_INTERRUPT_MARKER` in the queue
        # Without a function between: each call of the actor comes through here.
        self.put: Callable[[IncomingCall | StopRequest], None] = self._queue.put

    def put_first(self, item: MeshFailure | StopRequest) -> None:
        """Put what is handled before all calls: a failure of what the actor owns, or its own end by a failure."""
        self._first.append(item)
        self._queue.put(None)  # ends a wait in `get`

    def interrupt_queued(self) -> None:
        """Mark all calls that are queued now as interrupted."""
        self._markers.append(None)
        self._queue.put(_INTERRUPT_MARKER)

    @property
    def is_interrupted(self) -> bool:
        """Whether a call that was taken out just now was interrupted."""
        return bool(self._markers)

    def get(self, *, block: bool = True, only_first: bool = False) -> MeshFailure | IncomingCall | StopRequest | None:
        """Return the next item; None if there is none and `block` is False."""
        while True:
            if self._first:
                with contextlib.suppress(IndexError):  # after the actor's end, several threads do this concurrently
                    return self._first.popleft()
            if only_first or (not block and self._queue.empty()):
                return None
            try:
                item: IncomingCall | StopRequest | None = self._queue.get(block)
            except Empty:
                return None
            if item is _INTERRUPT_MARKER:
                self._markers.pop()
            elif item is not None:
                if self._markers and isinstance(item, IncomingCall):
                    item.is_interrupted = True
                return item

    def __len__(self) -> int:
        return self._queue.qsize()
