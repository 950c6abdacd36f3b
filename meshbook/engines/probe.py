"""Looks at machines before a mesh starts on them: what they have, how far away they are, how fast the way is."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from meshbook.engines.addresses import Address, Machine
from meshbook.engines.ssh import SshConnection
from meshbook.errors import StartError
from meshbook.wire.messages import MachineFacts
from meshbook.wire.remote_start import TryWays, WaysTried

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
        no_way_to: other machines to which it could not connect, and why.
    """

    machine: Machine
    facts: MachineFacts | None = None
    problem: str = ""
    connect_s: float = 0.0
    clock_ahead_s: float = 0.0
    latency_s: float | None = None
    bytes_per_s: float | None = None
    no_way_to: Mapping[str, str] = field(default_factory=dict)


def probe_machines(address: Address, *, measure: bool = False) -> list[Probe]:
    """Ask all machines at once. Blocks: for a second, or for up to 10 s if one cannot be reached.

    Args:
        measure: the connections too, and the ways from each machine to the others.
    """
    looks = [_Look(address, machine) for machine in address.machines]
    try:
        with ThreadPoolExecutor(max_workers=len(looks)) as threads:
            list(threads.map(_Look.open, looks))
            if measure:
                list(threads.map(lambda look: look.try_ways([one for one in looks if one is not look]), looks))
        if measure:
            for look in looks:
                look.measure()
        return [look.found for look in looks]
    finally:
        for look in looks:
            look.connection.close()


class _Look:
    """One machine while it is looked at.

    Attributes:
        found: so far. What fails becomes its problem, and ends the look.
    """

    def __init__(self, address: Address, machine: Machine) -> None:
        module = ["-m", "meshbook.host.remote", "doctor", "0", "--facts-only"]
        self.connection = SshConnection(address, machine, module, None, "")
        self.found = Probe(machine)
        self.place = ("", 0)  # where others try the way to it

    def open(self) -> None:
        """Connect, and hear what the machine says of itself. Blocks."""
        before = time.monotonic()
        try:
            hello = self.connection.open()
        except StartError as error:
            self.found = replace(self.found, problem=str(error), connect_s=time.monotonic() - before)
            return
        assert hello.facts is not None
        ahead_s = hello.facts.wall_time - time.time()
        self.place = (hello.facts.address, hello.port)
        self.found = replace(self.found, facts=hello.facts, connect_s=time.monotonic() - before, clock_ahead_s=ahead_s)

    def try_ways(self, others: list[_Look]) -> None:
        """Have the machine connect to others. Blocks."""
        others = [other for other in others if other.place[1]]
        if self.found.facts is None:
            return
        try:
            places = tuple(other.place for other in others)
            line = self.connection.ask(msgspec.json.encode(TryWays(places)), _MEASURE_TIMEOUT_S)
            problems = msgspec.json.decode(line, type=WaysTried).problems
        except (StartError, msgspec.MsgspecError):
            self._fail("ended while the ways to others were tried")
            return
        named = zip(others, problems, strict=True)
        self.found = replace(self.found, no_way_to={str(other.found.machine): why for other, why in named if why})

    def measure(self) -> None:
        """Measure the connection. Blocks. Machines share this one's way into the network, so one after the other."""
        if self.found.facts is None:
            return
        try:
            latency_s = min(_echo(self.connection, 1) for _ in range(_NUM_ROUND_TRIPS))
            bytes_per_s = _BANDWIDTH_BYTES / _echo(self.connection, _BANDWIDTH_BYTES)
        except (StartError, OSError):
            self._fail("ended while it was measured")
        else:
            self.found = replace(self.found, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def _fail(self, what: str) -> None:
        self.found = replace(self.found, facts=None, problem=f"{self.found.machine}: the connection {what}")


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
