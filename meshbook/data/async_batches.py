"""Batches of an async source, for a loop that is not async.

The source's coroutines run in an event loop on a thread of their own, so that this works in a notebook, whose own loop
is running, and from any thread. Knows nothing of meshes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

_END = object()
_CLOSE_TIMEOUT_S = 2.0  # a source that does not end when it is cancelled is abandoned


class AsyncBatches(Iterator[Any]):
    """Iterates over an async source. Each batch is asked for when it is needed."""

    def __init__(self, source: AsyncIterable[Any]) -> None:
        self._source = aiter(source)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="meshbook-async-source", daemon=True)
        self._task: asyncio.Task[Any] | None = None  # what waits for the next batch
        self._lock = threading.Lock()
        self._is_closed = False

    def __next__(self) -> Any:
        """Return the next batch. Blocks.

        Raises:
            Exception: what the source raised. It is closed then.
        """
        with self._lock:
            if self._is_closed:
                raise StopIteration
            if self._thread.ident is None:
                self._thread.start()
            pulled: Future[Any] = asyncio.run_coroutine_threadsafe(self._pull(), self._loop)
        try:
            batch = pulled.result()
        except BaseException as error:
            was_closed = self._is_closed
            self.close()
            if was_closed and isinstance(error, CancelledError):
                raise StopIteration from None
            raise
        if batch is _END:
            self.close()
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the source: cancel what it awaits, and run its `finally` blocks. From any thread; may be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._thread.ident is None:
                self._loop.close()
                return
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    async def _pull(self) -> Any:
        self._task = asyncio.current_task()
        return await anext(self._source, _END)

    async def _end(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        self._loop.stop()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
