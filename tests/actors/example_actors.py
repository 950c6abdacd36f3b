"""The actors that tests play with. No pytest in here: ranks import it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from meshbook.actors.base import Actor, endpoint
from meshbook.actors.runtime import futures
from meshbook.actors.runtime.context import context, current_rank, current_size
from tests.budget import WAIT_S


def open_gate(actor: Any) -> None:
    """To be run beside what the actor does: ends `hold`."""
    actor.gate.set()


def send_sigint_when(ready: Callable[[], object], then: Callable[[], object] = lambda: None) -> threading.Thread:
    """Have somebody send this process SIGINT, as Stop does, once the main thread waits for an answer and something
    else has come about; and when that has ended its wait, do more."""
    main = threading.main_thread().ident or 0

    def comes_about(condition: Callable[[], object], num_looks: int = 4000) -> bool:
        tick = threading.Event()
        return any(condition() or tick.wait(0.005) for _ in range(num_looks))

    def press() -> None:
        if not comes_about(lambda: main in futures._waiting_threads and ready()):
            return
        wait = futures._waiting_threads.get(main, ())
        signal.pthread_kill(main, signal.SIGINT)
        while not comes_about(lambda: futures._waiting_threads.get(main) is not wait, 400):
            signal.pthread_kill(main, signal.SIGINT)  # the one before came just before the wait began in C
        then()

    thread = threading.Thread(target=press)
    thread.start()
    return thread


class Counter(Actor):
    """All endpoints are `def`: one thread, one message at a time."""

    def __init__(self, start: int = 0, fail: bool = False) -> None:
        if fail:
            raise ValueError("no such start")
        self.count = start
        self.seen: list[Any] = []
        self.gate = threading.Event()

    @endpoint
    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count

    @endpoint
    def note(self, thing: Any) -> None:
        self.seen.append(thing)

    @endpoint
    def notes(self) -> list[Any]:
        return self.seen

    @endpoint
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @endpoint
    def fail(self, text: str = "boo", only: int | None = None) -> int:
        if only is None or current_rank().rank == only:
            raise KeyError(text)
        return 0

    @endpoint
    def where(self) -> tuple[int, dict[str, int], dict[str, int], int]:
        return current_rank().rank, current_size(), dict(context().actor_instance.rank), os.getpid()

    @endpoint
    def thread(self) -> str:
        return threading.current_thread().name

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def hold(self) -> None:
        """Until the gate is set, from beside."""
        self.gate.wait(WAIT_S)
        self.gate.clear()

    @endpoint
    def spin(self, seconds: float = 20) -> str:
        """Python code that goes on and on; notes when it was interrupted."""
        tick, deadline = threading.Event(), time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                tick.wait(0.001)
        except KeyboardInterrupt:
            self.seen.append("interrupted")
            raise
        return "done"

    @endpoint
    def hold_or_spin(self, hold: bool) -> str | None:
        return self.gate.wait(WAIT_S) and None if hold else self.spin()

    @endpoint
    def wait_for(self, other: Any) -> Any:
        return other.spin.call_one().get(WAIT_S)

    @endpoint
    def die(self, only: int | None = None) -> None:
        if only is None or current_rank().rank == only:
            os.kill(os.getpid(), 9)

    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def lock(self) -> Any:
        return threading.Lock()

    @endpoint(explicit_response_port=True)
    def thrice(self, port: Any, what: Any) -> None:
        for count in range(3):
            port.send((count, what))

    @endpoint(explicit_response_port=True)
    def later(self, port: Any) -> None:
        threading.Timer(0.01, port.send, [current_rank().rank]).start()

    @endpoint
    def total(self, other: Any) -> int:
        """Asks another mesh of actors, by a sync call."""
        return sum(other.add.call(0).get(WAIT_S).values())

    @endpoint
    def ask_self(self, me: Any) -> str:
        try:
            return str(me.add.call().get(WAIT_S))
        except RuntimeError as error:
            return str(error)

    def plain(self) -> None:
        """Not an endpoint."""


class Gate(Actor):
    """Async: its endpoints interleave."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.order: list[str] = []

    @endpoint
    async def wait(self, name: str) -> str:
        self.order.append(f"{name} waits")
        await asyncio.wait_for(self.open.wait(), 30)
        self.order.append(f"{name} goes")
        return name

    @endpoint
    async def spin(self) -> None:
        """Holds the loop up."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pass

    @endpoint
    async def let_go(self) -> list[str]:
        self.open.set()
        return self.order

    @endpoint
    async def ask(self, other: Any) -> list[int]:
        return list((await other.add.call(0)).values())

    @endpoint
    async def ask_wrongly(self, other: Any) -> str:
        try:
            other.sleep.call(0.05).get(WAIT_S)
        except RuntimeError as error:
            return str(error)
        return "it waited"

    @endpoint
    async def call_lost(self, other: Any) -> str:
        try:
            await other.sleep.call(60)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "answered"


class ParentActor(Actor):
    """Spawns actors of its own and hears of their failures."""

    def __init__(self, procs: Any, handle: bool) -> None:
        self.handle = handle
        self.failures: list[str] = []
        self.children = procs.spawn("staff", Counter)

    def __supervise__(self, failure: Any) -> bool:
        self.failures.append(failure.report())
        return self.handle

    @endpoint
    def ask(self) -> list[int]:
        return list(self.children.add.call().get(WAIT_S).values())

    @endpoint
    def lose(self, rank: int) -> None:
        self.children.die.broadcast(rank)

    @endpoint
    def news(self) -> list[str]:
        return self.failures


class CleanupActor(Actor):
    """Leaves a note when it ends."""

    def __init__(self, path: str) -> None:
        self.path = path

        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def spin(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pass

    def __cleanup__(self, exc: Exception | None) -> None:
        with open(f"{self.path}.{current_rank().rank}", "w") as file:
            file.write(f"{self.count}, {exc}")
        print("tidied up")


class AsyncCleanupActor(CleanupActor):
    @endpoint
    async def forever(self) -> None:
        await asyncio.sleep(20)


class SpawningActor(Actor):
    """Starts processes of its own, and a child by fork."""

    @endpoint
    def found(self) -> list[int]:
        from meshbook.actors.procs import this_host, this_proc

        procs = this_host().spawn_procs({"n": 2}, name="colony")
        answers = list(procs.spawn("settlers", Counter).add.call(3).get(WAIT_S).values())
        procs.stop().get(WAIT_S)
        beside = this_proc().spawn("beside", Counter, 1)
        return [*answers, beside.add.call_one().get(WAIT_S)]

    @endpoint
    def fork(self) -> tuple[int, int]:
        """This process and a child that outlives it, holding what it inherited, until it is killed."""
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return os.getpid(), pid

    @endpoint
    def big(self, size: int) -> bytes:
        return bytes(size)

    @endpoint
    def held(self) -> int:
        from meshbook.actors.runtime.transport import local_transport

        return local_transport().payloads.pool.used_bytes
