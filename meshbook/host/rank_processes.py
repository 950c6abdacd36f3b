"""The processes of a host's ranks: signals to them, their states, and what they wrote to their pipes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterable
from functools import partial

from meshbook.host import procfs
from meshbook.host.instructions import ProcessLook
from meshbook.host.run_times import RunTimes
from meshbook.host.shared_files import unlink_shared_files
from meshbook.host.starter import RankProcess
from meshbook.ids import Ranks
from meshbook.wire import messages, processes
from meshbook.wire.loop import Loop

_LOOK_AGAIN_S = 1.0


class RankProcesses:
    """Live processes by rank."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._by_rank: dict[int, RankProcess] = {}
        self._added_at: dict[int, float] = {}  # by pid, wall clock

    def add(self, rank: int, process: RankProcess) -> None:
        self._by_rank[rank] = process
        self._added_at[process.pid] = self._loop.clock.wall()

    def get(self, rank: int) -> RankProcess | None:
        return self._by_rank.get(rank)

    def ended_pids(self, *, with_zombies: bool) -> list[int]:
        """Return the pids of those that run no more. with_zombies: also of those that nobody has waited for.

        Raises:
            OSError: no file descriptor is left to look.
        """
        found = {process.pid: processes.identify(process.pid) for process in self._by_rank.values()}
        return [pid for pid, one in found.items() if not (processes.is_running(one) if with_zombies else one.exists)]

    def find_ended(self, on_ended: Callable[[int], None], *, with_zombies: bool) -> None:
        """Call `on_ended` with the pids of those that run no more, now or when there is a descriptor to look."""
        try:
            ended = self.ended_pids(with_zombies=with_zombies)
        except OSError:
            look_again = partial(self.find_ended, on_ended, with_zombies=with_zombies)
            self._loop.call_later(_LOOK_AGAIN_S, look_again, logged=False)
            return
        for pid in ended:
            on_ended(pid)

    def ending(self) -> Ranks:
        """Return the ranks whose process has ended or is about to, as far as is known, and has not been removed."""
        found = self._by_rank.items()
        return self._loop.observe(lambda: tuple(rank for rank, one in found if _may_be_ending(one.pid)))

    def pop(self, pid: int) -> tuple[int, RankProcess] | None:
        """Remove a process that has ended; return its rank and it, or None for one that is no rank's."""
        for rank, process in self._by_rank.items():
            if process.pid == pid:
                self._loop.act(partial(unlink_shared_files, pid, self._added_at.pop(pid)), logged=False)
                return rank, self._by_rank.pop(rank)
        return None

    def signal(self, rank: int, number: int) -> None:
        process = self._by_rank.get(rank)
        if process is not None:
            self._loop.act(lambda: _signal(process.pid, number))

    def continue_stopped(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Send SIGCONT to those of these ranks that a signal has stopped, and return them."""
        stopped = tuple(rank for rank in ranks if self.state(rank) == "T")
        for rank in stopped:
            self.signal(rank, signal.SIGCONT)
        return stopped

    def kill(self, pid: int) -> None:
        """Kill a process that is no rank's any more."""
        self._loop.act(lambda: _signal(pid, signal.SIGKILL))

    def state(self, rank: int) -> str | None:
        """The state of a rank's process as /proc has it ("T": stopped); None: not known."""
        process = self._by_rank.get(rank)
        return None if process is None else self._loop.observe(lambda: procfs.process_state(process.pid))

    def look(self, ranks: Iterable[int]) -> dict[int, ProcessLook]:
        return {rank: ProcessLook(self.state(rank), self._run_times(rank)) for rank in ranks}

    def _run_times(self, rank: int) -> RunTimes | None:
        process = self._by_rank.get(rank)
        return None if process is None else self._loop.observe(lambda: procfs.read_run_times(process.pid))

    def last_collective(self, rank: int) -> str | None:
        """The last collective that a rank has begun, as its crash log has it."""
        process = self._by_rank.get(rank)
        return None if process is None else self._loop.observe(process.crash_log.read_note)

    def read_pipes(self, process: RankProcess) -> list[messages.Text]:
        return self._loop.observe(lambda: read_pipes(process))


def _may_be_ending(pid: int) -> bool:
    try:
        return processes.is_ending(pid)
    except OSError:  # no descriptor is left to look
        return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


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
