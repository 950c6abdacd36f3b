"""Control of child processes: they must not outlive who started them, and may be inspected by them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import threading

from meshbook.wire.processes import forks_of

# Seconds that a rank's actors have to end when the rank exits: for the messages received before, and their
# `__cleanup__`. Then the rank is killed. Jupyter gives a kernel as long.
ACTORS_GRACE_S = 5.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61  # "Yama"
_F_SETSIG = 10  # which signal O_ASYNC sends


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason.

    Linux only; elsewhere this does nothing, and the process relies on the closed socket to the parent.

    Args:
        parent: its pid; this process ends at once if it has another one. None: the present one's.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent, who has to reap them, of descendants whose own parent ends. Linux only."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_pipe(fd: int, *, with_group: bool = True) -> None:
    """Have this process and its process group killed when nobody holds the write end of a pipe any more.

    The kernel does it, at once, whatever the process is doing, and whoever its parent is. Where it cannot (no Linux, no
    /proc), a thread does, as soon as it gets the GIL.

    Args:
        fd: the read end.
        with_group: whether the process leads its group. False: the process alone is killed.
    """
    try:
        for owner in (os.getpid(), -os.getpgrp())[: 1 + with_group]:  # user code may have left the group
            # opened anew, because whom to signal belongs to the open file, which other processes share
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(own, fcntl.F_SETOWN, owner)
            fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | fcntl.FASYNC)
    except (OSError, AttributeError):
        if not with_group:
            return
        threading.Thread(target=_wait_for_end_of_file, args=(fd,), name="meshbook-host", daemon=True).start()
        return
    poller = select.poll()
    poller.register(fd, 0)
    if poller.poll(0):  # it was closed before
        if with_group:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end_of_file(fd: int) -> None:
    os.read(fd, 1)
    os.killpg(0, signal.SIGKILL)


def kill_supervisor(pid: int) -> None:
    """Kill a supervisor with its standby, which would take over, and so its mesh. Raises ProcessLookupError."""
    os.kill(pid, signal.SIGSTOP)  # so that it starts no other standby
    for process in (*forks_of(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def start_new_session() -> None:
    """Make this process the leader of a session and of its process group.

    By that `kill_process_group` finds all its descendants. And Linux shares the cores between sessions (autogroups): in
    one session all ranks of a mesh would have the share of one process, where each rank of torchrun's has its own.
    """
    with contextlib.suppress(OSError):  # it leads a process group already
        os.setsid()


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
