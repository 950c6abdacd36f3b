"""What a driver process does whatever its launcher is: it reads commands, starts hosts by actors, and reports.

It ends with its standard input, and what it has on the cluster then does too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from meshbook.engines.driver_messages import (
    CloseInput,
    ClusterFailed,
    DriverCommand,
    DriverLine,
    FindWays,
    HostActorLost,
    HostEnded,
    HostLogged,
    HostStarted,
    HostWrote,
    KillHost,
    NodesAllocated,
    NodesAwaited,
    StartHost,
    WaysFound,
    WriteInput,
)

POLL_S = 0.5
# Polls of a connection until whoever waits is to hear of it. Ray takes a minute to find that this machine is no node.
_SLOW_POLLS = 10
# Seconds that hosts have to end with their ranks.
_END_TIMEOUT_S = 3.0


class ActorLost(Exception):
    """An actor could not be started, or has ended; with the launcher's words."""


class Advised(Exception):
    """There are no nodes: what is wrong, and what to do."""

    def __init__(self, words: str, advice: str) -> None:
        super().__init__(words)
        self.advice = advice


class HostActor(Protocol):
    """An actor with a `LaunchedChild`. What waits raises one of the launcher's `lost_errors` if the actor ends."""

    async def start(self, python: str | None, words: tuple[str, ...], environment: dict[str, str]) -> str: ...

    async def next_event(self) -> tuple[str, Any]: ...

    def write(self, data: bytes) -> None: ...

    def close_input(self) -> None: ...

    def kill(self) -> None:
        """End the actor, and with it what it has started. Does not wait."""


class DriverMain(ABC):
    """Does what the engine asks for.

    Attributes:
        lost_errors: what the launcher raises where an actor has ended.
    """

    lost_errors: tuple[type[Exception], ...]

    def __init__(self, report: Callable[[DriverLine], None], commands: asyncio.Queue[DriverCommand | None]) -> None:
        """commands: None is the end of the mesh."""
        self.report, self._commands = report, commands
        self._actors: dict[int, HostActor] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._lookups: set[asyncio.Task[None]] = set()  # of ways to the supervisor

    # ---- what depends on the launcher

    @abstractmethod
    async def allocate(self, first: DriverCommand) -> str | None:
        """Wait for nodes. Return this machine's address as they reach it; None: the mesh has ended, or all is said."""

    @abstractmethod
    async def new_actor(self, start: StartHost) -> HostActor:
        """Have an actor started on a node. Raises ActorLost."""

    @abstractmethod
    async def leave(self) -> None:
        """Give back what there is on the cluster. Waits for some seconds at most."""

    async def find_ways(self, launch: int, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return at which addresses a host's node reaches these."""
        return addresses

    def words_of(self, error: Exception) -> str:
        """Return what the launcher says of an actor's end."""
        return str(error)

    # ---- the mesh's life

    async def run(self) -> None:
        """Serve until the mesh ends."""
        first = await self._commands.get()
        if first is None:
            return
        try:
            address = await self.allocate(first)
        except Advised as error:
            self.report(ClusterFailed(str(error), error.advice))
            return
        except Exception as error:
            causes = [error, *([error.__cause__] if error.__cause__ is not None else [])]
            self.report(ClusterFailed("; ".join(f"{type(one).__name__}: {one}" for one in causes)))
            return
        if address is None:
            return
        self.report(NodesAllocated(address))
        while (command := await self._commands.get()) is not None:
            self._handle(command)

    async def close(self) -> None:
        """End all hosts, in order if they do so soon, and leave the cluster."""
        for actor in self._actors.values():
            actor.close_input()
        if self._lives:
            await asyncio.wait(self._lives.values(), timeout=_END_TIMEOUT_S)
        await self.leave()

    def has_ended(self) -> bool:
        """Whether the mesh has: until it has its nodes, the engine says nothing else."""
        return not self._commands.empty()

    async def wait_for(self, task: asyncio.Task[Any], describe: Callable[[], str]) -> bool:
        """Wait for a task; return whether it is done, else the mesh has ended.

        Args:
            describe: returns what is to be shown if it takes long. It is asked now and then, on a thread.
        """
        shown = ""
        for poll in itertools.count(1):
            if (await asyncio.wait({task}, timeout=POLL_S))[0]:
                break
            if poll % _SLOW_POLLS == 0 and (state := await asyncio.to_thread(describe)) != shown:
                shown = state
                self.report(NodesAwaited(state))
            if self.has_ended():
                return False
        return True

    # ---- hosts

    def _handle(self, command: DriverCommand) -> None:
        match command:
            case StartHost():
                self._lives[command.launch] = asyncio.create_task(self._live(command))
            case WriteInput() if (actor := self._actors.get(command.launch)) is not None:
                actor.write(command.text.encode())
            case FindWays() if command.launch in self._actors:
                self._lookups.add(lookup := asyncio.create_task(self._find_ways(command)))
                lookup.add_done_callback(self._lookups.discard)
            case CloseInput() if (actor := self._actors.get(command.launch)) is not None:
                actor.close_input()
            case KillHost() if (life := self._lives.get(command.launch)) is not None:
                life.cancel()

    async def _live(self, start: StartHost) -> None:
        """Start a host, and follow it until it ends; then its actor does."""
        try:
            await self.run_host(start)
        except Exception as error:
            if not isinstance(error, (ActorLost, *self.lost_errors)):
                traceback.print_exc()  # into the driver's log
            self.report(HostActorLost(start.launch, self.words_of(error)))
        finally:
            if (actor := self._actors.pop(start.launch, None)) is not None:
                actor.kill()
            del self._lives[start.launch]

    async def _find_ways(self, command: FindWays) -> None:
        try:
            self.report(WaysFound(command.launch, await self.find_ways(command.launch, command.addresses)))
        except Exception as error:
            traceback.print_exc()
            self.report(HostActorLost(command.launch, f"no way to the supervisor was found: {self.words_of(error)}"))

    async def run_host(self, start: StartHost) -> None:
        actor = self._actors[start.launch] = await self.new_actor(start)
        self.report(HostStarted(start.launch, await actor.start(start.python, start.words, start.environment)))
        while True:
            match await actor.next_event():
                case ("line", line):
                    self.report(HostWrote(start.launch, line))
                case ("log", text):
                    self.report(HostLogged(start.launch, text))
                case (_, code):
                    self.report(HostEnded(start.launch, code))
                    return


def serve(new_main: Callable[[Callable[[DriverLine], None], asyncio.Queue[DriverCommand | None]], DriverMain]) -> None:
    """Be the driver process."""
    # The launcher and what it starts write to standard output; the engine's lines have it for themselves.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    asyncio.run(_serve(new_main, output))


async def _serve(new_main: Callable[..., DriverMain], output: Any) -> None:
    encoder = msgspec.json.Encoder()

    def report(line: DriverLine) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor was killed
            output.write(encoder.encode(line) + b"\n")

    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[DriverCommand | None] = asyncio.Queue()

    def read() -> None:
        decoder = msgspec.json.Decoder(DriverCommand)
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(commands.put_nowait, decoder.decode(line))
        loop.call_soon_threadsafe(commands.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    main = new_main(report, commands)
    try:
        await main.run()
        await main.close()
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # threads that ask the launcher something, for some seconds, are not waited for
