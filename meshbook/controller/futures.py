"""Futures for results that are still computed on the ranks, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from meshbook.actors.runtime.futures import Future

T = TypeVar("T")


class MeshFuture(Future[T]):
    """The future of `mesh.run(…, wait=False)` and of background cells: `result()`, `await`, `done()`, `interrupt()`.

    `result()` raises what the call itself would have raised (CellError, RankLost). An `await` that is cancelled
    interrupts the call.
    """

    _DEADLOCK = "this thread delivers the answers of the mesh and cannot wait for one; use a callback"

    def __init__(self, label: str, *, interrupt: Callable[[], None], delivery_thread: threading.Thread) -> None:
        super().__init__(label, answering_thread=delivery_thread.ident or 0)
        self._interrupt = interrupt

    def interrupt(self) -> None:
        """Interrupt the call on the ranks, as the Stop button does."""
        if not self.done():
            self._interrupt()

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            self.interrupt()
            raise

    def __repr__(self) -> str:
        if not self.done():
            return f"<MeshFuture: {self.label} is running>"
        error = self.exception()
        return f"<MeshFuture: {self.label} {'is done' if error is None else f'raised {type(error).__name__}'}>"
