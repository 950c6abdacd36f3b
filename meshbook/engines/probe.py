"""Looks at machines before a mesh starts on them: what they have, how far away they are, how fast the way is."""

from __future__ import annotations

import os
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from meshbook.engines.addresses import Address, Machine
from meshbook.engines.ssh import SshConnection
from meshbook.errors import StartError
from meshbook.wire.messages import MachineFacts

_BANDWIDTH_BYTES = 8 << 20  # sent and received
_MEASURE_TIMEOUT_S = 20.0
_NUM_ROUND_TRIPS = 5


@dataclass(frozen=True)
class Probe:
    """What was found of one machine.

    Attributes:
        facts: None: it could not be asked, and `problem` says why and what to do.
        clock_ahead_s: of its clock, compared with this machine's.
        latency_s: there and back, through ssh. None: not measured.
        bytes_per_s: there and back at once, through ssh. None: not measured.
    """

    machine: Machine
    facts: MachineFacts | None = None
    problem: str = ""
    connect_s: float = 0.0
    clock_ahead_s: float = 0.0
    latency_s: float | None = None
    bytes_per_s: float | None = None


# One machine is measured after the other: they share this machine's way into the network, and its processors.
_measuring = threading.Lock()


def probe_machines(address: Address, *, measure: bool = False) -> list[Probe]:
    """Ask all machines at once. Blocks: for a second, or for up to 10 s if one cannot be reached.

    Args:
        measure: the connections too.
    """
    with ThreadPoolExecutor(max_workers=len(address.machines)) as threads:
        return list(threads.map(lambda machine: _probe(address, machine, measure), address.machines))


def _probe(address: Address, machine: Machine, measure: bool) -> Probe:
    connection = SshConnection(
        address, machine, ["-m", "meshbook.host.remote", "doctor", "0", "--facts-only"], None, ""
    )
    before = time.monotonic()
    try:
        hello = connection.open()
        connect_s, wall = time.monotonic() - before, time.time()
        assert hello.facts is not None
        latency_s = bytes_per_s = None
        if measure and connection.process is not None:
            with _measuring:
                latency_s = min(_echo(connection, 1) for _ in range(_NUM_ROUND_TRIPS))
                bytes_per_s = _BANDWIDTH_BYTES / _echo(connection, _BANDWIDTH_BYTES)
        return Probe(machine, hello.facts, "", connect_s, hello.facts.wall_time - wall, latency_s, bytes_per_s)
    except StartError as error:
        return Probe(machine, problem=str(error), connect_s=time.monotonic() - before)
    finally:
        connection.close()


def _echo(connection: SshConnection, nbytes: int) -> float:
    """Return the seconds that bytes take to the machine and back."""
    assert connection.process is not None
    stdin, stdout = connection.process.stdin, connection.process.stdout
    assert stdin is not None
    assert stdout is not None
    os.set_blocking(stdin.fileno(), False)
    piece = memoryview(bytes(min(nbytes, 1 << 18)))
    unsent, missing = nbytes, nbytes
    begun = time.monotonic()
    while missing:
        readable, writable, _ = select.select([stdout], [stdin] if unsent else [], [], 1.0)
        if writable:
            unsent -= os.write(stdin.fileno(), piece[: min(unsent, len(piece))])
        if readable:
            received = os.read(stdout.fileno(), 1 << 18)
            if not received:
                raise StartError(f"{connection.machine}: the connection ended while it was measured")
            missing -= len(received)
        if time.monotonic() - begun > _MEASURE_TIMEOUT_S:
            raise StartError(f"{connection.machine}: {nbytes:,} bytes took more than {_MEASURE_TIMEOUT_S:.0f} s")
    return time.monotonic() - begun
