"""Where a mesh's machines are, and how its axes lie on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from meshbook.controller.config import Defaults
from meshbook.controller.hosts import busy_gpus
from meshbook.engines.addresses import Address, is_job_file
from meshbook.engines.probe import probe_machines
from meshbook.errors import MeshShapeError, StartError, UsageError
from meshbook.mesh_axes import MeshAxes

# Who is asked for GPUs, and how.
_ASKS_FOR_GPUS = {
    "slurm": ("Slurm", "slurm://…?gpus-per-node=8"),
    "ray": ("Ray", "ray://…?num_gpus=8"),
    "monarch": ("Monarch's SlurmJob", "monarch://slurm?gpus_per_node=8"),
}


@dataclass(frozen=True)
class Cluster:
    """Machines for a mesh.

    Attributes:
        on: where they are, as the engine takes it.
        engine: its name.
        num_hosts: how many of them are used.
        grid: the axes of the mesh.
    """

    on: str
    engine: str
    num_hosts: int
    grid: MeshAxes


def choose_machines(
    on: str, defaults: Defaults, *, nodes: int | None, gpus_per_node: int | None, **axes: Any
) -> Cluster:
    """Return the machines of a mesh, and its axes. Blocks if they must be asked how many ranks they have room for.

    Args:
        on: `ssh://gpu1,gpu2`, `slurm://partition`, `ray://auto`, `monarch://slurm`, or a name of meshbook.toml.
        nodes: how many of the machines; None: all, and one where a launcher chooses them.
        axes: as `MeshAxes.of` takes them; without any, axes "node" and "gpu".

    Raises:
        UsageError: `on` is no address, and no name of a cluster; or a launcher is to choose machines, and nothing
            says how many ranks each has room for.
        StartError: fewer machines than nodes, or one cannot be reached.
        MeshShapeError: the axes do not fit the machines.
    """
    on = resolve(on, defaults)
    address = Address.parse(on)
    num_hosts = (len(address.machines) or 1) if nodes is None else nodes
    if address.machines and num_hosts > len(address.machines):
        names = ", ".join(map(str, address.machines))
        raise StartError(
            f"{num_hosts} nodes are asked for, and {on.partition('?')[0]} names {len(address.machines)} ({names}); "
            f"name {num_hosts - len(address.machines)} more, or ask for --nodes {len(address.machines)}"
        )
    if address.head == "local" and num_hosts != 1:
        raise StartError(
            f"{num_hosts} nodes are asked for, and the Ray that ray://local starts is one node, this machine; leave "
            "--nodes out, or name a cluster: ray://auto, ray://head:6379"
        )
    if address.job == "local" and num_hosts != 1:
        raise StartError(
            f"{num_hosts} nodes are asked for, and monarch://local is one, this machine; leave --nodes out, or take "
            "monarch://process, which has as many as you say"
        )
    if any(value is not None for value in axes.values()):
        grid = MeshAxes.of(gpus_per_node=gpus_per_node, **axes)
    else:
        per_node = _ranks_per_machine(address, num_hosts) if gpus_per_node is None else gpus_per_node
        grid = MeshAxes.of(nodes=num_hosts, gpus_per_node=per_node)
    check_layout(grid, num_hosts)
    return Cluster(on, address.scheme, num_hosts, grid)


def resolve(on: str, defaults: Defaults) -> str:
    """Return the address of a cluster of meshbook.toml by its name; an address as it is, but for a file's path."""
    if is_job_file(on):
        return f"monarch:{Path(on.removeprefix('monarch:')).expanduser().absolute()}"
    if "://" in on:
        return on
    if on in defaults.clusters:
        cluster = dict(defaults.clusters[on])
        address = cluster.pop("on")
        return resolve(
            f"{address}{'&' if '?' in address else '?'}{urlencode(cluster)}" if cluster else address, defaults
        )
    known = ", ".join(sorted(defaults.clusters)) or "none"
    raise UsageError(
        f"{on!r} is no address of machines (ssh://gpu1,gpu2, slurm://gpu, ray://auto, monarch://slurm) and no cluster "
        f'of meshbook.toml (known: {known}); a cluster is written there like:\n[clusters.{on}]\non = "ssh://gpu1,gpu2"'
    )


def check_layout(grid: MeshAxes, num_hosts: int) -> None:
    """Raise MeshShapeError unless each machine has equally many ranks, and whole lines along the last axis."""
    per_machine, rest = divmod(grid.size, num_hosts)
    sizes = list(grid.axes.items())
    text = " * ".join(f"{name}={size}" for name, size in sizes)
    if rest or not per_machine:
        raise MeshShapeError(
            f"axes {text} are {grid.size} ranks, which {num_hosts} machines cannot share equally ({grid.size} / "
            f"{num_hosts} = {grid.size / num_hosts:.3g}); change an axis, or the number of nodes"
        )
    name, size = sizes[-1]
    if len(sizes) > 1 and per_machine % size:
        raise MeshShapeError(
            f"axes {text} on {num_hosts} machines are {grid.size} / {num_hosts} = {per_machine} ranks on each, and the "
            f"last axis, {name}={size}, is to stay within one: {per_machine} / {size} = {per_machine / size:.3g}; "
            f"make {name} a divisor of {per_machine}, or put another axis last"
        )


def _ranks_per_machine(address: Address, num_hosts: int) -> int:
    """Return one per GPU of the machine with the fewest; without GPUs, 2 to 4 by cores."""
    if not address.machines:
        if address.gpus_per_node is None:
            launcher, query = _ASKS_FOR_GPUS[address.scheme]
            raise UsageError(
                "how many ranks are to run on each node? Say it with --per-node 8 (gpus_per_node=8 in Python), or ask "
                f"{launcher} for GPUs, each of which gets a rank: {query}"
            )
        return address.gpus_per_node
    used = Address(address.scheme, address.machines[:num_hosts], address.python, address.allows_any_versions)
    found = []
    for probe in probe_machines(used):
        if (facts := probe.facts) is None:
            raise StartError(probe.problem)
        found.append(facts)
        if facts.gpus and all(gpu.busy_by for gpu in facts.gpus):
            raise StartError(
                f"{probe.machine}: others use all of its GPUs, {busy_gpus(facts)}; leave it out, or say how many ranks "
                "are to run on each machine (--per-node, with --device cpu)"
            )
    gpus = min(sum(not gpu.busy_by for gpu in facts.gpus) for facts in found)
    return gpus or min(4, max(2, min(facts.num_cpus for facts in found)))
