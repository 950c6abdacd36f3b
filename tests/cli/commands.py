"""The command `meshbook` as a process of its own, the way a terminal or a script runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
