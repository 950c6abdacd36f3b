"""What starts ranks' processes: the interface, and the one that has them forked from a warm server.

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
from meshbook.wire.loop import Loop

# 1 MiB, the most an unprivileged process may request: a burst of C output must not block a rank that holds the GIL.
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

# Seconds between attempts to send to a busy fork server: it imports torch, for a second or more.
_RETRY_S = 0.01


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

    def start_spare(
        self,
        config: spawn.SpareConfig,
        channel: socket.socket,
        on_started: Callable[[RankProcess], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Start a process that waits to become a rank.

        Args:
            channel: its end of a SOCK_SEQPACKET pair, to be closed here.
            on_failed: called with the reason if there is no process.
        """

    def take_over(self) -> None:
        """Go on in a process that was forked from the starter's, which has ended: its children are not ours.

        Spares that were requested and have not been started are not started, and nobody is called.
        """

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


def make_process_files() -> tuple[RankProcess, list[int]]:
    """Return a process without a pid, and its ends of its two pipes. If one cannot be opened, none stays open."""
    opened: list[int] = []
    try:
        opened += (out := make_pipe())
        opened += (err := make_pipe())
        return RankProcess(0, out[0], err[0], CrashLog()), [out[1], err[1]]
    except OSError:
        close_all(opened)
        raise


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass
class _PendingFork:
    """A request to the fork server that is not done yet.

    Attributes:
        config: of the rank or spare that is to be forked.
        process: what there will be, without its pid.
        channel: a spare's end of its socket; closed when the request is done.
        on_forked: called with the pid.
        on_failed: called with the reason if it cannot be done.
        retry: sends the request to another starter; closes what was created for this one.
    """

    config: spawn.RankConfig | spawn.SpareConfig
    process: RankProcess
    channel: socket.socket | None
    on_forked: Callable[[int], None]
    on_failed: Callable[[str], None]
    retry: Callable[[Starter], None]


@dataclass
class _Packet:
    """A command for the fork server, with the descriptors to send and those to close afterwards."""

    data: bytes
    fds: list[int]
    fds_to_close: list[int]
    is_spare: bool


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
        host_pipe: int,
        branch_from: str | None = None,
    ) -> None:
        """Start the fork server, or branch one from an existing server.

        Args:
            on_server_exit: called when the server has exited, with how: "was killed by SIGKILL".
            on_failure: called when a fork failed, with the reason.
            on_fork_unsafe: called when the server may not fork, with the reason and the requests to retry with another
                starter.
            on_terminating: called when the server has received SIGTERM.
            host_pipe: read end of a pipe whose write end the host holds; ranks end when that is closed.
            listen_path: the socket where the server accepts requests to branch a server for another mesh.
            branch_from: the socket of such a server; if it is alive, it is branched instead of starting an interpreter.
        """
        self._loop, self._on_exit = loop, on_exit
        self._on_server_exit, self._on_failure, self._on_fork_unsafe = on_server_exit, on_failure, on_fork_unsafe
        self._on_terminating = on_terminating
        self.with_torch, self._host_pipe = with_torch, host_pipe
        self.ready_s: float | None = None
        self.has_failed = False  # it has ended by itself, before it was ready
        self._pending: dict[int, _PendingFork] = {}  # by number
        self._num_requests = 0
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
                    [sys.executable, "-P", "-m", "meshbook.rank.forkserver"]
                    + [str(theirs.fileno()), str(host_pipe), listen_path]
                    + ([] if with_torch else ["--no-torch"]),
                    pass_fds=(theirs.fileno(), host_pipe),
                    stdin=subprocess.DEVNULL,
                    env=rank_environment(),
                )
        self._socket.setblocking(False)
        loop.watch_fd(self._socket.fileno(), self._on_readable)

    def fail_requests(self, reason: str) -> None:
        """Report as failed what the server has not replied to, and never will."""
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.on_failed(reason)

    @property
    def has_requests(self) -> bool:
        """Whether there is something that the server has not replied to."""
        return bool(self._pending)

    def take_requests(self) -> list[Callable[[Starter], None]]:
        """Return what the server has not replied to, and never will, to be retried with another starter.

        None of it was carried out: a child that was forked without a reply has ended.
        """
        pending, self._pending = self._pending, {}
        return [request.retry for request in pending.values()]

    def start_rank(self, config: spawn.RankConfig, on_started: Callable[[RankProcess], None]) -> None:
        def failed(reason: str) -> None:
            self._on_failure(f"rank {config.rank} could not be started: {reason}")

        def again(starter: Starter) -> None:
            starter.start_rank(config, on_started)

        self._fork(config, None, on_started, failed, again)

    def start_spare(
        self,
        config: spawn.SpareConfig,
        channel: socket.socket,
        on_started: Callable[[RankProcess], None],
        on_failed: Callable[[str], None],
    ) -> None:
        def started(process: RankProcess) -> None:
            channel.close()
            on_started(process)

        def failed(reason: str) -> None:
            channel.close()
            on_failed(reason)

        def again(starter: Starter) -> None:
            starter.start_spare(config, channel, on_started, on_failed)

        self._fork(config, channel, started, failed, again)

    def _fork(
        self,
        config: spawn.RankConfig | spawn.SpareConfig,
        channel: socket.socket | None,
        on_started: Callable[[RankProcess], None],
        on_failed: Callable[[str], None],
        retry: Callable[[Starter], None],
    ) -> None:
        child, write_ends = make_process_files()

        def started(pid: int) -> None:
            child.pid = pid
            on_started(child)

        def again(starter: Starter) -> None:
            child.close()
            retry(starter)

        def failed(reason: str) -> None:
            child.close()
            on_failed(reason)

        self._num_requests += 1
        self._pending[self._num_requests] = _PendingFork(config, child, channel, started, failed, again)
        self._send_fork(self._num_requests, write_ends, write_ends)

    def _send_fork(self, number: int, write_ends: list[int], fds_to_close: list[int]) -> None:
        """Send a request that is pending. `write_ends`: of the pipes for stdout and stderr."""
        pending = self._pending[number]
        process = pending.process
        descriptors = [process.out, process.err, *write_ends, process.crash_log.fd, self._host_pipe]
        if pending.channel is not None:
            descriptors.append(pending.channel.fileno())
        config = pending.config
        command: spawn.ForkCommand
        if isinstance(config, spawn.RankConfig):
            command = spawn.ForkRank(number, config)
        else:
            command = spawn.ForkSpare(number, config)
        self._send_command(command, descriptors, fds_to_close)

    def take_over(self) -> None:
        """Ask again for what may have been asked for, or answered, in the process that has ended."""
        if self._process is not None:
            self._process.returncode = 0  # it goes on, and is not waited for
            self._process = None
        for number in [number for number, pending in self._pending.items() if pending.channel is not None]:
            spare = self._pending.pop(number)
            assert spare.channel is not None
            spare.channel.detach()  # it was the other process's, and is closed here
            spare.process.close()
        for packet in [packet for packet in self._outbox if packet.is_spare]:
            self._outbox.remove(packet)
            close_all(packet.fds_to_close)
        for number, pending in self._pending.items():  # after those that are in the outbox
            self._send_fork(number, [pending.process.out, pending.process.err], [])
        self._loop.act(self._flush_outbox)

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
        self._socket.close()  # the server exits when it reads the end of file, and ends its children before
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send_command(self, command: spawn.ForkCommand, fds: list[int], fds_to_close: list[int]) -> None:
        """Send a command, now or when the server reads it: while it imports torch, its buffer holds few."""
        data = spawn.encoder.encode(command)
        if len(data) > spawn.MAX_PACKET_BYTES:
            file = spawn.make_file(command)
            data, fds, fds_to_close = spawn.encoder.encode(spawn.CommandInFile()), [*fds, file], [*fds_to_close, file]
        self._outbox.append(_Packet(data, fds, fds_to_close, isinstance(command, spawn.ForkSpare)))
        if len(self._outbox) == 1:
            self._loop.act(self._flush_outbox)

    def _flush_outbox(self) -> None:
        while self._outbox:
            packet = self._outbox[0]
            try:
                socket.send_fds(self._socket, [packet.data], packet.fds)
            except BlockingIOError:
                self._loop.call_later(_RETRY_S, self._flush_outbox, logged=False)
                return
            except OSError:  # it has exited: the read end reports that, with how
                self._drop_outbox()
                return
            self._outbox.popleft()
            close_all(packet.fds_to_close)

    def _drop_outbox(self) -> None:
        while self._outbox:
            close_all(self._outbox.popleft().fds_to_close)

    def _on_readable(self) -> None:
        while not self._closing:
            try:
                data = receive_report(self._socket)
            except BlockingIOError:
                return
            if not data:
                self._loop.unwatch(self._socket.fileno())
                self._on_server_exit(self._exit_description())
                return
            match spawn.fork_reports.decode(data):
                case spawn.ForkServerReady(seconds=seconds):
                    self.ready_s = seconds
                case spawn.ForkUnsafe(reason=reason):
                    retries = self.take_requests()
                    self.close()
                    self._on_fork_unsafe(reason, retries)
                case spawn.Forked(number=number, pid=pid):
                    if (request := self._pending.pop(number, None)) is not None:
                        request.on_forked(pid)
                case spawn.ForkFailed(number=number, reason=reason):
                    if (request := self._pending.pop(number, None)) is not None:
                        request.on_failed(reason)
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
        self.has_failed = code >= 0 and self.ready_s is None
        return describe_exit(-code, None) if code < 0 else describe_exit(None, code)


def receive_report(server: socket.socket) -> bytes:
    """Return what a fork server has sent next; b"" if nothing follows, because it has ended.

    Where it has ended without reading all that it was sent, the system says so before what it had sent itself.

    Raises:
        BlockingIOError: nothing is here yet.
    """
    for _ in range(2):
        try:
            return server.recv(spawn.RECEIVE_BYTES)
        except ConnectionResetError:
            pass  # once
        except BlockingIOError:
            raise
        except OSError:
            break
    return b""


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
