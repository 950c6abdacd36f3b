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
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks import workbench
from benchmarks.actors import PEERS
from benchmarks.contestants import OURS, SPAWN, Calls, ask_all, end, promise_share, start_all
from benchmarks.report import Report
from meshbook.wire.process_control import die_with_parent

RANKS = 4
BARE, RELAYED = "bare ROUTER/DEALER", "ROUTER/DEALER through a relay"
LIMIT = 4.0  # times a bare round trip

# Bytes of the command that an empty call takes on Meshbook's own wire, so that bare sockets carry as many.
_COMMAND, _END = bytes(200), b"end"


@contextlib.contextmanager
def meshbook(ranks: int, folder: Path) -> Iterator[Calls]:
    from meshbook.controller.starting import create_mesh

    with create_mesh(ranks, orphan_ttl_s=workbench.ORPHAN_TTL_S) as mesh:
        yield {"call": lambda: mesh.execute(int), "cell": lambda: mesh.run("pass", echo=False)}


@contextlib.contextmanager
def ipyparallel(ranks: int, folder: Path) -> Iterator[Calls]:
    system = importlib.import_module("ipyparallel")
    with system.Cluster(n=ranks, profile_dir=str(folder / "ipyparallel"), log_level=40) as client:
        view = client[:]
        yield {"call": lambda: view.apply_sync(int), "cell": lambda: view.execute("pass", block=True)}


# ---------------------------------------------------------------------------------------------------------------------
# Bare sockets: a ROUTER, and a DEALER in each process. Nothing can be faster over zmq.


@contextlib.contextmanager
def sockets(ranks: int, folder: Path, processes_behind: int = 0) -> Iterator[Calls]:
    """An exchange sends a command to each process and waits until all have sent it back.

    Args:
        processes_behind: each process first makes an exchange with so many processes of its own.
    """
    import zmq

    address = f"ipc://{folder}/{os.getpid()}.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        processes = [SPAWN.Process(target=_echo, args=(address, folder, processes_behind)) for _ in range(ranks)]
        for process in processes:
            process.start()
        identities = [router.recv_multipart()[0] for _ in processes]

        def send(message: bytes) -> None:
            for identity in identities:
                router.send_multipart([identity, message])

        def exchange() -> None:
            send(_COMMAND)
            for _ in identities:
                router.recv_multipart()

        try:
            yield {"call": exchange}
        finally:
            send(_END)
            for process in processes:
                end(process)


def relayed_sockets(ranks: int, folder: Path) -> contextlib.AbstractContextManager[Calls]:
    """Through a process between, as a supervisor is: one message to it, `ranks` from it, one answer back."""
    return sockets(1, folder, processes_behind=ranks)


def _echo(address: str, folder: Path, processes_behind: int) -> None:
    import zmq

    die_with_parent()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, contextlib.ExitStack() as behind:
        calls = behind.enter_context(sockets(processes_behind, folder)) if processes_behind else {}
        dealer.connect(address)
        dealer.send(b"here")
        while (message := dealer.recv()) != _END:
            for call in calls.values():
                call()
            dealer.send(message)


SYSTEMS = {OURS: meshbook, BARE: sockets, RELAYED: relayed_sockets, **PEERS, "ipyparallel": ipyparallel}


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
