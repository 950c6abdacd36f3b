"""Two ways to start a rank's process, behind one face: forked from a warm server, or a fresh interpreter.

A starter reports each child's end once, with waitpid's status. It knows nothing of what ranks say.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from meshbook.errors import StartError
from meshbook.wire import birth
from meshbook.wire.lastwords import LastWords
from meshbook.wire.lifeline import end_group
from meshbook.wire.loop import Loop, Timer

# 1 MiB, the most an unprivileged process may ask for: a burst of C output must not block a rank that holds the GIL.
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


@dataclass
class Child:
    """A started process. `out` and `err` are non-blocking read ends of its stdout and stderr; the rank reads them while
    it lives, the host reads what is left after its death."""

    pid: int
    out: int
    err: int
    last_words: LastWords

    def close(self) -> None:
        for fd in (self.out, self.err):
            if fd >= 0:
                os.close(fd)
        if self.out >= 0:
            self.last_words.close()
        self.out = self.err = -1


class Starter(Protocol):
    def start_rank(self, told: birth.RankBirth, on_started: Callable[[Child], None]) -> None:
        """Start a rank; `on_started` is called from the loop once its pid is known."""

    def start_store(self, on_port: Callable[[int], None]) -> None:
        """Start the process that serves the TCPStore; `on_port` is called from the loop with its port."""

    def close(self) -> None:
        """Stop the server and the store. Ranks are ended by their host before this."""


def make_pipe() -> tuple[int, int]:
    """Read end (non-blocking) and write end of a pipe with a large buffer."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    if sys.platform.startswith("linux"):
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(write, _F_SETPIPE_SZ, _PIPE_BYTES)
    return read, write


class _PortPipe:
    """Waits for the store's process to write its port."""

    def __init__(self, loop: Loop, on_port: Callable[[int], None]) -> None:
        self._loop, self._on_port, self._text = loop, on_port, b""
        self.read, self.write = make_pipe()
        loop.watch_fd(self.read, self._readable)

    def _readable(self) -> None:
        data = os.read(self.read, 64)
        self._text += data
        if not data or b"\n" in self._text:
            self._loop.unwatch(self.read)
            os.close(self.read)
            if self._text.strip().isdigit():
                self._on_port(int(self._text))


class ForkStarter:
    """Ranks forked from `meshbook.rank.forkserver`, started at once so that its imports overlap with all else."""

    def __init__(
        self,
        loop: Loop,
        on_exit: Callable[[int, int], None],
        on_failure: Callable[[str], None],
        *,
        with_torch: bool,
        listen: str,
        source: str | None = None,
    ) -> None:
        """
        Args:
            listen: where the server can be asked to branch off one for another mesh.
            source: where such a one listens already; it is asked instead of starting an interpreter, if it lives.
        """
        self._loop, self._on_exit, self._on_failure = loop, on_exit, on_failure
        self.with_torch = with_torch
        self.ready_s: float | None = None
        self._started: list[Callable[[int], None]] = []
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        branch = _branch_of(source, listen) if source else None
        if branch is not None:
            self._socket = branch
        else:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "meshbook.rank.forkserver", str(theirs.fileno()), listen]
                    + ([] if with_torch else ["--no-torch"]),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=rank_environment(),
                )
        self._socket.setblocking(False)
        loop.watch_fd(self._socket.fileno(), self._readable)

    def start_rank(self, told: birth.RankBirth, on_started: Callable[[Child], None]) -> None:
        out, out_write = make_pipe()
        err, err_write = make_pipe()
        last_words = LastWords()
        self._ask(birth.ForkRank(told), [out, err, out_write, err_write, last_words.fd])
        os.close(out_write)
        os.close(err_write)
        self._started.append(lambda pid: on_started(Child(pid, out, err, last_words)))

    def start_store(self, on_port: Callable[[int], None]) -> None:
        pipe = _PortPipe(self._loop, on_port)
        self._ask(birth.ForkStore(), [pipe.write])
        os.close(pipe.write)
        self._started.append(lambda pid: None)

    def close(self) -> None:
        self._closing = True
        self._loop.unwatch(self._socket.fileno())
        if self._process is None:  # not our child: its end of the socket tells of its end
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.settimeout(2)
                while self._socket.recv(birth.MAX_BIRTH_BYTES):
                    pass
            self._socket.close()
            return
        self._socket.close()  # the server ends when it reads the end of file, and its children with it
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: birth.ForkCommand, descriptors: list[int]) -> None:
        try:
            self._socket.setblocking(True)
            socket.send_fds(self._socket, [birth.encoder.encode(command)], descriptors)
        except OSError as error:
            raise StartError(f"the fork server is gone ({error.strerror})") from error
        finally:
            self._socket.setblocking(False)

    def _readable(self) -> None:
        while True:
            try:
                data = self._socket.recv(birth.MAX_BIRTH_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.unwatch(self._socket.fileno())
                if not self._closing:
                    how = f" with status {self._process.wait()}" if self._process is not None else ""
                    self._on_failure(f"the fork server ended{how}")
                return
            match birth.fork_reports.decode(data):
                case birth.ForkServerReady(seconds=seconds):
                    self.ready_s = seconds
                case birth.Forked(pid=pid):
                    self._started.pop(0)(pid)
                case birth.ChildExited(pid=pid, status=status):
                    self._on_exit(pid, status)


class FreshStarter:
    """Every rank a new interpreter: slower and larger, for where fork cannot serve."""

    def __init__(self, loop: Loop, on_exit: Callable[[int, int], None]) -> None:
        self._loop, self._on_exit = loop, on_exit
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._store: subprocess.Popen[bytes] | None = None
        self._poll_timer: Timer | None = None

    def start_rank(self, told: birth.RankBirth, on_started: Callable[[Child], None]) -> None:
        out, out_write = make_pipe()
        err, err_write = make_pipe()
        last_words = LastWords()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshbook.rank.main", str(out), str(err), str(last_words.fd)],
            stdin=subprocess.PIPE,
            stdout=out_write,
            stderr=err_write,
            pass_fds=(out, err, last_words.fd),
            env=rank_environment(),
        )
        os.close(out_write)
        os.close(err_write)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(birth.encoder.encode(told))
        self._processes[process.pid] = process
        self._watch(process)
        on_started(Child(process.pid, out, err, last_words))

    def start_store(self, on_port: Callable[[int], None]) -> None:
        pipe = _PortPipe(self._loop, on_port)
        self._store = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshbook.rank.store", str(pipe.write)],
            pass_fds=(pipe.write,),
            env=rank_environment(),
        )
        os.close(pipe.write)

    def close(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        for process in [*self._processes.values(), *([self._store] if self._store else [])]:
            process.kill()
            end_group(process.pid)
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        if not hasattr(os, "pidfd_open"):
            self._poll()
            return
        fd = os.pidfd_open(process.pid)

        def ended() -> None:
            self._loop.unwatch(fd)
            os.close(fd)
            self._report(process)

        self._loop.watch_fd(fd, ended)

    def _report(self, process: subprocess.Popen[bytes]) -> None:
        end_group(process.pid)
        code = process.wait()
        del self._processes[process.pid]
        self._on_exit(process.pid, -code if code < 0 else code << 8)

    def _poll(self) -> None:
        for process in [process for process in self._processes.values() if process.poll() is not None]:
            self._report(process)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll_timer = self._loop.call_later(0.2, self._poll)


def _branch_of(source: str, listen: str) -> socket.socket | None:
    """A connection to a new branch of the fork server that listens at `source`; None: there is none any more."""
    branch = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        branch.settimeout(2)
        branch.connect(source)
        branch.send(birth.encoder.encode(birth.Branch(environment=rank_environment(), listen=listen)))
    except OSError:
        branch.close()
        return None
    return branch


def rank_environment() -> dict[str, str]:
    """The environment that ranks inherit.

    One OpenBLAS thread at import: numpy's pool would be threads in the fork server. NVML for counting devices: asking
    CUDA itself would initialise it before the fork.
    """
    environment = dict(os.environ)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the default tears the process down after an abort
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
