"""Processes that must not outlive the one that started them, and that it may look into."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# Seconds that the actors of a rank have to end when the rank is told to: what they have been sent before, and their
# `__cleanup__`. Then it is killed. Jupyter gives a kernel as long.
ACTORS_GRACE_S = 5.0

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61  # "Yama"


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends. Linux; elsewhere nothing happens and
    the closed socket to the parent has to do."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended between the two calls
        os._exit(1)


def start_new_process_group() -> None:
    """Make this process the leader of a group, to which all that it starts belongs: `kill_process_group` finds them."""
    with contextlib.suppress(OSError):  # a session's leader leads its group already
        os.setpgid(0, 0)


def kill_process_group(pgid: int) -> None:
    """Kill what a process that ended has left behind: DataLoader workers that are stuck, commands. What has made a
    session or group of its own goes on. Call it before the leader is waited for, while its number is nobody else's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP), and will do nothing until it is told to go on (SIGCONT)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def allow_ptrace_by(pid: int) -> None:
    """Let process `pid`, and what it starts, read this one as a debugger does.

    Where the kernel's Yama module lets nobody but a process's parents do that (Ubuntu's default), py-spy, started by
    the host, could read no rank. Elsewhere nothing changes.
    """
    if pid > 0 and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
