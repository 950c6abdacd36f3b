"""The processes of a host's ranks: signals to them, their states, and what they wrote to their pipes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios

from meshbook.host import procfs
from meshbook.host.starter import RankProcess
from meshbook.wire import messages
from meshbook.wire.process_control import kill_process_group


class RankProcesses:
    """Live processes by rank."""

    def __init__(self) -> None:
        self._by_rank: dict[int, RankProcess] = {}

    def add(self, rank: int, process: RankProcess) -> None:
        self._by_rank[rank] = process

    def get(self, rank: int) -> RankProcess | None:
        return self._by_rank.get(rank)

    def pids(self) -> list[int]:
        return [process.pid for process in self._by_rank.values()]

    def pop(self, pid: int) -> tuple[int, RankProcess] | None:
        """Remove a process that has ended; return its rank and it, or None for one that is no rank's."""
        for rank, process in self._by_rank.items():
            if process.pid == pid:
                return rank, self._by_rank.pop(rank)
        return None

    def signal(self, rank: int, number: int) -> None:
        process = self._by_rank.get(rank)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill_groups(self) -> list[int]:
        """Kill the ranks with what they have started, which lives on when only they end; return the ranks' pids."""
        pids = self.pids()
        for pid in pids:
            kill_process_group(pid)
        return pids

    def state(self, rank: int) -> str | None:
        """The state of a rank's process as /proc has it ("T": stopped); None: not known."""
        process = self._by_rank.get(rank)
        return None if process is None else procfs.process_state(process.pid)


def read_pipes(process: RankProcess) -> list[messages.Text]:
    """Return the unread content of a rank's stdout and stderr.

    Output that arrives during the read is ignored: a child process of the rank may write without end.
    """
    texts = []
    for fd, stream in ((process.out, "stdout"), (process.err, "stderr")):
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(fd, num_unread_bytes(fd))
        if data:
            texts.append(messages.Text(stream=stream, text=data.decode("utf-8", "replace")))  # type: ignore[arg-type]
    return texts


def num_unread_bytes(fd: int) -> int:
    """Return the number of bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
