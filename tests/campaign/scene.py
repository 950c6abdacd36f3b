"""One case of a campaign as its fault and its work see it: the mesh, who is hit, and when it is over."""

from __future__ import annotations

import random
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from meshbook.controller.healed import Healed
from meshbook.controller.mesh import Mesh
from tests.campaign.surroundings import Surroundings
from tests.random_faults.harness import TookTooLong, WrongResult

# Seconds for a work to begin on every rank.
BEGIN_TIMEOUT_S = 40.0


@dataclass
class Scene:
    """What a case has, and where it stands.

    Attributes:
        number: of the case; names of what it makes contain it.
        seed: of the numbers that its work computes.
        victim: the rank that is hit.
        rng: of the fault's own choices; only its thread draws from it.
        folder: of the files by which ranks and campaign speak.
        committed: of a work that saves, the number of its last checkpoint that was committed.
        heals: of a work that heals the mesh by itself, what came of each.
        ended_well: set when a work that goes on after a fault was not cut off by one.
        over: set when the fault is done and whatever runs is to end by itself.
    """

    number: int
    seed: int
    victim: int
    rng: random.Random
    mesh: Mesh
    surroundings: Surroundings
    folder: Path
    committed: int = -1
    heals: list[Healed] = field(default_factory=list)
    ended_well: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def world_size(self) -> int:
        return self.mesh.size()

    @property
    def disk(self) -> Path:
        return self.surroundings.disk

    def pid(self, rank: int) -> int:
        pid = self.mesh.status().ranks[rank].pid
        if pid is None:
            raise WrongResult(f"the mesh does not know the process of rank {rank}")
        return pid

    def fork_server_pid(self) -> int | None:
        """The fork server that the victim was forked from; None if it was killed before."""
        return fork_server_of(self.pid(self.victim))

    def host_ranks(self) -> tuple[int, tuple[int, ...]]:
        """The process of the victim's host, on a mesh with several, and its ranks."""
        servers = {rank: psutil.Process(self.pid(rank)).ppid() for rank in self.mesh.ranks}
        own = servers[self.victim]
        found = tuple(rank for rank, server in servers.items() if server == own)
        index = sorted(set(servers.values()), key=list(servers.values()).index).index(own)
        supervisor = psutil.Process(self.mesh.session.info.supervisor_pid)
        for child in supervisor.children():
            command = child.cmdline()
            if "meshbook.host.main" in command and command[-3] == str(index):
                return child.pid, found
        raise WrongResult(f"there is no process of host {index} below the supervisor")

    def tell(self, rank: int, what: str) -> None:
        """Have the fault thread of a rank do something. Does not wait for it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(what.encode(), f"{self.surroundings.folder}/{self.mesh.name}/rank-{rank}")

    def begin(self, rank: int) -> None:
        """Mark that the work runs on a rank, as the ranks do themselves in works that are cells."""
        (self.folder / f"begun-{rank}").touch()

    def begin_all(self) -> None:
        for rank in self.mesh.ranks:
            self.begin(rank)

    def wait_begun(self) -> None:
        """Wait until the work runs on every rank. Raises TookTooLong if it does not."""
        deadline = time.monotonic() + BEGIN_TIMEOUT_S
        while not all((self.folder / f"begun-{rank}").exists() for rank in self.mesh.ranks):
            if time.monotonic() > deadline:
                raise TookTooLong(f"the work has not begun on every rank within {BEGIN_TIMEOUT_S:g} s")
            time.sleep(0.005)

    def end_work(self) -> None:
        """Have the work end by itself."""
        (self.folder / "over").touch()
        self.over.set()


def fork_server_of(pid: int) -> int | None:
    """Return the fork server that a rank's process was forked from; None if there is none any more."""
    parent = psutil.Process(pid).parent()
    return parent.pid if parent is not None and "meshbook.rank.forkserver" in parent.cmdline() else None
