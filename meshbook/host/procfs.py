"""A rank's process as the system reports it: /proc, and its Python stacks by py-spy. For ranks that do not reply.

Everything here may block for a while (a process in an uninterruptible wait can block reads of its files in /proc too),
so it runs on threads of its own (`host.snapshots`) and never on the agent's loop. Unavailable information is reported
as such, not raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from meshbook.host import stacks
from meshbook.host.run_times import RunTimes, ThreadTimes
from meshbook.wire.child_processes import run_command
from meshbook.wire.messages import ProcessStatus, ThreadStack
from meshbook.wire.processes import children_of

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Limits of the report: children, and characters of each one's command line.
_MAX_CHILDREN = 32
_MAX_COMMAND_CHARS = 160

# Threads that are reported.
_MAX_TASKS = 256

# Descriptors of a poll or select that are reported.
_MAX_DESCRIBED_FDS = 4

# System calls that block: number on x86-64, number on arm64 (both of Linux; None: it has none), name, the kind of the
# relevant argument (a descriptor, a path, or a structure to look up), and its position.
_BLOCKING_SYSCALLS: tuple[tuple[int | None, int | None, str, str, int], ...] = (
    (0, 63, "read", "fd", 0),
    (1, 64, "write", "fd", 0),
    (2, None, "open", "path", 0),
    (4, None, "stat", "path", 0),
    (7, None, "poll", "pollfds", 0),
    (16, 29, "ioctl", "fd", 0),
    (17, 67, "pread64", "fd", 0),
    (18, 68, "pwrite64", "fd", 0),
    (19, 65, "readv", "fd", 0),
    (20, 66, "writev", "fd", 0),
    (21, None, "access", "path", 0),
    (23, None, "select", "fdset", 1),
    (24, 124, "sched_yield", "", 0),
    (34, None, "pause", "", 0),
    (35, 101, "nanosleep", "", 0),
    (42, 203, "connect", "fd", 0),
    (43, 202, "accept", "fd", 0),
    (44, 206, "sendto", "fd", 0),
    (45, 207, "recvfrom", "fd", 0),
    (46, 211, "sendmsg", "fd", 0),
    (47, 212, "recvmsg", "fd", 0),
    (61, 260, "wait4", "process", 0),
    (72, 25, "fcntl", "fd", 0),
    (73, 32, "flock", "fd", 0),
    (74, 82, "fsync", "fd", 0),
    (75, 83, "fdatasync", "fd", 0),
    (128, 137, "rt_sigtimedwait", "", 0),
    (130, 133, "rt_sigsuspend", "", 0),
    (202, 98, "futex", "", 0),
    (230, 115, "clock_nanosleep", "", 0),
    (232, 22, "epoll_wait", "epoll", 0),
    (247, 95, "waitid", "process", 1),
    (257, 56, "openat", "path", 1),
    (262, 79, "newfstatat", "path", 1),
    (270, 72, "pselect6", "fdset", 1),
    (271, 73, "ppoll", "pollfds", 0),
    (281, 22, "epoll_pwait", "epoll", 0),
    (288, 242, "accept4", "fd", 0),
    (299, 243, "recvmmsg", "fd", 0),
    (332, 291, "statx", "path", 1),
    (441, 441, "epoll_pwait2", "epoll", 0),
    (449, 449, "futex_waitv", "", 0),
)
_IS_ARM = platform.machine() in ("aarch64", "arm64")
_SYSCALLS_BY_NUMBER = {
    number: (name, kind, argument)
    for x86, arm, name, kind, argument in _BLOCKING_SYSCALLS
    if (number := arm if _IS_ARM else x86) is not None
}


# ---------------------------------------------------------------------------------------------------------------------
# /proc


def read_process(pid: int) -> ProcessStatus | None:
    """Return what /proc reports of a process; None if it has exited."""
    fields = _read_stat(pid)
    if fields is None:
        return None
    syscall, target = _current_syscall(pid, fields[0])
    return ProcessStatus(
        state=fields[0],
        syscall=syscall,
        syscall_target=target,
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        children=tuple(_iter_children(pid)),
    )


def read_threads(pid: int) -> dict[int, tuple[str, str | None]]:
    """Return the state and the system call of each of its threads, by the system's thread id."""
    found: dict[int, tuple[str, str | None]] = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task")[:_MAX_TASKS]:
            path = f"/proc/{pid}/task/{task}"
            after_name = _read(f"{path}/stat").rpartition(b")")[2].split()
            if after_name:
                found[int(task)] = after_name[0].decode(), _parse_syscall(_read(f"{path}/syscall").split())[0]
    return found


def read_run_times(pid: int) -> RunTimes:
    """Return how long its threads ran and waited for a processor; without those that cannot be read. Never blocks."""
    threads: dict[int, ThreadTimes] = {}
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task")[:_MAX_TASKS]:
            path = f"/proc/{pid}/task/{task}"
            times, fields = _read(f"{path}/schedstat").split(), _read(f"{path}/stat").rpartition(b")")[2].split()
            if len(times) == 3 and len(fields) > 12:
                ticks = int(fields[11]) + int(fields[12])
                threads[int(task)] = ThreadTimes(fields[0] == b"R", ticks, *map(int, times))
    return RunTimes(time.monotonic(), threads)


def process_state(pid: int) -> str:
    """Return its state letter, "" if it has exited. Never blocks."""
    fields = _read_stat(pid)
    return "" if fields is None else fields[0]


def is_alive(pid: int) -> bool:
    """Whether a process exists and still has a program.

    A killed process frees its memory some moments before its state shows that it has ended.
    """
    try:
        os.readlink(f"/proc/{pid}/exe")
    except FileNotFoundError:
        return False
    except OSError:  # no permission to read it
        pass
    return process_state(pid) not in ("", "Z", "X")


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on."""
    text = _read(f"/proc/{pid}/stat")
    # The name in brackets may contain anything, brackets too.
    fields = text.rpartition(b")")[2].decode("ascii", "replace").split()
    return fields if len(fields) > 21 else None


def _current_syscall(pid: int, state: str) -> tuple[str | None, str | None]:
    """Return the system call of the main thread and its relevant argument, as far as the kernel reports them."""
    fields = _read(f"/proc/{pid}/syscall").split()
    name, kind, position = _parse_syscall(fields)
    if name is None:
        return None, None
    arguments = [int(field, 16) for field in fields[1:7]]
    argument = arguments[position]
    target: str | None = None
    with contextlib.suppress(OSError, ValueError, OverflowError, struct.error, IndexError):
        match kind:
            case "fd":
                target = _describe_fd(pid, argument)
            case "path":
                target = _read_memory(pid, argument, 4096).split(b"\0", 1)[0].decode("utf-8", "replace")[:300] or None
            case "pollfds":
                target = _describe_fds(pid, _fds_of_poll(pid, argument, arguments[1]))
            case "fdset":
                target = _describe_fds(pid, _fds_of_select(pid, argument, arguments[0]))
            case "epoll":
                target = _describe_fds(pid, _fds_of_epoll(pid, argument))
            case "process":
                child = ctypes.c_int32(argument & 0xFFFFFFFF).value
                target = f"process {child}: {_command_line(child)}" if child > 0 else "any child process"
    return name, target


def _parse_syscall(fields: list[bytes]) -> tuple[str | None, str, int]:
    """Return name, kind and position of the relevant argument, from the fields of /proc/.../syscall."""
    if len(fields) < 8 or fields[0].startswith(b"-"):  # "running"; not allowed; stopped outside any system call
        return None, "", 0
    number = int(fields[0])
    return _SYSCALLS_BY_NUMBER.get(number, (f"system call {number}", "", 0))


def _fds_of_poll(pid: int, address: int, count: int) -> list[int]:
    data = _read_memory(pid, address, 8 * min(count, _MAX_DESCRIBED_FDS))
    return [fd for fd, _, _ in struct.iter_unpack("ihh", data) if fd >= 0]


def _fds_of_select(pid: int, address: int, count: int) -> list[int]:
    if not address:
        return []
    bits = int.from_bytes(_read_memory(pid, address, 8 * ((min(count, 1024) + 63) // 64)), "little")
    return [fd for fd in range(min(count, 1024)) if bits >> fd & 1][:_MAX_DESCRIBED_FDS]


def _fds_of_epoll(pid: int, epoll: int) -> list[int]:
    lines = _read(f"/proc/{pid}/fdinfo/{epoll}").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith(b"tfd:")][:_MAX_DESCRIBED_FDS]


def _read_memory(pid: int, address: int, count: int) -> bytes:
    """Read bytes of its memory; fewer if they end at an unmapped page."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        data = b""
        while len(data) < count:
            at = address + len(data)
            try:
                piece = os.pread(file.fileno(), min(count - len(data), _PAGE_BYTES - at % _PAGE_BYTES), at)
            except OSError:
                if not data:
                    raise
                break
            if not piece:
                break
            data += piece
            if b"\0" in piece and count == 4096:  # a path that ends here
                break
        return data


def _describe_fds(pid: int, fds: list[int]) -> str | None:
    named = [name for fd in fds if (name := _describe_fd(pid, fd)) is not None]
    return ", ".join(dict.fromkeys(named)) or None


def _describe_fd(pid: int, fd: int) -> str | None:
    """Return what a descriptor refers to: a path, "pipe", "socket 10.0.0.1:80"."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd & 0xFFFFFFFF}")
    except OSError:
        return None
    if target.startswith("socket:["):
        return _describe_socket(pid, target[8:-1])
    if target.startswith("pipe:"):
        return "pipe"
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    return target[:300]


def _describe_socket(pid: int, inode: str) -> str:
    """Return the peer of a socket, by the tables of the process's own network namespace."""
    wanted = inode.encode()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _read(f"/proc/{pid}/net/{kind}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == wanted:
                local, remote = _parse_address(fields[1]), _parse_address(fields[2])
                if fields[3] == b"0A":
                    return f"socket listening on {local}"
                return f"socket {remote}" if not remote.endswith(":0") else f"{kind[:3]} socket {local}"
    for line in _read(f"/proc/{pid}/net/unix").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 6 and fields[6] == wanted:
            return f"unix socket {fields[7].decode(errors='replace')}" if len(fields) > 7 else "unix socket"
    return "socket"


def _parse_address(encoded: bytes) -> str:
    """Parse `0100007F:1F90` as 127.0.0.1:8080: each group of four bytes is in the machine's byte order."""
    host, _, port = encoded.partition(b":")
    raw = bytes.fromhex(host.decode())
    if sys.byteorder == "little":
        raw = b"".join(raw[offset : offset + 4][::-1] for offset in range(0, len(raw), 4))
    if raw[:12] == b"\0" * 10 + b"\xff\xff":  # IPv4 in IPv6
        raw = raw[12:]
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    text = socket.inet_ntop(family, raw)
    return f"{text}:{int(port, 16)}" if family == socket.AF_INET else f"[{text}]:{int(port, 16)}"


def _iter_children(pid: int) -> Iterator[tuple[int, str, str]]:
    """Yield its children: pid, state, command line."""
    for child in sorted(children_of(pid))[:_MAX_CHILDREN]:
        letter = process_state(child)
        if letter:
            yield child, letter, _command_line(child)


def _command_line(pid: int) -> str:
    """Return its command line, prefixed by its name if it has set one (forked workers share a command line)."""
    command_line = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    process_name = _read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()
    if process_name and process_name not in command_line:
        command_line = f"{process_name}: {command_line}" if command_line else process_name
    return command_line[:_MAX_COMMAND_CHARS]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has exited, or there is no permission to read it
        return b""


# ---------------------------------------------------------------------------------------------------------------------
# Out-of-memory kills


def num_oom_kills() -> int:
    """Return how often the out-of-memory killer has struck, by the counters of the machine and of our cgroup.

    Only useful for comparison with an earlier value. An increase does not prove which process was hit; but for a rank
    that dies of a SIGKILL of unknown origin within the same seconds, it is almost always the cause.
    """
    counts = []
    paths = ["/proc/vmstat"]
    for line in _read("/proc/self/cgroup").decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths += [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"]
        elif "memory" in controllers.split(","):
            paths += [f"/sys/fs/cgroup/memory{path}/memory.oom_control", "/sys/fs/cgroup/memory/memory.oom_control"]
    for path in paths:
        for line in _read(path).decode(errors="replace").splitlines():
            if line.startswith("oom_kill "):
                counts.append(int(line.split()[1]))
    return sum(counts)


# ---------------------------------------------------------------------------------------------------------------------
# py-spy


def find_py_spy() -> str | None:
    """Return py-spy's executable: beside this interpreter, where pip reports it, or on PATH."""
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    for folder in folders:
        if folder and (found := shutil.which("py-spy", path=folder)):
            return found
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("py-spy") or ():
            if file.name == "py-spy" and os.access(file.locate(), os.X_OK):
                return str(Path(str(file.locate())).resolve())
    return shutil.which("py-spy")


def dump_python_stacks(pid: int, timeout_s: float) -> tuple[tuple[ThreadStack, ...], str | None]:
    """Return the stacks of a process that does not reply, and why there are none. Blocks, at most `timeout_s` seconds.

    The process is read, never paused: one that does not reply does not change anyway, and a stopped one could not be
    paused.
    """
    program = find_py_spy()
    if program is None:
        return (), (
            "its Python stack cannot be read from outside: py-spy is not installed beside this Python; "
            "`pip install py-spy` on the rank's host, and ask again"
        )
    problem, deadline = None, time.monotonic() + timeout_s
    for _ in range(2):  # a stack read while it changes may be inconsistent; a second reading rarely is
        try:
            completed = run_command(
                [program, "dump", "--pid", str(pid), "--json", "--nonblocking"],
                timeout_s=max(0.1, deadline - time.monotonic()),
                env={**os.environ, "RUST_BACKTRACE": "0"},
            )
        except subprocess.TimeoutExpired:
            return (), f"its Python stack could not be read from outside: py-spy took more than {timeout_s:.1f} s"
        except OSError as error:
            return (), f"its Python stack cannot be read from outside: {program} does not run ({error.strerror})"
        if completed.returncode == 0:
            try:
                return stacks.parse_py_spy(completed.stdout), None
            except ValueError as error:
                problem = str(error)
                continue
        alive = is_alive(pid)
        problem = explain_py_spy_error(completed.stderr, alive=alive)
        if not alive:
            break
    return (), problem


def explain_py_spy_error(stderr: str, *, alive: bool) -> str:
    """Return py-spy's error as a sentence that says what would help."""
    if not alive:
        return "it ended while its stacks were read"
    lowered = stderr.lower()
    if (
        "permission denied" in lowered
        or "os error 13" in lowered
        or "not permitted" in lowered
        or "os error 1)" in lowered
    ):
        return f"its Python stack cannot be read from outside: {_describe_ptrace_denial()}"
    lines = [line.strip() for line in stderr.split("Stack backtrace")[0].splitlines()]
    reason = "; ".join(line for line in lines if line and line != "Caused by:")[:300]
    return f"its Python stack could not be read from outside: py-spy says: {reason or 'nothing'}"


def _describe_ptrace_denial() -> str:
    scope = _read("/proc/sys/kernel/yama/ptrace_scope").strip()
    if scope not in (b"", b"0"):
        return (
            f"the kernel forbids it (kernel.yama.ptrace_scope is {scope.decode()}); "
            "`sudo sysctl kernel.yama.ptrace_scope=0` allows it until the next boot"
        )
    return (
        "this host lacks the capability CAP_SYS_PTRACE; give it to the container (docker run --cap-add=SYS_PTRACE; "
        "Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
    )
