"""Processes of this machine that are not our children: whatever ends one, its watcher gets to know."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

from meshbook.wire import processes
from meshbook.wire.loop import Loop

K = TypeVar("K")


class ProcessWatch(Generic[K]):
    """Watches a process per key, and calls `on_exit(key)` on the loop when it has exited."""

    def __init__(self, loop: Loop, on_exit: Callable[[K], None], *, poll_s: float) -> None:
        """poll_s: seconds between two looks at a process, if the system has no pidfd."""
        self._loop, self._on_exit, self._poll_s = loop, on_exit, poll_s
        self._watched: dict[K, int | None] = {}  # key -> pidfd; None: its process is polled

    def watch(self, key: K, pid: int) -> None:
        """Watch the process that has this pid.

        Raises:
            OSError: no file descriptor is left to look; it is not watched.
        """
        try:
            fd = processes.open_pidfd(pid)
        except ProcessLookupError:
            self._watched[key] = None
            self._exited_later(key)
            return
        if fd is not None:
            self._watched[key] = fd
            self._loop.watch_fd(fd, lambda: self._on_exit(key))
            return
        process = processes.identify(pid)
        self._watched[key] = None

        def poll() -> None:
            if key not in self._watched:
                return
            try:
                runs = processes.is_running(process)
            except OSError:  # not known
                runs = True
            if runs:
                self._loop.call_later(self._poll_s, poll, logged=False)
            else:
                self._exited_later(key)

        self._loop.call_later(self._poll_s, poll, logged=False)

    def _exited_later(self, key: K) -> None:
        def exited() -> None:
            self._loop.diverge()
            self._on_exit(key)

        self._loop.call_later(0, exited, logged=False)

    def forget(self, key: K) -> None:
        """Stop watching a process, if it is watched."""
        fd = self._watched.pop(key, None)
        if fd is not None:
            self._loop.unwatch(fd)
            os.close(fd)
