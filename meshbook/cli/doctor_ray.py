"""`meshbook doctor --on ray://…`: whether a mesh could start on a Ray cluster. Nothing is started there."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from meshbook.cli.doctor import CheckResult
from meshbook.engines.addresses import Address
from meshbook.engines.driver_messages import ClusterDescribed, DescribeCluster
from meshbook.engines.ray_driver import RayDriver
from meshbook.errors import StartError


def check_ray(address: Address) -> Iterator[CheckResult]:
    """Look at Ray here, and at the nodes of the cluster. Blocks for some seconds."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        yield CheckResult("missing", "ray", "is not installed here", "pip install ray==…, the cluster's version")
        return
    if address.head == "local":
        yield CheckResult("ok", "ray", f"{version}; ray://local starts one for the mesh, on this machine")
        return
    try:
        cluster = RayDriver.ask(DescribeCluster(address.head))
    except StartError as error:
        what, _, remedy = str(error).partition("; ")
        yield CheckResult("missing", "ray", what, remedy)
        return
    assert isinstance(cluster, ClusterDescribed)
    yield CheckResult("ok", "ray", f"{cluster.version} with Python {cluster.python}, a cluster of {len(cluster.nodes)}")
    for name, at, cpus, gpus in cluster.nodes:
        yield CheckResult("ok", f"node {name}", f"at {at}, {cpus:g} CPUs, {gpus:g} GPUs")
    wanted = {name: float(value) for name, value in address.options}
    if not any(
        cpus >= wanted.get("num_cpus", 1) and gpus >= wanted.get("num_gpus", 0) for _, _, cpus, gpus in cluster.nodes
    ):
        asked_for = " and ".join(f"{name}={value:g}" for name, value in (wanted or {"num_cpus": 1.0}).items())
        yield CheckResult("poor", "nodes", f"none has {asked_for}", "ask for less, unless the cluster grows by itself")
