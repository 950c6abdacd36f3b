"""Processes that are started on threads of a process that forks, as a supervisor forks its standbys.

Between the making of a child's pipes and its start this process has both ends of them. A fork then would keep the
child's ends open: nobody would see that the child has ended, or been started. So neither happens while the other does.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

# The same thread may take it again: a start that runs code in the child (`preexec_fn`) is a fork to Python.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class ChildProcess(subprocess.Popen[Any]):
    """A Popen that no fork of this process comes into the midst of."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        with _lock:
            super().__init__(args, **options)


def run_command(args: Sequence[str], *, timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without input, and return what it has written as text. Blocks.

    Raises:
        subprocess.TimeoutExpired: it did not end, and was killed.
        OSError: it cannot be started.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ChildProcess(args, text=True, errors="replace", **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(args, process.returncode, out, err)
