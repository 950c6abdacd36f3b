"""Which process is meant, also after its pid has been given to another one, the clock was set, or the machine rebooted.

A process is known by its pid, the kernel's tick count when it started, and the boot that the count belongs to. No wall
clock is compared: psutil's `create_time` moves with every step of it.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import psutil
from msgspec import Struct


class ProcessIdentity(Struct, frozen=True):
    """One process of one boot of one machine."""

    pid: int
    started_ticks: int  # of the system's clock since boot, field 22 of /proc/<pid>/stat
    boot_id: str  # "" where the system has none
    host: str


def identify(pid: int) -> ProcessIdentity:
    """The process that has this pid now. One that is gone gets ticks that no process has."""
    _, ticks = _read_state_and_start(pid) or ("", -1)
    return ProcessIdentity(pid, ticks, boot_id(), socket.gethostname())


def is_running(process: ProcessIdentity) -> bool:
    """Whether that very process lives here, not a later one with its pid."""
    if process.boot_id != boot_id():
        return False
    found = _read_state_and_start(process.pid)
    return found is not None and found[1] == process.started_ticks and found[0] not in ("Z", "X")


def is_on_other_host(process: ProcessIdentity) -> bool:
    """Whether it belongs to another machine, so that nothing can be said of it here."""
    return process.boot_id != boot_id() and process.host != socket.gethostname()


@functools.cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_state_and_start(pid: int) -> tuple[str, int] | None:
    """A process's state letter and the ticks at its start; None when there is none of that pid."""
    if os.path.exists("/proc/self/stat"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return fields[0].decode(), int(fields[19])
    try:  # without /proc: seconds, and as exact as the system is
        process = psutil.Process(pid)
        return "Z" if process.status() == psutil.STATUS_ZOMBIE else "S", int(process.create_time())
    except psutil.Error:
        return None


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is no such thing, and the process has
    to be looked for now and then: Linux before 5.3 (RHEL 8), gVisor, a seccomp filter, no descriptor left.

    Raises:
        ProcessLookupError: there is no such process any more.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None
