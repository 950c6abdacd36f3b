"""The command `meshbook`: as a process of its own, the way a terminal or a script runs it, or in the test's."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from meshbook.cli.main import main
from tests.budget import WAIT_S


@dataclass(frozen=True)
class CommandResult:
    """How the command ended."""

    status: int
    out: str
    err: str


def meshbook(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None, text: str = "") -> CommandResult:
    """Run `meshbook WORDS...` to its end.

    Args:
        text: what is typed.
    """
    command = [sys.executable, "-m", "meshbook", *words]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input=text,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def typed(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> CommandResult:
    """Run `meshbook WORDS...` in this process: a Python interpreter for each would be most of a test's time."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or "."),
        mock.patch.dict(os.environ, env or {}),
    ):
        try:
            status = main(words)
        except SystemExit as error:  # argparse's
            status = int(error.code or 0)
    return CommandResult(status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command on a terminal of its own; what it writes there is read with `read_until`."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "meshbook", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that ^C is a signal
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(ours)


def read_until(terminal: int, what: str, timeout_s: float = WAIT_S) -> str:
    """What stands on the terminal, up to and with `what`."""
    text = b""
    deadline = time.monotonic() + timeout_s
    while what.encode() not in text:
        left = deadline - time.monotonic()
        assert left > 0, f"{what!r} did not come:\n{text.decode(errors='replace')}"
        if select.select([terminal], [], [], left)[0]:
            text += os.read(terminal, 1 << 16)
    return text.decode(errors="replace")
