"""Control of child processes: they must not outlive their parent, and it may inspect them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# Seconds that a rank's actors have to end when the rank exits: for the messages received before, and their
# `__cleanup__`. Then the rank is killed. Jupyter gives a kernel as long.
ACTORS_GRACE_S = 5.0

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61  # "Yama"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason.

    Linux only; elsewhere this does nothing, and the process relies on the closed socket to the parent.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended between the two calls
        os._exit(1)


def start_new_process_group() -> None:
    """Make this process the leader of a process group, so that `kill_process_group` finds all its descendants."""
    with contextlib.suppress(OSError):  # a session leader already leads its group
        os.setpgid(0, 0)


def kill_process_group(pgid: int) -> None:
    """Kill what an exited process has left behind: stuck DataLoader workers, commands.

    Descendants with a session or group of their own continue. Call it before the leader is waited for, while its pid
    cannot be reused.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped a process, until SIGCONT continues it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def allow_ptrace_by(pid: int) -> None:
    """Let process `pid`, and its child processes, read this one as a debugger does.

    If the kernel's Yama module allows that only to a process's ancestors (Ubuntu's default), py-spy, started by the
    host, could read no rank. Elsewhere nothing changes.
    """
    if pid > 0 and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
