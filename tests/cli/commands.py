"""The command `meshbook`: as a process of its own, the way a terminal or a script runs it, or in the test's."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
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
