"""Systems that do the same for four processes, each behind the same two questions: an empty call, and an empty cell.

Every contestant lives in a process of its own, so that no other's threads, imports or event loop disturb it, and
measures one round when it is told to. Who is not installed is absent, and says so.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.workbench import ORPHAN_TTL_S
from meshbook.wire.process_control import die_with_parent

_SPAWN = multiprocessing.get_context("spawn")  # nothing is shared but what is sent

# Seconds that a system may take to come up, and to answer. Ray needs up to a minute on two busy cores.
_START_S = 300.0
_ROUND_S = 60.0
_RAY_STORE_BYTES = 300_000_000
_STOP_S = 30.0

# The questions that `calls` answers: ways to have every process do nothing.
Calls = dict[str, Callable[[], Any]]
System = Callable[[int, Path], contextlib.AbstractContextManager[Calls]]

# Bytes of the command that an empty call takes on Meshbook's own wire, so that bare sockets carry as many.
_COMMAND = bytes(200)


@contextlib.contextmanager
def meshbook(ranks: int, folder: Path) -> Iterator[Calls]:
    """`int` on every rank, by `mesh.execute`; the cell `pass`, by `mesh.run`."""
    from meshbook.controller.starting import create_mesh

    with create_mesh(ranks, orphan_ttl_s=ORPHAN_TTL_S) as mesh:
        yield {"call": lambda: mesh.execute(int), "cell": lambda: mesh.run("pass", echo=False)}


@contextlib.contextmanager
def sockets(ranks: int, folder: Path) -> Iterator[Calls]:
    """A ROUTER here, a DEALER in each process: one message out and one back. Nothing can be faster over zmq."""
    with _router(f"ipc://{folder}/bare.sock") as router, _echoes(router, ranks) as processes:

        def call() -> None:
            for process in processes:
                router.send_multipart([process, _COMMAND])
            for _ in processes:
                router.recv_multipart()

        yield {"call": call}


@contextlib.contextmanager
def relayed_sockets(ranks: int, folder: Path) -> Iterator[Calls]:
    """The same through a process between, as a supervisor is: one message to it, `ranks` from it, one answer back."""
    front = f"ipc://{folder}/front.sock"
    relay = _SPAWN.Process(target=_relay, args=(front, f"ipc://{folder}/back.sock", ranks))
    relay.start()
    try:
        import zmq

        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(front)
            dealer.send(b"ready?")
            dealer.recv()

            def call() -> None:
                dealer.send(_COMMAND)
                dealer.recv()

            try:
                yield {"call": call}
            finally:
                dealer.send(b"end")
    finally:
        _end(relay)


@contextlib.contextmanager
def monarch(ranks: int, folder: Path) -> Iterator[Calls]:
    """An endpoint of an actor in each of so many processes, called on all of them."""
    from monarch.actor import shutdown_context, this_host

    from benchmarks import monarch_actor

    processes = this_host().spawn_procs({"gpus": ranks})
    actors = processes.spawn("idle", monarch_actor.Idle)
    try:
        yield {
            "call": lambda: actors.nothing.call().get(),
            "cell": lambda: actors.cell.call("pass").get(),
        }
    finally:
        shutdown_context().get()


@contextlib.contextmanager
def ray_system(ranks: int, folder: Path) -> Iterator[Any]:
    """Ray with as little as actors need. It starts a worker for each CPU that it is told of, and so many at a time;
    actors ask for none."""
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",  # else it leaves a token in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_raylet_start_wait_time_s": f"{_START_S:.0f}",  # it gives up after 60 s, and two busy cores need as long
    }
    import ray as system

    system.init(
        num_cpus=min(ranks, os.cpu_count() or 1),
        object_store_memory=_RAY_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder / "ray"),
    )
    try:
        yield system
    finally:
        system.shutdown()


@contextlib.contextmanager
def ray(ranks: int, folder: Path) -> Iterator[Calls]:
    """A method of so many actors."""

    class Idle:
        def __init__(self) -> None:
            self.names: dict[str, Any] = {}

        def nothing(self) -> None: ...

        def cell(self, source: str) -> None:
            exec(source, self.names)

    with ray_system(ranks, folder) as system:
        actors = [system.remote(num_cpus=0)(Idle).remote() for _ in range(ranks)]
        yield {
            "call": lambda: system.get([actor.nothing.remote() for actor in actors]),
            "cell": lambda: system.get([actor.cell.remote("pass") for actor in actors]),
        }


@contextlib.contextmanager
def ipyparallel(ranks: int, folder: Path) -> Iterator[Calls]:
    """A function, and a cell, on so many engines by a direct view."""
    system = importlib.import_module("ipyparallel")
    with system.Cluster(n=ranks, profile_dir=str(folder / "ipyparallel"), log_level=40) as client:
        view = client[:]
        yield {
            "call": lambda: view.apply_sync(int),
            "cell": lambda: view.execute("pass", block=True),
        }


# By name: what starts it, and the module that must be installed for it.
SYSTEMS: dict[str, tuple[System, str]] = {
    "Meshbook": (meshbook, "meshbook"),
    "bare ROUTER/DEALER": (sockets, "zmq"),
    "ROUTER/DEALER through a relay": (relayed_sockets, "zmq"),
    "Monarch": (monarch, "monarch"),
    "Ray": (ray, "ray"),
    "ipyparallel": (ipyparallel, "ipyparallel"),
}


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(SYSTEMS[name][1]) is not None


class Contestant:
    """A system in its own process; both end with the `with`."""

    def __init__(self, name: str, ranks: int, folder: Path, *, start: System | None = None) -> None:
        """Start it and wait until it answers. Blocks.

        Args:
            start: what is asked, of a system of that name; by default an empty call and an empty cell.

        Raises:
            RuntimeError: it did not come up, and why.
        """
        self.name = name
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, start or SYSTEMS[name][0], ranks, folder))
        self._process.start()
        theirs.close()
        try:
            said = self._hear(_START_S)
            if isinstance(said, str):
                raise RuntimeError(f"{name} did not start: {said}")
        except BaseException:
            self.close()
            raise
        self.kinds: tuple[str, ...] = said

    def milliseconds(self, kind: str) -> float:
        """How long one round takes, by its own clock; or what the round itself gave as a float, if that is not it."""
        self._pipe.send(kind)
        said = self._hear(_ROUND_S)
        if isinstance(said, str):
            raise RuntimeError(f"{self.name}, {kind}: {said}")
        return float(said)

    def asker(self, kind: str) -> Callable[[], float]:
        return lambda: self.milliseconds(kind)

    def _hear(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"{self.name} said nothing for {timeout_s:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.name} has ended") from None

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pipe.close()  # it reads the end, and stops what it started
        _end(self._process)


def _serve(pipe: Connection, start: System, ranks: int, folder: Path) -> None:
    """A contestant's process."""
    work = folder / f"c{os.getpid()}"
    work.mkdir()
    try:
        with start(ranks, work) as calls:
            next(iter(calls.values()))()  # it answers; rounds that warm up the rest are the asker's to take
            pipe.send(tuple(calls))
            while True:
                call = calls[pipe.recv()]
                started = time.perf_counter()
                taken = call()
                pipe.send(taken if isinstance(taken, float) else 1e3 * (time.perf_counter() - started))
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------------------------------------------
# Bare sockets


@contextlib.contextmanager
def _router(address: str) -> Iterator[Any]:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        yield router


@contextlib.contextmanager
def _echoes(router: Any, ranks: int) -> Iterator[list[bytes]]:
    """So many processes that send back what they are sent; their names, once all have been heard from."""
    import zmq

    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    processes = [_SPAWN.Process(target=_echo, args=(address,)) for _ in range(ranks)]
    for process in processes:
        process.start()
    names = [router.recv_multipart()[0] for _ in processes]
    try:
        yield names
    finally:
        for name in names:
            router.send_multipart([name, b"end"])
        for process in processes:
            _end(process)


def _echo(address: str) -> None:
    import zmq

    die_with_parent()

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        dealer.send(b"here")
        while (message := dealer.recv()) != b"end":
            dealer.send(message)


def _relay(front: str, back: str, ranks: int) -> None:
    die_with_parent()
    with _router(front) as clients, _router(back) as router, _echoes(router, ranks) as processes:
        while True:
            client, message = clients.recv_multipart()
            if message == b"end":
                return
            for process in processes:
                router.send_multipart([process, message])
            for _ in processes:
                router.recv_multipart()
            clients.send_multipart([client, message])


def _end(process: Any) -> None:
    """Wait for a process to end, and help it after a while."""
    process.join(_STOP_S)
    if process.is_alive():
        process.terminate()
        process.join(_STOP_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
