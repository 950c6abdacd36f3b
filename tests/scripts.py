"""Programs that tests run in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.budget import WAIT_S


def run_python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program, which may be indented, to its end."""
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
