"""Starts a host's ranks: from its fork server, or as fresh interpreters where forking is not wanted or not safe."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from meshbook.host.cores import cgroup_quota, num_cores, threads_per_rank
from meshbook.host.logring import last_lines_of
from meshbook.host.rlimits import user_fd_limit
from meshbook.host.starter import ForkStarter, FreshStarter, RankProcess, Starter
from meshbook.wire import messages, spawn
from meshbook.wire.loop import Loop

log = logging.getLogger("meshbook.host")

_TAIL_BYTES = 8 << 10  # of a log: enough to contain its last line


class LaunchEvents(Protocol):
    """Who hears of ranks' processes."""

    def process_started(self, rank: int, process: RankProcess) -> None: ...

    def process_exited(self, pid: int, status: int) -> None: ...

    def fork_server_exited(self, cause: str) -> None:
        """All processes that were forked from it have ended with it."""

    def fork_server_terminating(self) -> None:
        """It has received SIGTERM, and goes on."""

    def start_failed(self, reason: str) -> None: ...


class RankLauncher:
    """One host's way to start ranks. What becomes of them is reported to `events`, from the loop."""

    def __init__(
        self, loop: Loop, folder: Path, host: int, token: str, addresses: tuple[str, str], events: LaunchEvents
    ) -> None:
        """addresses: of the work and the service socket to which ranks connect."""
        self._loop, self._folder, self._host, self._token = loop, folder, host, token
        self._work_address, self._service_address = addresses
        self._events = events
        self.starter: Starter | None = None
        self.fork_unsafe_notice: messages.Notice | None = None  # why ranks are not forked

    def warm_up(self, *, with_torch: bool, branch_from: str | None) -> None:
        """Start the fork server before ranks are requested, so that its imports are done by then."""
        if self.starter is None:
            self.starter = self._make_fork_starter(with_torch=with_torch, branch_from=branch_from)

    def start(self, command: messages.StartRanks, incarnations: Mapping[int, int]) -> None:
        """Start the ranks of a command; `incarnations`: how many processes each had before."""
        spec, host_ranks = command.spec, command.host_ranks
        starter = self._starter_for(spec)
        threads = spec.threads_per_rank or threads_per_rank(len(host_ranks), num_cores(), cgroup_quota())
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
                    blas_threads=None if "OPENBLAS_NUM_THREADS" in {*os.environ, *spec.env} else threads,
                    host_pid=os.getpid(),
                    max_files=user_fd_limit(),
                    incarnation=incarnations[rank],
                )
                starter.start_rank(config, lambda process, rank=rank: self._events.process_started(rank, process))  # type: ignore[misc]
        except OSError as error:
            self._events.start_failed(str(error))

    def close(self) -> None:
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
        self.close()
        if spec.start_method == "fork":
            self.starter = self._make_fork_starter(with_torch=spec.torch)
        else:
            self.starter = FreshStarter(self._loop, self._events.process_exited)
        return self.starter

    def _make_fork_starter(self, *, with_torch: bool, branch_from: str | None = None) -> ForkStarter:
        return ForkStarter(
            self._loop,
            self._events.process_exited,
            on_server_exit=self._fork_server_exited,
            on_failure=self._events.start_failed,
            on_fork_unsafe=self._fork_server_unsafe,
            on_terminating=self._events.fork_server_terminating,
            with_torch=with_torch,
            listen_path=f"{self._folder}/h{self._host}-fork.sock",
            branch_from=branch_from,
        )

    def _fork_server_exited(self, reason: str) -> None:
        if self.starter is not None:  # ranks that are to be replaced get a new fork server
            self.starter.close()
            self.starter = None
        last_lines = last_lines_of(_read_tail(self._folder / "supervisor.log"), 1)
        self._events.start_failed(": ".join([f"the fork server {reason}", *last_lines]))
        self._events.fork_server_exited(f"ended with the fork server that it was forked from, which {reason}")

    def _fork_server_unsafe(self, reason: str, retries: list[Callable[[Starter], None]]) -> None:
        """Start ranks in fresh interpreters instead of forking them."""
        text = f"ranks are not forked but started in fresh interpreters, which is slower: {reason}"
        log.warning("%s", text)
        starter = self.starter = FreshStarter(self._loop, self._events.process_exited)
        self.fork_unsafe_notice = messages.Notice(text)
        try:
            for retry in retries:
                retry(starter)
        except OSError as error:
            self._events.start_failed(str(error))


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
