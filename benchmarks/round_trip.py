"""An empty call and an empty cell on four processes, without a notebook: Meshbook, bare sockets, peers, in turns.

`mesh.execute(int)` pickles the call, goes through the supervisor to four ranks and comes back as one folded answer. The
first yardstick is a ROUTER that exchanges as many bytes with four processes directly; the second has a process between,
as every system has whose ranks outlive its client. Cells run in different ways: Meshbook's in an IPython shell on each
rank, ipyparallel's in an engine's, Monarch's and Ray's by `exec` in an actor, which gives neither output nor a value.

    python -m benchmarks.round_trip [--quick]
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import workbench
from benchmarks.contestants import OURS, SPAWN, Calls, ask_all, end, promise_share, ray_system, start_all
from benchmarks.report import Report
from meshbook.wire.process_control import die_with_parent

RANKS = 4
BARE, RELAYED = "bare ROUTER/DEALER", "ROUTER/DEALER through a relay"
LIMIT = 4.0  # times a bare round trip

# Bytes of the command that an empty call takes on Meshbook's own wire, so that bare sockets carry as many.
_COMMAND = bytes(200)


@contextlib.contextmanager
def meshbook(ranks: int, folder: Path) -> Iterator[Calls]:
    from meshbook.controller.starting import create_mesh

    with create_mesh(ranks, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        yield {"call": lambda: mesh.execute(int), "cell": lambda: mesh.run("pass", echo=False)}


@contextlib.contextmanager
def monarch(ranks: int, folder: Path) -> Iterator[Calls]:
    from monarch.actor import shutdown_context, this_host

    from benchmarks import monarch_actor

    actors = this_host().spawn_procs({"gpus": ranks}).spawn("idle", monarch_actor.Idle)
    try:
        yield {"call": lambda: actors.nothing.call().get(), "cell": lambda: actors.cell.call("pass").get()}
    finally:
        shutdown_context().get()


@contextlib.contextmanager
def ray(ranks: int, folder: Path) -> Iterator[Calls]:
    class Idle:
        def nothing(self) -> None: ...

        def cell(self, source: str) -> None:
            exec(source, vars(self))

    with ray_system(ranks, folder) as system:
        actors = [system.remote(num_cpus=0)(Idle).remote() for _ in range(ranks)]
        yield {
            "call": lambda: system.get([actor.nothing.remote() for actor in actors]),
            "cell": lambda: system.get([actor.cell.remote("pass") for actor in actors]),
        }


@contextlib.contextmanager
def ipyparallel(ranks: int, folder: Path) -> Iterator[Calls]:
    system = importlib.import_module("ipyparallel")
    with system.Cluster(n=ranks, profile_dir=str(folder / "ipyparallel"), log_level=40) as client:
        view = client[:]
        yield {"call": lambda: view.apply_sync(int), "cell": lambda: view.execute("pass", block=True)}


# ---------------------------------------------------------------------------------------------------------------------
# Bare sockets: a ROUTER, and a DEALER in each process. Nothing can be faster over zmq.


@contextlib.contextmanager
def sockets(ranks: int, folder: Path) -> Iterator[Calls]:
    with _router(f"ipc://{folder}/bare.sock") as router, _echoes(router, ranks) as processes:
        yield {"call": lambda: _exchange(router, processes, _COMMAND)}


@contextlib.contextmanager
def relayed_sockets(ranks: int, folder: Path) -> Iterator[Calls]:
    """Through a process between, as a supervisor is: one message to it, `ranks` from it, one answer back."""
    import zmq

    front = f"ipc://{folder}/front.sock"
    relay = SPAWN.Process(target=_relay, args=(front, f"ipc://{folder}/back.sock", ranks))
    relay.start()
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(front)

            def call() -> None:
                dealer.send(_COMMAND)
                dealer.recv()

            try:
                yield {"call": call}
            finally:
                dealer.send(b"end")
    finally:
        end(relay)


@contextlib.contextmanager
def _router(address: str) -> Iterator[Any]:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        yield router


def _exchange(router: Any, processes: list[bytes], message: bytes) -> None:
    for process in processes:
        router.send_multipart([process, message])
    for _ in processes:
        router.recv_multipart()


@contextlib.contextmanager
def _echoes(router: Any, ranks: int) -> Iterator[list[bytes]]:
    """So many processes that send back what they are sent; their identities, once each has sent its first message."""
    import zmq

    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    processes = [SPAWN.Process(target=_echo, args=(address,)) for _ in range(ranks)]
    for process in processes:
        process.start()
    identities = [router.recv_multipart()[0] for _ in processes]
    try:
        yield identities
    finally:
        for identity in identities:
            router.send_multipart([identity, b"end"])
        for process in processes:
            end(process)


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
        while (received := clients.recv_multipart())[1] != b"end":
            _exchange(router, processes, received[1])
            clients.send_multipart(received)


SYSTEMS = {
    OURS: meshbook, BARE: sockets, RELAYED: relayed_sockets, "Monarch": monarch, "Ray": ray, "ipyparallel": ipyparallel,
}  # fmt: skip


def measure(quick: bool, folder: Path) -> Report:
    report = Report("round_trip", f"{RANKS} processes, without a notebook")
    words = f"an empty call to {RANKS} processes"
    with contextlib.ExitStack() as running:
        started = start_all(report, SYSTEMS, RANKS, folder, running)
        ask_all(report, started, "call", words, 20 if quick else 500)
        ask_all(report, started, "cell", "the cell `pass`", 20 if quick else 300)
    bare, relayed = report.row(f"{words}: {BARE}").median, report.row(f"{words}: {RELAYED}").median
    ours = report.row(f"{words}: {OURS}").median
    report.promise(f"{words}, in bare round trips", ours / bare, LIMIT, "x")
    report.note(f"{ours / relayed:.2f} round trips through a relay")
    promise_share(report, words, {"Monarch": 1.0}, started)
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
