"""A host at the other end of a command: ssh, or srun. Its start is a dialogue in lines on the command's two pipes."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import time
from abc import abstractmethod
from pathlib import Path
from typing import IO

from meshbook.engines.host_launch import HELLO_TIMEOUT_S, HostLaunch, decode_hello, last_lines
from meshbook.engines.launcher_process import LauncherProcess
from meshbook.errors import StartError
from meshbook.wire.remote_start import RemoteHello

log = logging.getLogger("meshbook.engines")

_END_TIMEOUT_S = 1.5


class HostCommand(HostLaunch):
    """A command with a Python module of ours at its other end."""

    def __init__(self, log_path: Path | None) -> None:
        """log_path: of what is written to standard error; None: a pipe, which `last_words` reads."""
        super().__init__()
        self._log = log_path
        self._is_closed = False
        self.process: LauncherProcess | None = None

    # ---- what depends on the command

    @abstractmethod
    def _start_process(self) -> LauncherProcess:
        """Start the command. May block. Raises StartError."""

    @abstractmethod
    def _describe_failure(self, code: int | None, words: str) -> str:
        """Return why there was no hello. code: the command's exit status; None: it runs still."""

    @abstractmethod
    def _describe_end(self, code: int | None, words: str) -> str:
        """Return how a host that had started has ended, as a phrase that follows its name. May block.

        Args:
            code: the command's exit status; None: it was lost with a former supervisor.
        """

    # ---- the connection

    def open(self) -> RemoteHello:
        """Connect, start the module, and return its hello. Blocks.

        Raises:
            StartError: it did not start.
        """
        self.process = self._start_process()
        line = self._read_line(time.monotonic() + HELLO_TIMEOUT_S)
        if (hello := decode_hello(line, self.machine_name)) is None:
            raise StartError(self._why_no_hello(line))
        return hello

    def _error_file(self) -> int | IO[bytes]:
        return subprocess.PIPE if self._log is None else open(self._log, "wb")

    def ask(self, line: bytes, timeout_s: float) -> bytes:
        """Write a line to the module, and return the line that it answers, or what came of it. Raises StartError."""
        self._write(line + b"\n")
        return self._read_line(time.monotonic() + timeout_s)

    def _read_line(self, deadline: float) -> bytes:
        """Return the module's next line, or its first; what came before the end or the deadline if there is none."""
        assert self.process is not None
        assert self.process.stdout is not None
        data = b""
        fd = self.process.stdout.fileno()
        while b"\n" not in data and (left := deadline - time.monotonic()) > 0:
            if not select.select([fd], [], [], min(left, 0.2))[0]:
                if self._is_closed:
                    break
                continue
            piece = os.read(fd, 1 << 16)
            if not piece:
                break
            self._enter("Python starts")
            data += piece
            while b"\n" in data and not data.lstrip().startswith(b"{"):  # what a login script prints
                data = data.partition(b"\n")[2]
        return data.partition(b"\n")[0]

    def _write(self, data: bytes) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
        except OSError:
            raise StartError(self._why_no_hello(b"")) from None

    def _wait_for_end(self) -> str:
        assert self.process is not None
        code = self.process.wait()
        words = self.last_words()
        if words:
            log.warning("the host on %s has ended (status %s): %s", self.machine_name, code, words)
        return self._describe_end(code, words)

    def last_words(self) -> str:
        """Return the last lines of what the command, and the module, have written as errors."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                text = self._log.read_bytes()[-4096:].decode("utf-8", "replace")
                return last_lines(text)
            return ""
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.kill()
        return last_lines(self.process.stderr.read().decode("utf-8", "replace"))

    def _why_no_hello(self, line: bytes) -> str:
        assert self.process is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_END_TIMEOUT_S)
        words = self.last_words() or line.decode("utf-8", "replace").strip()
        return self._describe_failure(code, words)

    def _inherit(self) -> None:
        if self.process is not None:
            self.process.take_over()

    def terminate(self) -> None:
        self._is_closed = True
        if self.process is not None and not self.process.has_ended:
            self.process.terminate()

    def close(self) -> None:
        """End the command, if it runs still; the host at its other end then ends its ranks and itself."""
        self.terminate()
        if self.process is not None:
            try:
                self.process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._join(_END_TIMEOUT_S)
        if self.process is not None:
            self.process.close()
