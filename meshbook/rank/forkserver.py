"""The process that ranks are forked from.

It imports torch, numpy and IPython once and then only forks: each rank starts in tens of milliseconds and shares the
imported pages. To stay safe to fork from, it has one thread, never runs a torch operation, never uses CUDA, has no zmq
context and serves no store. (A fork server that did any of these hung its children in libgomp or on a lock; see
docs/architecture.md.) It reaps its children and reports to the host how each one ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

from meshbook.rank.imported_modules import PRELOADED_MODULES
from meshbook.wire import spawn
from meshbook.wire.process_control import die_with_pipe, kill_process_group


def serve(fd: int, *, with_torch: bool, listen_path: str) -> NoReturn:
    """Fork on request until the host closes its end of the socket."""
    started = time.monotonic()
    host = socket.socket(fileno=fd)
    for name in PRELOADED_MODULES if with_torch else ():
        importlib.import_module(name)
    from meshbook.rank import main as _rank_main  # after torch, so that its threads setting applies
    from meshbook.rank.actor_hooks import ACTORS_MODULE
    from meshbook.rank.preload import preload

    if with_torch:  # light ranks are for actors and seldom run a cell, so startup time matters more
        preload()
    importlib.import_module(ACTORS_MODULE)

    if with_torch:
        import torch

        torch.set_num_threads(1)  # a thread pool created here would have dead threads in every child
    hazard = find_fork_hazard()
    if hazard is not None:
        host.send(spawn.encoder.encode(spawn.ForkUnsafe(hazard)))
        os._exit(0)
    gc.collect()
    gc.freeze()  # the garbage collector must not write to the shared pages
    listener = _bind_listener(listen_path)
    host.send(spawn.encoder.encode(spawn.ForkServerReady(time.monotonic() - started)))
    _serve_fork_requests(host, listener, _rank_main)


def find_fork_hazard() -> str | None:
    """Return what makes this process unsafe to fork from; None if it is safe.

    A library that starts a thread or uses CUDA when it is imported (a torch plugin, for example) is enough: locks held
    by threads that a child does not have stay locked, and a CUDA context does not survive a fork.
    """
    with contextlib.suppress(OSError):
        tasks = os.listdir("/proc/self/task")
        if len(tasks) > 1:
            names = sorted({_thread_name(task) for task in tasks if task != str(os.getpid())})
            return f"its imports have started {len(tasks) - 1} threads ({', '.join(names)})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "its imports have initialised CUDA"
    return None


def _thread_name(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        return "ended meanwhile"


def _bind_listener(path: str) -> socket.socket:
    """Return the socket on which other meshes of the same user can request a fork of this server.

    That saves them all the imports. The folder's permissions exclude other users.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    listener.listen(16)
    return listener


def _serve_fork_requests(host: socket.socket, listener: socket.socket, _rank_main: object) -> NoReturn:
    signal_fd, wakeup_fd = _open_signal_pipe()
    ranks: set[int] = set()  # the processes that have not been reaped
    forked: dict[int, int] = {}  # the process of each request
    while True:
        readable, _, _ = select.select([host.fileno(), signal_fd, listener.fileno()], [], [])
        if listener.fileno() in readable:
            _fork_detached_server(host, listener, (signal_fd, wakeup_fd), _rank_main)
        if signal_fd in readable:
            signals = b""
            with contextlib.suppress(BlockingIOError):
                signals = os.read(signal_fd, 4096)
            if signal.SIGTERM in signals:
                host.send(spawn.encoder.encode(spawn.ForkServerTerminating()))
            ranks.difference_update(_reap_children(host))
        if host.fileno() in readable:
            try:
                data, descriptors, _, _ = socket.recv_fds(host, spawn.RECEIVE_BYTES, 8)
            except ConnectionError:  # the host was killed
                data = b""
            if not data:
                for rank in ranks:  # with what they have started, which would live on
                    kill_process_group(rank)
                os._exit(0)
            command = spawn.fork_commands.decode(data)
            if isinstance(command, spawn.CommandInFile):
                command = spawn.read_file(descriptors.pop(), spawn.fork_commands)
            assert isinstance(command, (spawn.ForkRank, spawn.ForkSpare))
            number = command.number
            pid = forked.get(number)
            reply: spawn.ForkReport
            replied, has_replied = os.pipe()
            try:
                if pid is None:  # else a standby of the host asks again for what may have been lost
                    pid = os.fork()
            except OSError as error:
                text = f"{error.strerror}: this user or container may have no more processes"
                reply = spawn.ForkFailed(number, text)
            else:
                if pid == 0:
                    listener.close()  # otherwise it would accept connections without replies as long as a rank lives
                    os.close(has_replied)
                    _end_without_reply(replied)
                    _run_child(_rank_main, host, command, descriptors)
                if number not in forked:
                    forked[number] = pid
                    ranks.add(pid)
                reply = spawn.Forked(number, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            host.send(spawn.encoder.encode(reply))
            os.write(has_replied, b"x")
            os.close(has_replied)
            os.close(replied)


def _end_without_reply(replied: int) -> None:
    """In a child: end if the server has been killed before it has replied; the host then starts another process."""
    if not os.read(replied, 1):
        os._exit(1)
    os.close(replied)


def _fork_detached_server(
    host: socket.socket, listener: socket.socket, signal_pipe: tuple[int, int], rank_main: object
) -> None:
    """Fork a server for another mesh. It is detached from this one, and ends when that mesh's host disconnects."""
    connection, _ = listener.accept()
    try:
        child_pid = os.fork()
    except OSError:  # process limit: the closed connection tells that mesh, and this server continues
        connection.close()
        return
    if child_pid:
        connection.close()
        os.waitpid(child_pid, 0)
        return
    try:
        if os.fork() == 0:
            # Close this server's own descriptors: a forked server is forked again, and would pass on more each time.
            signal.set_wakeup_fd(-1)  # from Python 3.12 on asyncio has done so in every child
            for fd in signal_pipe:
                os.close(fd)
            host.close()
            listener.close()
            request = spawn.branch_requests.decode(connection.recv(spawn.RECEIVE_BYTES))
            os.environ.clear()
            os.environ.update(request.environment)
            own_listener = _bind_listener(request.listen_path)
            connection.send(spawn.encoder.encode(spawn.ForkServerReady(0.0)))
            _serve_fork_requests(connection, own_listener, rank_main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _open_signal_pipe() -> tuple[int, int]:
    """Return both ends of a pipe from which the numbers of signals can be read: a child has exited, or SIGTERM came.

    SIGTERM does not end the server, because its ranks would end with it: their host decides.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable, writable


def _reap_children(host: socket.socket) -> Iterator[int]:
    """Reap the children that have ended; yield their pids."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        kill_process_group(ended.si_pid)
        pid, status = os.waitpid(ended.si_pid, 0)
        host.send(spawn.encoder.encode(spawn.ChildExited(pid, status)))
        yield pid


def _run_child(rank_main: object, host: socket.socket, command: spawn.ForkCommand, descriptors: list[int]) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        host.close()
        read_out, read_err, write_out, write_err, crash_log_fd, host_pipe, *channel = descriptors
        os.dup2(write_out, 1)
        os.dup2(write_err, 2)
        os.close(write_out)
        os.close(write_err)
        rank_main.run(command, (read_out, read_err), crash_log_fd, host_pipe, *channel)  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_pipe(int(sys.argv[2]), with_group=False)  # whoever its parent is: a standby may take the host's place
    serve(int(sys.argv[1]), with_torch="--no-torch" not in sys.argv, listen_path=sys.argv[3])


if __name__ == "__main__":
    main()
