"""A process that brings hosts (ssh, srun, a driver), as a supervisor has it and, after it, its standby."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Any

from meshbook.wire.child_processes import ChildProcess
from meshbook.wire.processes import open_pidfd


class LauncherProcess:
    """A process with pipes without buffers, which have no locks that a fork could find taken.

    A standby inherits the pipes, and a descriptor by which it sees the process's end. It is not the parent, so it does
    not learn the exit status.

    Attributes:
        stdin, stdout, stderr: the pipes that were asked for.
        is_inherited: a former supervisor has started it.
    """

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        """Start it; `options` are Popen's. Raises OSError: it cannot be started."""
        self._child = ChildProcess(args, bufsize=0, **options)
        self.args, self.pid = args, self._child.pid
        self.stdin: IO[bytes] | None = self._child.stdin
        self.stdout: IO[bytes] | None = self._child.stdout
        self.stderr: IO[bytes] | None = self._child.stderr
        self._pidfd = open_pidfd(self.pid)
        self.is_inherited = False

    def take_over(self) -> None:
        """Go on in a process that was forked from its parent, which has ended."""
        self.is_inherited = True
        self._child.returncode = 0  # else Popen would wait for what is not this process's child

    @property
    def has_ended(self) -> bool:
        return self._wait_inherited(0.0) if self.is_inherited else self._child.poll() is not None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until it has ended; return its exit status as Popen gives it, None if that is not known.

        Raises:
            subprocess.TimeoutExpired: it runs still.
        """
        if not self.is_inherited:
            return self._child.wait(timeout_s)
        if not self._wait_inherited(timeout_s):
            raise subprocess.TimeoutExpired(list(self.args), timeout_s or 0.0)
        return None

    def close(self) -> None:
        """Close what this process has of it, once it has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self.is_inherited:
            self._child.send_signal(number)
        elif self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _wait_inherited(self, timeout_s: float | None) -> bool:
        """Wait for the end of a process that is no child of this one; return whether it has ended."""
        if self._pidfd is None:  # it is closed; a system without pidfds has no standby
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
