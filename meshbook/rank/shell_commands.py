"""Shell commands of a rank's cells: `!command` and `x = !command`."""

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
    """Run a shell command, its output to sys.stdout as it comes.

    On a pseudo-terminal, because most programs hold their output back when they see a pipe; it reads nothing. Spawned,
    not forked: this process has threads.

    Returns:
        The exit code; of a command that a signal ended, the signal's number, negative.
    """
    process: subprocess.Popen[bytes] | None = None
    master, slave = os.openpty()
    try:
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # line ends as they are written
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        with contextlib.suppress(OSError):
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        with gate.defer_interrupts():  # a child whose pid nobody noted could not be ended
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
    """Run a shell command and keep its output, stdout and stderr as one text."""
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
    """What the command writes, until it has ended and everything was read, whatever its children keep open."""
    while True:
        readable, _, _ = select.select([master], [], [], 0.05)
        if readable:
            try:
                data = os.read(master, 1 << 16)
            except OSError:  # EIO: nobody has the other end any more
                return
            if not data:
                return
            yield data
        elif process.poll() is not None:
            return


def _terminate(process: subprocess.Popen[bytes], master: int) -> None:
    """SIGINT to the command and its children, as Ctrl-C would; SIGKILL if that does not help soon."""
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
