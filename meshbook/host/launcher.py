"""Starts a host's ranks: from its fork server, or as fresh interpreters where forking is not wanted or not safe."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from meshbook.host.cores import cgroup_quota, num_cores, threads_per_rank
from meshbook.host.fresh_starter import FreshStarter
from meshbook.host.logring import last_lines_of
from meshbook.host.rlimits import user_fd_limit
from meshbook.host.spares import SparePool
from meshbook.host.starter import ForkStarter, RankProcess, Starter
from meshbook.wire import descriptors, messages, spawn
from meshbook.wire.loop import Loop
from meshbook.wire.remote_start import HostPlace

log = logging.getLogger("meshbook.host")

_TAIL_BYTES = 8 << 10  # of a log: enough to contain its last line


class LaunchEvents(Protocol):
    """Who hears of ranks' processes."""

    def process_started(self, rank: int, process: RankProcess) -> None: ...

    def process_exited(self, pid: int, status: int | None) -> None: ...

    def fork_server_exited(self, reason: str) -> None:
        """It reports no exits any more. The ranks that were forked from it go on."""

    def fork_server_terminating(self) -> None:
        """It has received SIGTERM, and goes on."""

    def start_failed(self, reason: str) -> None: ...


class RankLauncher:
    """One host's way to start ranks. What becomes of them is reported to `events`, from the loop.

    Attributes:
        spares: processes that wait to be ranks.
        keeper: pid of this host's keeper; 0: it has none.
    """

    def __init__(
        self,
        loop: Loop,
        folder: Path,
        host: int,
        token: str,
        addresses: tuple[str, str],
        events: LaunchEvents,
        *,
        place: HostPlace | None = None,
    ) -> None:
        """
        Args:
            addresses: of the work and the service socket to which ranks connect.
            place: in a mesh of several machines; None: it is on one.
        """
        self._loop, self._folder, self._host, self._token = loop, folder, host, token
        self._place = place
        self._work_address, self._service_address = addresses
        self._events = events
        # held open for as long as ranks may live: they end when this process does
        self._host_pipe, self._host_pipe_write = os.pipe2(os.O_CLOEXEC)
        self._is_closed = False
        self.keeper = 0
        self._is_retrying = False  # requests of a fork server that was lost, and nothing has been forked since
        self.starter: Starter | None = None
        self.spares = SparePool(loop, lambda config: self._starter_for(config.spec), host)
        self.notices: list[messages.Notice] = []  # for each rank that starts: why it was not forked

    def warm_up(self, *, with_torch: bool, branch_from: str | None) -> None:
        """Start the fork server before ranks are requested, so that its imports are done by then."""
        if self.starter is None:
            self.starter = self._make_fork_starter(with_torch=with_torch, branch_from=branch_from)

    def start(self, command: messages.StartRanks, incarnations: Mapping[int, int]) -> None:
        """Start the ranks of a command; `incarnations`: how many processes each had before."""
        self._loop.diverge()
        spec, host_ranks = command.spec, command.host_ranks
        threads, blas_threads = _threads(spec, len(host_ranks))
        try:
            for rank in command.ranks:
                config = spawn.RankConfig(
                    rank=rank,
                    local_rank=host_ranks.index(rank),
                    local_world_size=len(host_ranks),
                    world_size=command.world_size,
                    token=self._token,
                    work_address=self._work_address,
                    service_address=self._service_address,
                    spec=spec,
                    threads=threads,
                    blas_threads=blas_threads,
                    host_pid=self.keeper or os.getpid(),
                    max_files=user_fd_limit(),
                    incarnation=incarnations[rank],
                    host=self._host,
                    address=self._place.address if self._place is not None else None,
                    store_address=self._place.store if self._place is not None else None,
                    store_key=self._place.store_key if self._place is not None else None,
                )
                if not self.spares.take(config, self._rank_started, self._start_rank):
                    self._start_rank(config)
        except OSError as error:
            self._events.start_failed(descriptors.describe(error))

    def take_over(self) -> None:
        """Go on in a process that was forked from the launcher's, which has ended."""
        if self.starter is not None:
            self.starter.take_over()
        self.spares.take_over()

    @property
    def reports_zombies(self) -> bool:
        """Whether the exit of a process that nobody has waited for is yet to be reported: its fork server lives."""
        return isinstance(self.starter, ForkStarter)

    def prepare_spares(self, command: messages.PrepareSpares) -> None:
        """Have processes ready that ranks can be."""
        self._loop.diverge()
        threads, blas_threads = _threads(command.spec, len(command.host_ranks))
        config = spawn.SpareConfig(
            spec=command.spec,
            threads=threads,
            blas_threads=blas_threads,
            host_pid=self.keeper or os.getpid(),
            max_files=user_fd_limit(),
        )
        self.spares.keep(command.num, config)

    def _start_rank(self, config: spawn.RankConfig) -> None:
        self._starter_for(config.spec).start_rank(config, lambda process: self._rank_started(config.rank, process))

    def _rank_started(self, rank: int, process: RankProcess) -> None:
        self._is_retrying = False
        self._events.process_started(rank, process)

    def close(self) -> None:
        """End the starter, the spares, and the ranks that remain. May be called again."""
        self.spares.close()
        self._close_starter()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._host_pipe)
            os.close(self._host_pipe_write)

    def _close_starter(self) -> None:
        if self.starter is not None:
            self.starter.close()
            self.starter = None

    def _starter_for(self, spec: messages.MeshSpec) -> Starter:
        """The starter that is there if it fits, else a new one."""
        starter = self.starter
        is_other_fork = isinstance(starter, ForkStarter) and (
            spec.start_method != "fork" or spec.torch != starter.with_torch
        )
        if starter is not None and not is_other_fork:
            return starter
        self._close_starter()
        if spec.start_method == "fork":
            self.starter = self._make_fork_starter(with_torch=spec.torch)
        else:
            self.starter = FreshStarter(self._loop, self._process_exited, host_pipe=self._host_pipe)
        return self.starter

    def _make_fork_starter(self, *, with_torch: bool, branch_from: str | None = None) -> ForkStarter:
        return ForkStarter(
            self._loop,
            self._process_exited,
            on_server_exit=self._fork_server_exited,
            on_failure=self._events.start_failed,
            on_fork_unsafe=self._fork_server_unsafe,
            on_terminating=self._events.fork_server_terminating,
            with_torch=with_torch,
            listen_path=f"{self._folder}/h{self._host}-fork.sock",
            host_pipe=self._host_pipe,
            branch_from=branch_from,
        )

    def _process_exited(self, pid: int, status: int | None) -> None:
        if not self.spares.process_exited(pid, status):
            self._events.process_exited(pid, status)

    def _fork_server_exited(self, reason: str) -> None:
        starter = self.starter
        self._close_starter()  # the next ranks get a new fork server
        if isinstance(starter, ForkStarter):
            # once; a server that ends by itself before it is ready would do so again
            if starter.has_requests and not self._is_retrying and not starter.has_failed:
                self._is_retrying = True
                log.warning("the fork server %s; what it was to start is started by a new one", reason)
                self.starter = self._make_fork_starter(with_torch=starter.with_torch)
                for retry in starter.take_requests():
                    retry(self.starter)
            else:
                last_lines = last_lines_of(_read_tail(self._folder / "supervisor.log"), 1)
                starter.fail_requests(": ".join([f"the fork server {reason}", *last_lines]))
        self.spares.fork_server_exited()
        self._events.fork_server_exited(reason)

    def _fork_server_unsafe(self, reason: str, retries: list[Callable[[Starter], None]]) -> None:
        """Start ranks in fresh interpreters instead of forking them."""
        text = f"ranks are not forked but started in fresh interpreters, which is slower: {reason}"
        log.warning("%s", text)
        starter = self.starter = FreshStarter(self._loop, self._process_exited, host_pipe=self._host_pipe)
        self.notices = [messages.Notice(text)]
        try:
            for retry in retries:
                retry(starter)
        except OSError as error:
            self._events.start_failed(descriptors.describe(error))


def _threads(spec: messages.MeshSpec, num_ranks: int) -> tuple[int, int | None]:
    """Return how many threads each rank of a host has for torch, and for NumPy (None: the user's environment says)."""
    threads = spec.threads_per_rank or threads_per_rank(num_ranks, num_cores(), cgroup_quota())
    return threads, None if "OPENBLAS_NUM_THREADS" in {*os.environ, *spec.env} else threads


def kill_unwanted(process: RankProcess) -> None:
    """End a process whose rank is no longer wanted."""
    os.kill(process.pid, signal.SIGKILL)
    process.close()


def _read_tail(path: Path) -> str:
    """Return the end of a file that may be long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
