"""A mesh's own processes die at random moments of random work: what must go on without them does, and nothing is lost.

Each round begins a work and, at a moment that the seed chooses, kills the supervisor, its standby or the fork server,
or stops the supervisor for a while, alone or one after the other; with hosts that are processes of their own, also a
host agent or its standby. The work must come to what it comes to without: each
line once, each value whole. Then the next cell must run on all ranks, within 5 s and with their variables. The
supervisor's log must not say that a standby had diverged. Ranks are on one host, or on two that are processes of their
own.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellInterrupted
from meshbook.wire.keys import runtime_folder
from meshbook.wire.processes import forks_of
from tests.actors.example_actors import Counter
from tests.budget import WAIT_S, when
from tests.campaign.scene import fork_server_of
from tests.host_processes import agent_of, keeper_of, standby_of

RANKS = 2
_NEXT_CELL_S = 5.0
_TIMEOUT_S = WAIT_S


class Killer:
    """Kills at random moments while a work runs, on a thread of its own."""

    def __init__(self, mesh: Mesh, rng: random.Random) -> None:
        self._mesh, self._rng = mesh, rng
        self._rank_0 = mesh.status().ranks[0].pid
        self._keepers = [keeper_of(mesh.name, host) for host in range(len(mesh.hosts()))] if mesh.hosts()[1:] else []
        self.done: list[str] = []
        self._thread = threading.Thread(target=self._kill)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _kill(self) -> None:
        firsts = ["supervisor", "supervisor", "standby", "fork server", "stopped supervisor"]
        seconds = [None, None, "supervisor", "fork server"]
        if self._keepers:
            firsts += ["host agent", "host agent", "host agent", "host standby", "stopped host agent"]
            seconds += ["host agent", "host agent"]
        first, second = self._rng.choice(firsts), self._rng.choice(seconds)
        for victim in [first] if second is None else [first, second]:
            pause = self._rng.choice([0.0, 0.02, 0.1, 0.4, 2.0]) * self._rng.random()
            time.sleep(pause)
            supervisor = self._mesh.session.info.supervisor_pid
            if victim.endswith(("host agent", "host standby")):
                self._hit_host(victim, self._rng.choice(self._keepers))
                self.done.append(f"{victim} after {pause:.3f} s")
                continue
            hit = self._pids(victim, supervisor)
            for pid in hit:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if victim == "stopped supervisor" else signal.SIGKILL)
            self.done.append(f"{victim} after {pause:.3f} s")
            if victim == "stopped supervisor":
                time.sleep(self._rng.random())
                os.kill(supervisor, signal.SIGCONT)
            elif victim == "standby":
                when(lambda hit=hit, of=supervisor: set(forks_of(of)) - set(hit), "that there is another")  # type: ignore[misc]
            elif victim == "supervisor":
                when(
                    lambda former=supervisor: self._mesh.session.info.supervisor_pid != former,  # type: ignore[misc]
                    "that a standby takes over",
                    within_s=_NEXT_CELL_S,
                )

    def _hit_host(self, victim: str, keeper: int) -> None:
        """Kill a host's agent or its standby, perhaps after the agent has stood still; wait until there are both."""
        agent, standby = agent_of(keeper), standby_of(keeper)
        assert agent is not None
        if victim == "stopped host agent":
            os.kill(agent, signal.SIGSTOP)
            time.sleep(self._rng.random())
        hit = standby if victim == "host standby" else agent
        if hit is not None:
            os.kill(hit, signal.SIGKILL)
        when(
            lambda: hit not in (agent_of(keeper), standby_of(keeper)) and standby_of(keeper) is not None,
            "that a host's standby takes over",
            within_s=_NEXT_CELL_S,
        )

    def _pids(self, victim: str, supervisor: int) -> list[int]:
        match victim:
            case "standby":
                return forks_of(supervisor)
            case "fork server":  # of rank 0's host; killed once, there may be none
                server = None if self._rank_0 is None else fork_server_of(self._rank_0)
                return [] if server is None else [server]
        return [supervisor]


# ---- works


def _idle(mesh: Mesh, folder: Path) -> None:
    time.sleep(0.1)


def _cells(mesh: Mesh, folder: Path) -> None:
    for number in range(60):
        assert [int(value) for value in mesh.run(f"rank + {number}", echo=False).values.values()] == [
            number + rank for rank in range(RANKS)
        ]


def _prints(mesh: Mesh, folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        source = "import time\nfor number in range(300):\n    print('line', number)\n    time.sleep(0.001)"
        mesh.run(source, ranks=(RANKS - 1,))  # of one rank: lines of ranks that are not in step are shown in pairs
    numbers = [line.split()[-1] for line in shown.getvalue().splitlines() if "line" in line]
    assert numbers == [str(number) for number in range(300)], numbers


def _collectives(mesh: Mesh, folder: Path) -> None:
    source = "total = torch.zeros(1)\nfor number in range(300):\n    dist.all_reduce(total.fill_(number))\nint(total)"
    assert mesh.run(source, echo=False).values.same() == 299 * RANKS


def _values(mesh: Mesh, folder: Path) -> None:
    for number in range(3):
        values = mesh.run(f"torch.full((16 << 20,), rank + {number}.0)", echo=False).values
        for rank in range(RANKS):
            value = values[rank]
            assert value.shape == (16 << 20,)
            assert bool((value == rank + number).all())


def _stop(mesh: Mesh, folder: Path) -> None:
    running = mesh.run("dist.all_reduce(torch.zeros(1)) if rank == 0 else __import__('time').sleep(60)", wait=False)
    time.sleep(0.2)
    mesh.interrupt()
    try:
        running.result(_TIMEOUT_S)
    except CellInterrupted:
        return
    raise AssertionError("a stopped cell has not ended as one")


def _heal(mesh: Mesh, folder: Path) -> None:
    pid = mesh.status().ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    when(lambda: 1 in mesh.session.lost, within_s=_NEXT_CELL_S)
    mesh.heal()


def _looks(mesh: Mesh, folder: Path) -> None:
    running = mesh.run("dist.all_reduce(torch.zeros(1)) if rank == 0 else __import__('time').sleep(60)", wait=False)
    for _ in range(5):
        assert mesh.why().text
        assert mesh.stacks().text
    mesh.interrupt()
    with contextlib.suppress(CellInterrupted):
        running.result(_TIMEOUT_S)


def _resize(mesh: Mesh, folder: Path) -> None:
    mesh.resize(dp=RANKS + 1)
    mesh.resize(dp=RANKS)


def _tensors(mesh: Mesh, folder: Path) -> None:
    plain = torch.arange(16.0).reshape(4, 4)
    there = meshbook.distribute(plain, mesh, sharding_spec=["dp", None])
    for turn in range(60):
        there, plain = (there * 3 + turn) % 97, (plain * 3 + turn) % 97
        if turn % 10 == 0:
            assert torch.equal(there.full_tensor(), plain)
    assert torch.equal(there.full_tensor(), plain)


def _actors(mesh: Mesh, folder: Path) -> None:
    counters = mesh.spawn("counters", Counter, 0)
    for turn in range(20):
        assert list(counters.add.call().get(_TIMEOUT_S).values()) == [turn + 1] * RANKS
    counters.stop().get(_TIMEOUT_S)


def _checkpoint(mesh: Mesh, folder: Path) -> None:
    mesh.run("state = torch.full((1 << 20,), 7.0)", echo=False)
    mesh.checkpoint(folder, "state").result(_TIMEOUT_S)
    mesh.run("state.zero_()", echo=False)
    mesh.restore(folder)
    assert mesh.run("float(state.sum())", echo=False).values.same() == float(7 << 20)


WORKS = {
    work.__name__.strip("_"): work
    for work in (
        _idle,
        _cells,
        _prints,
        _collectives,
        _values,
        _stop,
        _heal,
        _looks,
        _resize,
        _tensors,
        _actors,
        _checkpoint,
    )
}


# ---- rounds


def start(num_hosts: int) -> Mesh:
    mesh = create_mesh({"dp": RANKS}, num_hosts=num_hosts)
    mesh.run("kept = rank", setup=True, echo=False)
    return mesh


def run_round(mesh: Mesh, seed: int, folder: Path) -> str:
    """Run a work that the seed chooses, with a kill. Return what was done; raise on what is wrong."""
    rng = random.Random(seed)
    chosen = rng.choice(sorted(WORKS))
    killer = Killer(mesh, rng)
    began = time.monotonic()
    try:
        with killer:
            WORKS[chosen](mesh, folder)
        ended = time.monotonic()
        kept = mesh.run("kept", echo=False).values
        assert [int(value) for value in kept.values()] == list(range(RANKS)), kept
        seconds = time.monotonic() - ended
        assert seconds < _NEXT_CELL_S, f"the next cell took {seconds:.1f} s"
        log = (runtime_folder() / mesh.name / "supervisor.log").read_text()
        assert "defect" not in log, log
    except BaseException as error:
        error.add_note(f"seed {seed}, {chosen}: {'; '.join(killer.done)}")
        raise
    return f"seed {seed}, {chosen}, {ended - began:.1f} s, next cell {seconds:.2f} s: {'; '.join(killer.done)}"
