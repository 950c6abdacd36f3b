"""The faults of the campaign, as a table: how each is done, whom it ends, and what must be said of it.

A fault is done on a thread of its own, at a random moment of the work. It is real: signals, limits of the system,
connections that are shut down, file systems that are full.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from meshbook.wire.process_control import kill_supervisor
from meshbook.wire.processes import forks_of
from tests.budget import WAIT_S
from tests.campaign.scene import Scene
from tests.campaign.surroundings import memory_group
from tests.connections import cut
from tests.host_processes import agent_of, standby_of
from tests.leaks import SHARED_MEMORY
from tests.random_faults.harness import TookTooLong

# Seconds that a full file system, or a limit, stays.
SHORTAGE_S = 0.4
FROZEN_S = (0.1, 4.0)
NUM_INTERRUPTS = 50
# Seconds in which a standby must have taken over: it takes tens of milliseconds on a machine that does nothing else.
TAKEOVER_S = 30.0


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        do: carries it out; returns when it is over. Raises nothing of its own accord.
        weight: how often it comes in a deck of faults.
        lost: whose processes end: no rank's, the victim's, "perhaps" the victim's, its host's, or those of the whole
            mesh.
        said: words of which the error that tells of it has at least one.
        signal: that ended the victim, as `RankLost.signal` names it.
        takes: what it takes from works for a while: a work that needs it may fail, and must then say so with `said`.
        stops: whether it is Stop: works may end with `CellInterrupted`.
        mesh: the kind of mesh that it needs.
    """

    name: str
    do: Callable[[Scene], None]
    weight: int
    lost: Literal["", "victim", "perhaps", "host", "mesh"] = ""
    said: tuple[str, ...] = ()
    signal: str | None = None
    takes: str = ""
    stops: bool = False
    mesh: Literal["ranks", "hosts", "kernel"] = "ranks"


# ---- processes that end


def _kill(scene: Scene) -> None:
    os.kill(scene.pid(scene.victim), signal.SIGKILL)


def _segfault(scene: Scene) -> None:
    if scene.rng.random() < 0.5:
        scene.tell(scene.victim, "segfault")  # while its main thread does something else
    else:
        os.kill(scene.pid(scene.victim), signal.SIGSEGV)


def _exit(scene: Scene) -> None:
    scene.tell(scene.victim, f"exit {exit_status(scene.seed)}")


def exit_status(seed: int) -> int:
    return seed % 4


def _preempt(scene: Scene) -> None:
    """Nothing was asked for in this case (`mesh.on_preemption`): the rank leaves in order, whatever it does."""
    os.kill(scene.pid(scene.victim), signal.SIGTERM)


def _run_out_of_memory(scene: Scene) -> None:
    """End the victim by the system, in a memory cgroup of its own, or where there is none at a limit."""
    process = psutil.Process(scene.pid(scene.victim))
    with memory_group(f"campaign-{os.getpid()}-{scene.number}", process.pid, 48) as is_limited:
        scene.tell(scene.victim, "memory" if is_limited else "memory 128")
        psutil.wait_procs([process], timeout=WAIT_S)


def _kill_host(scene: Scene) -> None:
    host, _ = scene.host_ranks()
    os.kill(host, signal.SIGKILL)


def _kill_host_agent(scene: Scene) -> None:
    keeper, _ = scene.host_ranks()
    agent = agent_of(keeper)
    if agent is None or standby_of(keeper) is None:
        return  # a standby is being forked
    os.kill(agent, signal.SIGKILL)


def _kill_fork_server(scene: Scene) -> None:
    if (server := scene.fork_server_pid()) is not None:
        os.kill(server, signal.SIGKILL)


def _kill_supervisor(scene: Scene) -> None:
    former = scene.mesh.session.info.supervisor_pid
    os.kill(former, signal.SIGKILL)
    deadline = time.monotonic() + TAKEOVER_S
    while scene.mesh.session.info.supervisor_pid == former:
        if time.monotonic() > deadline:
            raise TookTooLong(f"no standby has taken over within {TAKEOVER_S:g} s")
        time.sleep(0.005)


def _kill_standby(scene: Scene) -> None:
    for pid in forks_of(scene.mesh.session.info.supervisor_pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_supervisor_and_standby(scene: Scene) -> None:
    kill_supervisor(scene.mesh.session.info.supervisor_pid)


# ---- processes that stand still


def _freeze(scene: Scene) -> None:
    _stop_for_a_while([scene.pid(scene.victim)], scene.rng.uniform(*FROZEN_S))


def _cut_machine_off(scene: Scene) -> None:
    """Stop all processes of a host for a while."""
    host, ranks = scene.host_ranks()
    _stop_for_a_while([host, *map(scene.pid, ranks)], scene.rng.uniform(*FROZEN_S))


def _stop_for_a_while(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


# ---- connections that are lost


def _cut_gloo(scene: Scene) -> None:
    scene.tell(scene.victim, "cut-tcp")


def _cut_zmq(scene: Scene) -> None:
    name = scene.rng.choice(("work", "service", "store", "control"))
    if name == "control":
        cut("control.sock")  # of the client, which is this process
    else:
        scene.tell(scene.victim, f"cut-zmq {name}")
    time.sleep(scene.rng.uniform(0.0, 0.3))


# ---- what runs out


def _limit_memory(scene: Scene) -> None:
    """For a while the victim's process gets no memory from the system that it does not have already."""
    process = psutil.Process(scene.pid(scene.victim))
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    size = process.memory_info().vms
    resource.prlimit(process.pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    time.sleep(SHORTAGE_S)
    if process.is_running():
        try:
            resource.prlimit(process.pid, resource.RLIMIT_AS, infinite)
        except ProcessLookupError:
            return


def _fill_shared_memory(scene: Scene) -> None:
    _fill(scene, SHARED_MEMORY)


def _fill_disk(scene: Scene) -> None:
    _fill(scene, scene.disk)


def _fill(scene: Scene, folder: Path) -> None:
    with scene.surroundings.filled(folder) if scene.surroundings.can_fill else _no_files(scene):
        time.sleep(SHORTAGE_S)


@contextmanager
def _no_files(scene: Scene) -> Iterator[None]:
    """Within the block the ranks' files can hold a few bytes: for where no file system is ours to fill."""
    limits = []
    for rank in scene.mesh.ranks:
        pid = scene.pid(rank)
        limits.append((pid, resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))))
    try:
        yield
    finally:
        for pid, before in limits:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


# ---- Stop


def _interrupt_often(scene: Scene) -> None:
    for _ in range(NUM_INTERRUPTS):
        ranks = None if scene.rng.random() < 0.7 else scene.rng.randrange(scene.world_size)
        scene.mesh.interrupt(ranks)
        time.sleep(scene.rng.uniform(0.0, 0.06))


def _restart_kernel(scene: Scene) -> None:
    """The kernel's case does it itself (tests/campaign/kernels.py): it has the kernel's process."""


_NO_SPACE = ("No space left", "File too large", "Bus error", "enough shared memory", "exited unexpectedly", "EFBIG")
_BROKEN = ("onnection", "groups", "peer", "Broken pipe", "Socket")
_NO_MEMORY = (
    "MemoryError", "bad_alloc", "annot allocate memory", "can't allocate memory", "not enough memory",
    "start new thread", "SIGABRT", "SIGSEGV", "ENOMEM", "Errno 12",
)  # fmt: skip

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _kill, 2, "victim", ("SIGKILL",), "SIGKILL"),
        Fault("preempted", _preempt, 1, "victim", ("SIGTERM",)),
        Fault("segfault", _segfault, 2, "victim", ("SIGSEGV",), "SIGSEGV"),
        Fault("os._exit", _exit, 2, "victim", ("exited with status",)),
        Fault("out of memory", _run_out_of_memory, 2, "victim", ("memory",), "SIGKILL"),
        Fault("freeze", _freeze, 2),
        Fault("no new memory", _limit_memory, 1, "perhaps", _NO_MEMORY, takes="memory"),
        Fault("full /dev/shm", _fill_shared_memory, 2, said=_NO_SPACE, takes="shared memory"),
        Fault("full disk", _fill_disk, 2, said=_NO_SPACE, takes="disk"),
        Fault("lost gloo connections", _cut_gloo, 2, said=_BROKEN, takes="connections"),
        Fault("lost zmq connection", _cut_zmq, 2),
        Fault("interrupt storm", _interrupt_often, 2, stops=True),
        Fault("kernel restart", _restart_kernel, 2, mesh="kernel"),
        Fault("host killed", _kill_host, 1, "host", ("host",), mesh="hosts"),
        Fault("host agent killed", _kill_host_agent, 1, mesh="hosts"),
        Fault("machine cut off", _cut_machine_off, 1, mesh="hosts"),
        Fault("supervisor killed", _kill_supervisor, 1),
        Fault("standby killed", _kill_standby, 1),
        Fault("supervisor and standby killed", _kill_supervisor_and_standby, 1, "mesh", ("supervisor",)),
        Fault("fork server killed", _kill_fork_server, 1),
    )
}
