"""The event loop of an actor with async endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from meshbook.actors.runtime.futures import NON_BLOCKING_THREADS

_STOP_GRACE_S = 5.0  # for running tasks to finish when their actor is stopped; then they are cancelled
_CANCEL_GRACE_S = 1.0  # for cancelled endpoints to send their failure to their callers


class ActorLoop:
    """Runs an event loop on the actor's thread, with one task per message.

    Args:
        on_wake: called on the loop at its start and after each `wake`.
    """

    def __init__(self, class_name: str, on_wake: Callable[[], None]) -> None:
        self._class_name, self._on_wake = class_name, on_wake
        self._loop = asyncio.new_event_loop()
        self._context = copy_context()  # this actor's context, copied for each task
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_wake_pending = False
        self._stopped = False

    def run(self) -> None:
        """Run until `stop`. On the actor's thread."""
        asyncio.set_event_loop(self._loop)
        thread = threading.get_ident()
        NON_BLOCKING_THREADS[thread] = (
            f"get() would stop the event loop of {self._class_name}, which has async endpoints: write `await future`; "
            "in an actor whose endpoints are all `def`, get() is fine"
        )
        self._loop.call_soon(self._on_wake)
        try:
            while not self._stopped:
                with contextlib.suppress(KeyboardInterrupt):  # an interrupt that arrived outside its target code
                    self._loop.run_forever()
        finally:
            NON_BLOCKING_THREADS.pop(thread, None)
            self._loop.close()

    def wake(self) -> None:
        """Call `on_wake` soon. Any thread; has no effect once the loop is closed."""
        if not self._is_wake_pending:
            self._is_wake_pending = True
            self._call_soon(self._woken)

    def _woken(self) -> None:
        self._is_wake_pending = False  # first: what is put from now on wakes the loop again
        self._on_wake()

    def _call_soon(self, callback: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task. Any thread."""
        self._call_soon(task.cancel)

    async def finish_tasks(self) -> None:
        """Wait until all tasks but the caller have ended; cancel those that take long."""
        others = self._tasks - {asyncio.current_task()}
        if others:
            _, unfinished = await asyncio.wait(others, timeout=_STOP_GRACE_S)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=_CANCEL_GRACE_S)

    def stop(self) -> None:
        """End `run`. On the loop."""
        self._stopped = True
        self._loop.stop()
