"""Futures for results that are still computed on the ranks, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from meshbook.errors import MeshTimeout

T = TypeVar("T")


class MeshFuture(Generic[T]):
    """The future of `mesh.run(…, wait=False)` and of background cells: `result()`, `await`, `done()`, `interrupt()`."""

    def __init__(
        self,
        source: Future[Any],
        finish: Callable[[Any], T],
        *,
        interrupt: Callable[[], None],
        delivery_thread: threading.Thread,
        label: str = "call",
    ) -> None:
        self._source = source
        self._finish = finish
        self._interrupt = interrupt
        self._delivery_thread = delivery_thread
        self._label = label
        self._lock = threading.Lock()
        self._outcome: tuple[T | None, BaseException | None] | None = None

    def done(self) -> bool:
        return self._source.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for every rank and return the result. Blocks; in a coroutine use `await`.

        Args:
            timeout: seconds; None waits for as long as the ranks live.

        Raises:
            CellError, RankLost: as the call itself would have raised.
            MeshTimeout: the timeout expired; the ranks continue.
            RuntimeError: called on the thread that delivers the reply, where it would deadlock.
        """
        if threading.current_thread() is self._delivery_thread and not self._source.done():
            raise RuntimeError("this thread delivers the answers of the mesh and cannot wait for one; use a callback")
        try:
            self._source.result(timeout)
        except (FutureTimeout, TimeoutError):
            if not self._source.done():
                raise MeshTimeout(
                    f"{self._label} did not end within {timeout:g} s; it goes on: wait again, or call interrupt()"
                ) from None
        return self._resolve()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that `result()` would raise; None if there is none. Blocks."""
        try:
            self.result(timeout)
        except MeshTimeout:
            raise
        except BaseException as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[MeshFuture[T]], None]) -> None:
        """Call `callback(self)` when done, on the delivery thread; immediately if already done."""
        self._source.add_done_callback(lambda _: callback(self))

    def interrupt(self) -> None:
        """Interrupt the call on the ranks, as the Stop button does."""
        if not self.done():
            self._interrupt()

    def __await__(self) -> Generator[Any, None, T]:
        waiting = asyncio.wrap_future(self._source)

        async def wait() -> T:
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                self.interrupt()
                raise
            except Exception:
                pass  # `_resolve` raises it as the documented error
            return self._resolve()

        return wait().__await__()

    def _resolve(self) -> T:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = (self._finish(self._source.result()), None)
                except BaseException as failure:
                    self._outcome = (None, failure)
        value, error = self._outcome
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def __repr__(self) -> str:
        if not self.done():
            return f"<MeshFuture: {self._label} is running>"
        error = self.exception()
        return f"<MeshFuture: {self._label} {'is done' if error is None else f'raised {type(error).__name__}'}>"
