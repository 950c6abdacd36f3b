"""The processes of ranks and of hosts.

A host has three: the keeper, which whoever started the host sees, its agent, and the agent's standby. All run the same
command, and each is the parent of the next.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import psutil

from meshbook.controller.mesh import Mesh
from meshbook.wire.processes import forks_of
from tests.budget import when


def pid_of(mesh: Mesh, rank: int) -> int:
    pid = mesh.status().ranks[rank].pid
    assert pid is not None
    return pid


def _host_command(pid: int) -> list[str]:
    """Return the command of a host's process, from its module on; [] of any other process."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:  # it has ended
        return []
    return words[3:] if words[1:3] == ["-P", "-m"] and words[3].startswith("meshbook.host.") else []


def keepers_among(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that keep a host, by pid."""
    hosts = sorted(pid for pid in pids if _host_command(pid))
    return [pid for pid in hosts if psutil.Process(pid).ppid() not in hosts]


def keeper_of(mesh: str, host: int) -> int:
    """Return the keeper of a host of a mesh, which may be on a machine of the test bed."""

    def is_of_it(pid: int) -> bool:
        name, number = [*_host_command(pid)[1:3], "", ""][:2]  # or the mesh's folder; elsewhere the name is longer
        return name.rpartition("/")[2].startswith(mesh[:24]) and number == str(host)

    (keeper,) = keepers_among(filter(is_of_it, psutil.pids()))
    return keeper


def kill_agent(mesh: str, host: int) -> int:
    """Kill a host's agent, whose standby is to take its place; return its pid."""
    keeper = keeper_of(mesh, host)
    when(lambda: agent_of(keeper) is not None)
    agent = agent_of(keeper)
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    return agent


def agent_of(keeper: int) -> int | None:
    """Return a keeper's host agent; None for the moment in which a standby is about to take its place."""
    return next(iter(forks_of(keeper)), None)


def standby_of(keeper: int) -> int | None:
    agent = agent_of(keeper)
    return None if agent is None else next(iter(forks_of(agent)), None)


def agents_among(pids: Iterable[int]) -> set[int]:
    """Return the host agents among these processes."""
    return {agent for keeper in keepers_among(pids) if (agent := agent_of(keeper)) is not None}
