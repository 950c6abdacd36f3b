"""Identify a process even after its pid was reused, the clock was set, or the machine rebooted.

A process is identified by its pid, the kernel's tick count when it started, and the boot that the count belongs to.
Wall clocks are not compared: psutil's `create_time` moves with every step of the clock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from pathlib import Path

import psutil
from msgspec import Struct

from meshbook.wire.descriptors import is_shortage

# Among the flags of /proc/<pid>/stat.
_PF_EXITING = 0x4


class ProcessIdentity(Struct, frozen=True):
    """One process of one boot of one machine."""

    pid: int
    started_ticks: int  # of the system's clock since boot, field 22 of /proc/<pid>/stat
    boot_id: str  # "" where the system has none
    host: str
    pid_namespace: int = 0  # in which the pid counts: containers of one machine have their own; 0: not known

    @property
    def exists(self) -> bool:
        """Whether there was such a process when it was identified, perhaps a zombie."""
        return self.started_ticks >= 0


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of the process that has this pid now. If there is none, its ticks match no process.

    Raises:
        OSError: no file descriptor is left to look.
    """
    _, ticks = _read_state_and_start(pid) or ("", -1)
    return ProcessIdentity(pid, ticks, boot_id(), socket.gethostname(), pid_namespace())


def is_running(process: ProcessIdentity) -> bool:
    """Whether exactly this process runs here, not a later one with its pid.

    Raises:
        OSError: no file descriptor is left to look.
    """
    if process.boot_id != boot_id() or _is_in_other_namespace(process):
        return False
    found = _read_state_and_start(process.pid)
    return found is not None and found[1] == process.started_ticks and found[0] not in ("Z", "X")


def is_ending(pid: int) -> bool:
    """Whether a process has ended or is about to: one that is killed closes its sockets before it is a zombie."""
    if not os.path.exists("/proc/self/stat"):
        return not is_running(identify(pid))
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


def forks_of(pid: int) -> list[int]:
    """Return the children of a process that run the same command: a supervisor's standby is one."""
    try:
        command = psutil.Process(pid).cmdline()
        children = psutil.Process(pid).children()
    except psutil.Error:
        return []
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):  # it has ended
            if child.cmdline() == command:
                found.append(child.pid)
    return found


def children_of(pid: int, thread: int | None = None) -> list[int]:
    """Return the children of all threads of a process, or of one; empty on a system that does not list them.

    Args:
        thread: its native id.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task") if thread is None else (thread,):
            children = Path(f"/proc/{pid}/task/{task}/children").read_bytes()
            found += [int(child) for child in children.split()]
    return found


def is_on_other_host(process: ProcessIdentity) -> bool:
    """Whether the process belongs to another machine, or to another container, so that its state is unknown here."""
    if process.boot_id == boot_id():
        return _is_in_other_namespace(process)
    return process.host != socket.gethostname()


def _is_in_other_namespace(process: ProcessIdentity) -> bool:
    return process.pid_namespace not in (0, pid_namespace())


@functools.cache
def pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        if is_shortage(error):
            raise
        return 0


@functools.cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        if is_shortage(error):
            raise
        return ""


def _read_state_and_start(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and its ticks at start; None if no process has this pid.

    Raises:
        OSError: no file descriptor is left to look.
    """
    if os.path.exists("/proc/self/stat"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError as error:
            if is_shortage(error):
                raise
            return None
        state, num_threads = fields[0].decode(), int(fields[17])
        # The main thread is a zombie as soon as it has exited; files and locks are open until the last thread has.
        return "S" if state == "Z" and num_threads > 1 else state, int(fields[19])
    try:  # without /proc: in seconds, with the system's precision
        process = psutil.Process(pid)
        return "Z" if process.status() == psutil.STATUS_ZOMBIE else "S", int(process.create_time())
    except psutil.Error:
        return None


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if unavailable.

    Without it the caller has to poll: Linux before 5.3 (RHEL 8), gVisor, a seccomp filter, no descriptor left.

    Raises:
        ProcessLookupError: the process no longer exists.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None


def has_pidfds() -> bool:
    """Whether the system has pidfds, which standbys and keepers of them need."""
    if (pidfd := open_pidfd(os.getpid())) is None:
        return False
    os.close(pidfd)
    return True
