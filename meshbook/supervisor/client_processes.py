"""The processes of a mesh's clients on this machine: whatever ends one, the supervisor gets to know."""

from __future__ import annotations

import os
from collections.abc import Callable

from meshbook.wire import processes
from meshbook.wire.loop import Loop

_POLL_S = 5.0  # if the system has no pidfd


class ClientProcesses:
    """Watches a process per client, and calls `on_exit(client)` on the loop when it has exited."""

    def __init__(self, loop: Loop, on_exit: Callable[[str], None]) -> None:
        self._loop, self._on_exit = loop, on_exit
        self._watched: dict[str, int | None] = {}  # client -> pidfd; None: its process is polled

    def watch(self, client: str, pid: int) -> None:
        try:
            fd = self._watched[client] = processes.open_pidfd(pid)
        except ProcessLookupError:
            self._loop.call_later(0, lambda: self._on_exit(client))
            return
        if fd is not None:
            self._loop.watch_fd(fd, lambda: self._on_exit(client))
            return
        process = processes.identify(pid)

        def poll() -> None:
            if client not in self._watched:
                return
            if processes.is_running(process):
                self._loop.call_later(_POLL_S, poll)
            else:
                self._on_exit(client)

        self._loop.call_later(_POLL_S, poll)

    def forget(self, client: str) -> None:
        """Stop watching a client's process, if it is watched."""
        fd = self._watched.pop(client, None)
        if fd is not None:
            self._loop.unwatch(fd)
            os.close(fd)
