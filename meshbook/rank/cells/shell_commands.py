"""Shell commands in a rank's cells: `!command` and `x = !command`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

from meshbook.clock import monotonic
from meshbook.rank.interrupt import InterruptGate
from meshbook.wire.stop_timing import COMMAND_GRACE_S


def run_streaming(command: str, gate: InterruptGate) -> int:
    """Run a shell command and stream its output to sys.stdout.

    The command runs on a pseudo-terminal, because most programs buffer their output on a pipe; it has no input. It is
    spawned, not forked, because this process has threads.

    Returns:
        The exit code; for a command that a signal ended, the negative signal number.
    """
    process: subprocess.Popen[bytes] | None = None
    master, slave = os.openpty()
    try:
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # no line-end translation
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        with contextlib.suppress(OSError):
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        with gate.defer_interrupts():  # a child whose pid was not stored could not be terminated
            process = subprocess.Popen(
                command,
                shell=True,
                executable=_user_shell(),
                stdin=subprocess.DEVNULL,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
            os.close(slave)
            slave = -1
        for data in _read_chunks(master, process):
            sys.stdout.buffer.write(data)
    except KeyboardInterrupt:
        if process is not None:
            _terminate(process, master)
        raise
    finally:
        os.close(master)
        if slave >= 0:
            os.close(slave)
    exit_code = process.wait()
    return -(exit_code - 128) if exit_code > 128 else exit_code


def run_captured(command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command and return its output, stdout and stderr as one text."""
    return subprocess.run(
        command,
        shell=True,
        executable=_user_shell(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _user_shell() -> str | None:
    return os.environ.get("SHELL") or None


def _read_chunks(master: int, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the command's output until it has exited and everything is read, even if its children hold the terminal."""
    has_exited = False
    while True:
        readable, _, _ = select.select([master], [], [], 0 if has_exited else 0.05)
        if readable:
            try:
                data = os.read(master, 1 << 16)
            except OSError:  # EIO: the other end is closed
                return
            if not data:
                return
            yield data
        elif has_exited:
            return
        else:
            has_exited = process.poll() is not None  # it may have written since: look again


def _terminate(process: subprocess.Popen[bytes], master: int) -> None:
    """Send SIGINT to the command and its children, as Ctrl-C would; then SIGKILL if it does not exit soon."""
    deadline = monotonic() + COMMAND_GRACE_S
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        while process.poll() is None and monotonic() < deadline:
            readable, _, _ = select.select([master], [], [], 0.02)
            if readable:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(os.read(master, 1 << 16))
    process.wait()
