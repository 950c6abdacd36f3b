"""Two ways to start a rank's process, with one interface: forked from a warm server, or a fresh interpreter.

A starter reports each child's exit once, with waitpid's status. It knows nothing of the ranks' messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from meshbook.errors import describe_exit
from meshbook.wire import spawn
from meshbook.wire.crash_log import CrashLog
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.process_control import kill_process_group
from meshbook.wire.processes import open_pidfd

# 1 MiB, the most an unprivileged process may request: a burst of C output must not block a rank that holds the GIL.
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

# Seconds between attempts to send to a busy fork server: it imports torch, for a second or more.
_RETRY_S = 0.01
# ... between two polls for the exit of fresh interpreters, if the kernel has no pidfds.
_POLL_S = 0.2


@dataclass
class RankProcess:
    """A started process.

    `out` and `err` are non-blocking read ends of its stdout and stderr; the rank reads them while it lives, the host
    reads the rest after its death.
    """

    pid: int
    out: int
    err: int
    crash_log: CrashLog

    def close(self) -> None:
        for fd in (self.out, self.err):
            if fd >= 0:
                os.close(fd)
        if self.out >= 0:
            self.crash_log.close()
        self.out = self.err = -1


class Starter(Protocol):
    def start_rank(self, config: spawn.RankConfig, on_started: Callable[[RankProcess], None]) -> None:
        """Start a rank; `on_started` is called from the loop once its pid is known."""

    def close(self) -> None:
        """Stop the server. The host ends the ranks before this."""


def make_pipe() -> tuple[int, int]:
    """Return the read end (non-blocking) and the write end of a pipe with a large buffer."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    if sys.platform.startswith("linux"):
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(write, _F_SETPIPE_SZ, _PIPE_BYTES)
    return read, write


@dataclass
class _PendingFork:
    """A request to the fork server that is not done yet.

    Attributes:
        on_forked: called with the pid.
        on_failed: called with the reason if it cannot be done.
        retry: sends the request to another starter; closes what was created for this one.
    """

    on_forked: Callable[[int], None]
    on_failed: Callable[[str], None]
    retry: Callable[[Starter], None]


@dataclass
class _Packet:
    """A command for the fork server, with the descriptors to send and those to close afterwards."""

    data: bytes
    fds: list[int]
    fds_to_close: list[int]


class ForkStarter:
    """Forks ranks from `meshbook.rank.forkserver`, which starts at once so that its imports overlap with other work."""

    def __init__(
        self,
        loop: Loop,
        on_exit: Callable[[int, int], None],
        *,
        on_server_exit: Callable[[str], None],
        on_failure: Callable[[str], None],
        on_fork_unsafe: Callable[[str, list[Callable[[Starter], None]]], None],
        on_terminating: Callable[[], None],
        with_torch: bool,
        listen_path: str,
        branch_from: str | None = None,
    ) -> None:
        """Start the fork server, or branch one from an existing server.

        Args:
            on_server_exit: called when the server has exited, with how: "was killed by SIGKILL".
            on_failure: called when a fork failed, with the reason.
            on_fork_unsafe: called when the server may not fork, with the reason and the requests to retry with another
                starter.
            on_terminating: called when the server has received SIGTERM.
            listen_path: the socket where the server accepts requests to branch a server for another mesh.
            branch_from: the socket of such a server; if it is alive, it is branched instead of starting an interpreter.
        """
        self._loop, self._on_exit = loop, on_exit
        self._on_server_exit, self._on_failure, self._on_fork_unsafe = on_server_exit, on_failure, on_fork_unsafe
        self._on_terminating = on_terminating
        self.with_torch = with_torch
        self.ready_s: float | None = None
        self._pending: deque[_PendingFork] = deque()
        self._outbox: deque[_Packet] = deque()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        branch = _connect_branch(branch_from, listen_path) if branch_from else None
        if branch is not None:
            self._socket = branch
        else:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "meshbook.rank.forkserver", str(theirs.fileno()), listen_path]
                    + ([] if with_torch else ["--no-torch"]),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=rank_environment(),
                )
        self._socket.setblocking(False)
        loop.watch_fd(self._socket.fileno(), self._on_readable)

    def start_rank(self, config: spawn.RankConfig, on_started: Callable[[RankProcess], None]) -> None:
        out, out_write = make_pipe()
        err, err_write = make_pipe()
        crash_log = CrashLog()
        child = RankProcess(0, out, err, crash_log)

        def started(pid: int) -> None:
            child.pid = pid
            on_started(child)

        def again(starter: Starter) -> None:
            child.close()
            starter.start_rank(config, on_started)

        def failed(reason: str) -> None:
            child.close()
            self._on_failure(f"rank {config.rank} could not be started: {reason}")

        self._pending.append(_PendingFork(started, failed, again))
        descriptors = [out, err, out_write, err_write, crash_log.fd]
        self._send_command(spawn.ForkRank(config), descriptors, [out_write, err_write])

    def close(self) -> None:
        self._closing = True
        self._drop_outbox()
        self._loop.unwatch(self._socket.fileno())
        if self._process is None:  # not our child: its end of the socket shows its exit
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.settimeout(2)
                while self._socket.recv(spawn.RECEIVE_BYTES):
                    pass
            self._socket.close()
            return
        self._socket.close()  # the server exits when it reads the end of file, and its children with it
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send_command(self, command: spawn.ForkCommand, fds: list[int], fds_to_close: list[int]) -> None:
        """Send a command, now or when the server reads it: while it imports torch, its buffer holds few."""
        data = spawn.encoder.encode(command)
        if len(data) > spawn.MAX_PACKET_BYTES:
            file = os.memfd_create("meshbook-spawn", os.MFD_CLOEXEC)
            with open(file, "wb", closefd=False) as writer:
                writer.write(data)
            data, fds, fds_to_close = spawn.encoder.encode(spawn.CommandInFile()), [*fds, file], [*fds_to_close, file]
        self._outbox.append(_Packet(data, fds, fds_to_close))
        if len(self._outbox) == 1:
            self._flush_outbox()

    def _flush_outbox(self) -> None:
        while self._outbox:
            packet = self._outbox[0]
            try:
                socket.send_fds(self._socket, [packet.data], packet.fds)
            except BlockingIOError:
                self._loop.call_later(_RETRY_S, self._flush_outbox)
                return
            except OSError:  # it has exited: the read end reports that, with how
                self._drop_outbox()
                return
            self._outbox.popleft()
            for descriptor in packet.fds_to_close:
                os.close(descriptor)

    def _drop_outbox(self) -> None:
        while self._outbox:
            for descriptor in self._outbox.popleft().fds_to_close:
                os.close(descriptor)

    def _on_readable(self) -> None:
        while not self._closing:
            try:
                data = self._socket.recv(spawn.RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.unwatch(self._socket.fileno())
                self._on_server_exit(self._exit_description())
                return
            match spawn.fork_reports.decode(data):
                case spawn.ForkServerReady(seconds=seconds):
                    self.ready_s = seconds
                case spawn.ForkUnsafe(reason=reason):
                    pending = [pending.retry for pending in self._pending]
                    self._pending.clear()
                    self.close()
                    self._on_fork_unsafe(reason, pending)
                case spawn.Forked(pid=pid):
                    self._pending.popleft().on_forked(pid)
                case spawn.ForkFailed(reason=reason):
                    self._pending.popleft().on_failed(reason)
                case spawn.ForkServerTerminating():
                    self._on_terminating()
                case spawn.ChildExited(pid=pid, status=status):
                    self._on_exit(pid, status)

    def _exit_description(self) -> str:
        if self._process is None:  # not our child: its exit status is unknown
            return "has ended"
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:  # it has closed its end, and hangs
            self._process.kill()
            code = self._process.wait()
        return describe_exit(-code, None) if code < 0 else describe_exit(None, code)


class FreshStarter:
    """Starts every rank in a new interpreter: slower and larger, for where forking is not possible."""

    def __init__(self, loop: Loop, on_exit: Callable[[int, int], None]) -> None:
        self._loop, self._on_exit = loop, on_exit
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._poll_timer: Timer | None = None

    def start_rank(self, config: spawn.RankConfig, on_started: Callable[[RankProcess], None]) -> None:
        out, out_write = make_pipe()
        err, err_write = make_pipe()
        crash_log = CrashLog()
        with open(os.memfd_create("meshbook-spawn", os.MFD_CLOEXEC), "w+b") as config_file:
            config_file.write(spawn.encoder.encode(config))  # not a pipe, which takes 64 KiB before it blocks
            config_file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "meshbook.rank.main", str(out), str(err), str(crash_log.fd)],
                stdin=config_file,
                stdout=out_write,
                stderr=err_write,
                pass_fds=(out, err, crash_log.fd),
                env=rank_environment(),
            )
        os.close(out_write)
        os.close(err_write)
        self._processes[process.pid] = process
        self._watch_exit(process)
        on_started(RankProcess(process.pid, out, err, crash_log))

    def close(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        for process in self._processes.values():
            process.kill()
            kill_process_group(process.pid)
            process.wait()

    def _watch_exit(self, process: subprocess.Popen[bytes]) -> None:
        fd = open_pidfd(process.pid)
        if fd is None:
            self._poll_exits()
            return

        def ended() -> None:
            self._loop.unwatch(fd)
            os.close(fd)
            self._reap(process)

        self._loop.watch_fd(fd, ended)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        kill_process_group(process.pid)
        code = process.wait()
        del self._processes[process.pid]
        self._on_exit(process.pid, -code if code < 0 else code << 8)

    def _poll_exits(self) -> None:
        for process in [process for process in self._processes.values() if process.poll() is not None]:
            self._reap(process)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll_timer = self._loop.call_later(_POLL_S, self._poll_exits)


def _connect_branch(branch_from: str, listen_path: str) -> socket.socket | None:
    """Return a connection to a new branch of the fork server at `branch_from`; None if that no longer runs."""
    branch = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        branch.settimeout(2)
        branch.connect(branch_from)
        branch.send(
            spawn.encoder.encode(spawn.BranchForkServer(environment=rank_environment(), listen_path=listen_path))
        )
    except OSError:
        branch.close()
        return None
    return branch


def rank_environment() -> dict[str, str]:
    """Return the environment that ranks inherit.

    One OpenBLAS thread at import: numpy's pool would be threads in the fork server. NVML for counting devices: CUDA's
    own count would initialise CUDA before the fork.
    """
    environment = dict(os.environ)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the default ends the process after an abort
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
