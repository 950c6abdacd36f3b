"""The driver of a mesh's hosts on Monarch: `python -m meshbook.engines.monarch_main`; its engine speaks to it by lines.

Only this process and its guard import monarch: it starts threads, and a process can be one client only. The job is
ended with it, however it ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.metadata
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import monarch.actor
import monarch.config
import msgspec
from monarch._rust_bindings.monarch_hyperactor.channel import BindSpec
from monarch.actor import Actor, concurrent_endpoint
from monarch.job import JobTrait, PortForwarder

from meshbook.engines import launched_child
from meshbook.engines.driver_main import POLL_S, ActorLost, DriverMain, serve
from meshbook.engines.driver_messages import (
    AllocateJob,
    DescribeJob,
    DriverCommand,
    DriverLine,
    JobDescribed,
    StartHost,
)
from meshbook.engines.monarch_guard import DONE, GuardedJob
from meshbook.engines.monarch_jobs import choose_hosts, ended_login, make_job, queue_state

_LEAVE_TIMEOUT_S = 2.5
_OUTSIDE = "8.8.8.8"
_LOOPBACK = "127.0.0.1"
_DIAL_TIMEOUT_S = 3.0
_READ_BYTES = 1 << 18
# How names of Monarch's own processes' environment begin. Ranks that use Monarch are clients of their own.
_NOT_FOR_RANKS = ("HYPERACTOR_", "MONARCH_CLIENT_TRACE_ID", "_MONARCH_WORKER_ADDR")


class MonarchHost(Actor):
    """On each host: a `LaunchedChild`."""

    def __init__(self) -> None:
        self._child = launched_child.LaunchedChild()

    @concurrent_endpoint
    async def start(self, python: str | None, words: tuple[str, ...], environment: dict[str, str]) -> str:
        return self._child.start(python, words, environment, _NOT_FOR_RANKS)

    @concurrent_endpoint
    async def next_event(self) -> tuple[str, Any]:
        return await asyncio.to_thread(self._child.next_event)

    @concurrent_endpoint
    async def can_reach(self, places: list[tuple[str, int]]) -> bool:
        return await asyncio.to_thread(_can_reach, places)

    @concurrent_endpoint
    async def free_port(self) -> int:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            port: int = listener.getsockname()[1]
            return port

    @concurrent_endpoint
    async def write(self, data: bytes) -> None:
        self._child.write(data)

    @concurrent_endpoint
    async def close_input(self) -> None:
        self._child.close_input()


class MonarchActor:
    """A `MonarchHost`, as its client sees it."""

    def __init__(self, procs: Any, actor: Any) -> None:
        self._procs, self._actor = procs, actor
        self._ending: asyncio.Task[None] | None = None

    async def start(self, python: str | None, words: tuple[str, ...], environment: dict[str, str]) -> str:
        hostname: str = await self._actor.start.call_one(python, words, environment)
        return hostname

    async def next_event(self) -> tuple[str, Any]:
        event: tuple[str, Any] = await self._actor.next_event.call_one()
        return event

    async def can_reach(self, places: list[tuple[str, int]]) -> bool:
        found: bool = await self._actor.can_reach.call_one(places)
        return found

    async def forward(self, forwarder: Any, local: Any, port: int) -> str:
        """Have a port of this machine's loopback within the host's reach; return its address there."""
        place = f"{_LOOPBACK}:{await self._actor.free_port.call_one()}"
        await forwarder.forward.call_one(local, port, self._procs, place)
        return f"tcp://{place}"

    def write(self, data: bytes) -> None:
        self._actor.write.broadcast(data)

    def close_input(self) -> None:
        self._actor.close_input.broadcast()

    def kill(self) -> None:
        self._ending = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        with contextlib.suppress(Exception):  # its host may be gone
            await self._procs.stop()


class MonarchMain(DriverMain):
    """Does what the engine asks for, on Monarch."""

    lost_errors = (monarch.actor.ActorError, RuntimeError)  # its SupervisionError is one

    def __init__(self, report: Callable[[DriverLine], None], commands: asyncio.Queue[DriverCommand | None]) -> None:
        super().__init__(report, commands)
        self._job: JobTrait | None = None  # one that this process has started
        self._is_login = False  # it is an SSHJob made here
        self._guard: subprocess.Popen[bytes] | None = None
        self._hosts: Any = None
        self._local: Any = None  # a process of Monarch's on this machine, which connects to forwarded ports
        self._forwarder: Any = None
        self._relays: dict[tuple[str, int], asyncio.Server] = {}  # by the place to which they lead

    async def allocate(self, first: DriverCommand) -> str | None:
        if isinstance(first, DescribeJob):
            described = make_job(first.job)
            version = importlib.metadata.version("torchmonarch")
            self.report(JobDescribed(version, type(described).__name__, described.active))
        if not isinstance(first, AllocateJob):
            return None
        job = make_job(first)
        address = "127.0.0.1"
        if first.kind not in ("process", "local"):
            address = _own_address(first.options.get("hosts", _OUTSIDE).partition(",")[0].rpartition("@")[2])
        if first.kind in ("ssh", "slurm"):  # the hostname, which Monarch takes, may be one of loopback
            monarch.config.configure(default_transport=BindSpec(f"tcp://{address}:0"))
        if not job.active:  # else it is the user's, who has started it
            self._start_guard()
            self._job, self._is_login = job, first.kind == "ssh"
            await asyncio.to_thread(job.apply)
            self._tell_guard(job, first.file)
        kind = type(job).__name__
        ask = queue_state if first.kind == "slurm" else str
        getting = asyncio.create_task(asyncio.to_thread(_state_of, job))
        if not await self.wait_for(getting, lambda: f"Monarch: its {kind} is {ask() or 'pending'}"):
            return None
        self._hosts = choose_hosts(getting.result(), first)
        return address

    async def run_host(self, start: StartHost) -> None:
        running = asyncio.create_task(super().run_host(start))
        try:
            while not (await asyncio.wait({running}, timeout=POLL_S))[0]:
                login = ended_login(self._job, start.node) if self._is_login else None
                if login is not None:
                    raise ActorLost(f"ssh to {login} has ended; see that `ssh {login} true` works without a password")
            await running
        finally:
            running.cancel()

    async def new_actor(self, start: StartHost) -> MonarchActor:
        host = self._hosts.slice(hosts=start.node)
        procs = host.spawn_procs({"agents": 1}, name=f"meshbook{start.launch}")
        return MonarchActor(procs, procs.spawn(f"host{start.launch}", MonarchHost))

    async def find_ways(self, launch: int, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Where a node cannot connect to this machine (it is behind a firewall), forward the ports by Monarch."""
        places = [_place_of(address) for address in addresses]
        actor = self._actors[launch]
        assert isinstance(actor, MonarchActor)
        if await actor.can_reach(places):
            return addresses
        if self._forwarder is None:
            self._local = monarch.actor.this_host().spawn_procs({"agents": 1})
            self._forwarder = self._local.spawn("ports", PortForwarder)
        ways = []
        for place in places:
            if place not in self._relays:
                self._relays[place] = await _relay(*place)
            port = self._relays[place].sockets[0].getsockname()[1]
            ways.append(await actor.forward(self._forwarder, self._local, port))
        return tuple(ways)

    def words_of(self, error: Exception) -> str:
        return str(error).partition("\n\nStack backtrace:")[0]

    async def leave(self) -> None:
        if self._job is None:
            return
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                with contextlib.suppress(NotImplementedError):  # pods that were there, which Monarch does not end
                    await asyncio.to_thread(self._job.kill)
        except TimeoutError:
            return  # the guard goes on
        self._write_guard(DONE)

    # ---- the guard

    def _start_guard(self) -> None:
        command = [sys.executable, "-P", "-m", "meshbook.engines.monarch_guard"]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def _tell_guard(self, job: JobTrait, file: str) -> None:
        try:
            pickled = base64.b64encode(job.dumps()).decode()
        except Exception as error:
            print(f"the job cannot be pickled, and outlives a driver that is killed: {error}", file=sys.stderr)
            return
        self._write_guard(msgspec.json.encode(GuardedJob(file, pickled)))

    def _write_guard(self, line: bytes) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.write(line + b"\n")
        self._guard.stdin.flush()


def _state_of(job: JobTrait) -> Any:
    """Return what hosts it has. Blocks."""
    try:
        return job.state(cached_path=None)
    except Exception:
        raise
    except BaseException as error:  # a panic of Monarch's own
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _place_of(address: str) -> tuple[str, int]:
    """Return the host and the port of `tcp://host:port`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _can_reach(places: list[tuple[str, int]]) -> bool:
    for place in places:
        try:
            socket.create_connection(place, timeout=_DIAL_TIMEOUT_S).close()
        except OSError:
            return False
    return True


async def _relay(host: str, port: int) -> asyncio.Server:
    """Listen on loopback, to which alone Monarch forwards, for connections to an address of this machine."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:  # the supervisor has ended, or its standby does not listen yet
            writer.close()
            return
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer), return_exceptions=True)

    return await asyncio.start_server(accept, _LOOPBACK, 0)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def _own_address(peer: str) -> str:
    """Return this machine's address on the way to a peer. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:  # there is no such way, or no such name
            return socket.gethostbyname(socket.gethostname())
        address: str = probe.getsockname()[0]
        return address


def _log_fault(failure: Any) -> None:
    """Take note of an actor that has ended, which the call to it says; Monarch itself would end the process."""
    print(failure.report(), file=sys.stderr)


if __name__ == "__main__":
    monarch.actor.unhandled_fault_hook = _log_fault
    cloudpickle.register_pickle_by_value(launched_child)
    serve(MonarchMain)
