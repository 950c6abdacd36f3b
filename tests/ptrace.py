"""A process held as a debugger holds one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

_PROGRAM = """
import ctypes, os, sys
pid, ATTACH, ALL = int(sys.argv[1]), 16, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(ATTACH, pid, None, None):
    sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(pid, ALL)
print("held", flush=True)
while os.WIFSTOPPED(os.waitpid(pid, ALL)[1]): pass
"""


@contextmanager
def ptrace_stopped(pid: int) -> Iterator[None]:
    """In this block the process stands still: SIGCONT does not continue it, SIGKILL ends it. Skips the test where
    nobody may trace it."""
    command = [sys.executable, "-c", _PROGRAM, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as debugger:
        assert debugger.stdout is not None
        assert debugger.stderr is not None
        try:
            if debugger.stdout.readline() != "held\n":
                pytest.skip(f"process {pid} may not be traced here: {debugger.stderr.read()}")
            yield
        finally:
            debugger.kill()
            debugger.wait()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
