"""The process that whoever starts a host sees: it lives for as long as the host agent does, or a standby of it.

An ssh server, srun, Ray and the supervisor take the end of the process that they have started for the end of the host.
So that process is a keeper, which forks the host agent and waits until nobody holds the write end of a pipe any more:
the agent does, and its standby. It passes SIGTERM on, reaps what the agent leaves behind, and ends as the agent has.
The agent and its standby end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from meshbook.wire.process_control import adopt_orphans, die_with_parent, die_with_pipe

_PID: Final = struct.Struct("<i")


class Keeper:
    """This process as a keeper; the agent and its standby have the object too.

    Attributes:
        pid: the keeper's.
    """

    def __init__(self, pipe: int | None = None) -> None:
        """pipe: the read end of a pipe; the agent is killed when nobody holds its write end any more."""
        self.pid, self._pipe = os.getpid(), pipe
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        self._agent = 0  # pid of the host agent
        self._statuses: dict[int, int] = {}  # of children that have ended
        self._is_terminating = False

    def run(self, serve: Callable[[], None]) -> int:
        """Fork the host agent, which calls `serve`; return how it ended, as waitpid gives it, once no standby follows.

        To be called before this process has threads, sockets and children.
        """
        adopt_orphans()
        self._agent = os.fork()
        if self._agent == 0:
            self._serve(serve)
        os.close(self._write)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGCHLD, self._reap)
        self._reap()
        while pid := os.read(self._read, _PID.size):
            (self._agent,) = _PID.unpack(pid)
            if self._is_terminating:  # perhaps it came after the former agent's end
                self._terminate()
        with contextlib.suppress(ChildProcessError):
            self._statuses[self._agent] = os.waitpid(self._agent, 0)[1]
        return self._statuses.get(self._agent, 0)

    def begin(self) -> None:
        """Go on as the host agent, in the process that was forked for it or in its standby."""
        die_with_parent(self.pid)
        if self._pipe is not None:
            die_with_pipe(self._pipe, with_group=False)
        os.write(self._write, _PID.pack(os.getpid()))

    def _serve(self, serve: Callable[[], None]) -> NoReturn:
        status = 1
        try:
            os.close(self._read)
            self.begin()
            serve()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    def _terminate(self, *_: object) -> None:
        self._is_terminating = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._agent, signal.SIGTERM)

    def _reap(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._statuses[ended[0]] = ended[1]


def end_like(status: int) -> NoReturn:
    """End this process as one with this status, from waitpid, has ended."""
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
