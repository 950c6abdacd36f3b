"""The interface of an engine, which only starts and ends hosts.

A host connects back to the supervisor by itself. Everything about ranks belongs to the host, so that a rank is the same
process on a laptop and under any launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshbook.wire.remote_start import SupervisorAddress


@dataclass(frozen=True)
class HostStart:
    """What a host needs to connect to its supervisor."""

    folder: Path  # of the mesh; the supervisor's sockets are in it
    mesh: str  # its name
    token: str
    identity: str  # of the host's connection
    torch: bool  # whether ranks will import torch
    lease_s: float  # seconds without a word from the supervisor after which one on another machine ends its ranks


@dataclass(frozen=True)
class HostProgress:
    """How far the start of a host has come."""

    machine: str  # its name
    stage: str  # what goes on, as in "gpu2: ssh connects"; "": the machine is there, and waits for the others
    seconds: int  # since when


class HostEngine(Protocol):
    """Starts hosts and reports their exit. All methods are called from the supervisor's loop and do not block.

    Attributes:
        name: what `create_mesh(engine=…)` takes.
        spans_machines: hosts are on other machines than the supervisor, so that their silence counts as their loss.
        dials_tcp: hosts connect to the supervisor by TCP, encrypted; else to the sockets in its folder, which are
            forwarded to them if need be.
        queue_state: what the launcher's queue says while the mesh waits in it; "" otherwise.
        ends_at: wall clock, when the launcher takes the machines away; None: not known, or never.
    """

    name: str
    spans_machines: bool
    dials_tcp: bool

    @property
    def queue_state(self) -> str: ...

    @property
    def ends_at(self) -> float | None: ...

    def runs_in_process(self, num_hosts: int) -> bool:
        """Whether the only host can run in the supervisor itself, which saves a process and a hop."""

    def launch(self, host: int, start: HostStart) -> None:
        """Start a host; one of the same number that is still known is given up. `pop_failed` says if it never came.

        Raises:
            StartError: it cannot be started; the message says what to do.
        """

    def progress(self) -> dict[int, HostProgress]:
        """Return how far hosts have come, as far as that can be said; of those that have connected it is not used."""

    def pop_failed(self) -> dict[int, str]:
        """Return the hosts that could not be started, as found since the last call: why, and what to do."""

    def pop_exited(self) -> dict[int, str]:
        """Return the hosts that have exited since the last call, and how."""

    def first_address(self) -> str | None:
        """Return the address of a machine of the mesh, once one is known, if its hosts connect by TCP."""

    def supervisor_listens(self, address: SupervisorAddress) -> None:
        """Tell hosts, which wait for it, where the supervisor listens: once, after `first_address`."""

    def take_over(self) -> None:
        """Go on in a standby of the supervisor that has launched the hosts, and has ended."""

    def close(self) -> None:
        """End all remaining hosts. Blocks for a second or so at most."""
