"""Starts ranks as fresh interpreters, where forking is not wanted or not safe."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from meshbook.host.starter import RankProcess, close_all, make_process_files, rank_environment
from meshbook.wire import spawn
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.process_control import kill_process_group
from meshbook.wire.processes import open_pidfd

# Seconds between two polls for exits, if the kernel has no pidfds.
_POLL_S = 0.2


class FreshStarter:
    """Starts every rank in a new interpreter: slower and larger, for where forking is not possible."""

    def __init__(self, loop: Loop, on_exit: Callable[[int, int | None], None], *, host_pipe: int) -> None:
        """host_pipe: as for `ForkStarter`."""
        self._loop, self._on_exit, self._host_pipe = loop, on_exit, host_pipe
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._poll_timer: Timer | None = None
        self._are_children = True

    def start_rank(self, config: spawn.RankConfig, on_started: Callable[[RankProcess], None]) -> None:
        on_started(self._start(spawn.ForkRank(0, config)))

    def start_spare(
        self,
        config: spawn.SpareConfig,
        channel: socket.socket,
        on_started: Callable[[RankProcess], None],
        on_failed: Callable[[str], None],
    ) -> None:
        try:
            with channel:
                process = self._start(spawn.ForkSpare(0, config), channel.fileno())
        except OSError as error:
            on_failed(str(error))
        else:
            on_started(process)

    def _start(self, command: spawn.ForkRank | spawn.ForkSpare, *channel: int) -> RankProcess:
        """Start an interpreter that carries out a command as a fork would. Raises OSError."""
        started, write_ends = make_process_files()
        try:
            with open(spawn.make_file(command), "rb") as config_file:  # not a pipe, which takes 64 KiB before it blocks
                config_file.seek(0)
                descriptors = (started.out, started.err, started.crash_log.fd, self._host_pipe, *channel)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "meshbook.rank.main", *map(str, descriptors)],
                    stdin=config_file,
                    stdout=write_ends[0],
                    stderr=write_ends[1],
                    pass_fds=descriptors,
                    env=rank_environment(),
                )
        except OSError:
            started.close()
            raise
        finally:
            close_all(write_ends)
        started.pid = process.pid
        self._processes[process.pid] = process
        self._watch_exit(process)
        return started

    def take_over(self) -> None:
        self._are_children = False

    def close(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # not by `process`, which knows only children
            kill_process_group(process.pid)
            process.wait()

    def _watch_exit(self, process: subprocess.Popen[bytes]) -> None:
        fd = open_pidfd(process.pid)
        if fd is None:
            self._poll_exits()
            return

        def ended() -> None:
            self._loop.unwatch(fd)
            os.close(fd)
            self._reap(process)

        self._loop.watch_fd(fd, ended)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        kill_process_group(process.pid)
        code = process.wait()
        del self._processes[process.pid]
        status = -code if code < 0 else code << 8
        self._on_exit(process.pid, status if self._are_children else None)

    def _poll_exits(self) -> None:
        for process in [process for process in self._processes.values() if process.poll() is not None]:
            self._loop.diverge()
            self._reap(process)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll_timer = self._loop.call_later(_POLL_S, self._poll_exits, logged=False)
