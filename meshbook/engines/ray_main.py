"""The driver of a mesh's hosts on Ray: `python -m meshbook.engines.ray_main`, which the ray engine speaks to by lines.

Nothing else imports ray: that takes seconds, starts threads and blocks. The placement group, an actor for each host and
the connection to the cluster are this process's, and end with it, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshbook.engines import launched_child
from meshbook.engines.driver_main import POLL_S, ActorLost, DriverMain, serve
from meshbook.engines.driver_messages import (
    AllocateNodes,
    ClusterDescribed,
    DescribeCluster,
    DriverCommand,
    DriverLine,
    NodesAwaited,
    StartHost,
)

# Seconds for a connection to GCS: Ray itself tries for much longer, and does not say why it fails.
_CONNECT_TIMEOUT_S = 5.0
# Seconds that a node may be missing when a host is to be started again. Ray takes some 30 to notice that one is lost.
_REPLACEMENT_TIMEOUT_S = 15.0


class RayActor:
    """An actor with a `LaunchedChild`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self, python: str | None, words: tuple[str, ...], environment: dict[str, str]) -> str:
        hostname: str = await self._actor.start.remote(python, words, environment)
        return hostname

    async def next_event(self) -> tuple[str, Any]:
        event: tuple[str, Any] = await self._actor.next_event.remote()
        return event

    def write(self, data: bytes) -> None:
        self._actor.write.remote(data)

    def close_input(self) -> None:
        self._actor.close_input.remote()

    def kill(self) -> None:
        ray.kill(self._actor)


class RayMain(DriverMain):
    """Does what the engine asks for, on Ray."""

    lost_errors = (ray.exceptions.RayError,)

    def __init__(self, report: Callable[[DriverLine], None], commands: asyncio.Queue[DriverCommand | None]) -> None:
        super().__init__(report, commands)
        self._num_gpus = 0.0  # of each node
        self._group: PlacementGroup | None = None
        self._files = contextlib.ExitStack()  # of a Ray of ours

    async def allocate(self, first: DriverCommand) -> str | None:
        if not isinstance(first, AllocateNodes | DescribeCluster):
            return None
        temp = ""
        if first.cluster == "local":  # a short path, for its sockets
            temp = self._files.enter_context(tempfile.TemporaryDirectory(prefix="mbray", dir="/tmp"))
        connecting = asyncio.create_task(asyncio.to_thread(_connect, first.cluster, temp))
        what = "start on this machine" if first.cluster == "local" else f"let us in ({first.cluster})"
        if not await self.wait_for(connecting, lambda: f"Ray: waiting for it to {what}"):
            self._files.close()
            os._exit(0)  # Ray cannot be stopped meanwhile, and ends what it has started with this process
        connecting.result()
        if isinstance(first, DescribeCluster):
            self.report(_describe_cluster())
            return None
        if not await self._take_nodes(first):
            return None
        address: str = ray.util.get_node_ip_address()
        return address

    async def leave(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
        self._files.close()

    async def _take_nodes(self, wanted: AllocateNodes) -> bool:
        """Wait for nodes; return whether they are there, else the mesh has ended."""
        has_gpus = any(node["Resources"].get("GPU") for node in _live_nodes())
        self._num_gpus = wanted.num_gpus if wanted.num_gpus is not None else wanted.gpus_if_any if has_gpus else 0
        asked_for = {"CPU": wanted.num_cpus, "GPU": self._num_gpus}
        bundle = {name: number for name, number in asked_for.items() if number}
        self._group = placement_group([bundle] * wanted.num_nodes, strategy="STRICT_SPREAD")
        shown: str | None = None
        while not await asyncio.to_thread(self._group.wait, POLL_S):
            if self.has_ended():
                return False
            if shown is None:  # nodes that are free are taken in a moment
                shown = ""
            elif (state := _describe_wait(wanted.num_nodes, bundle)) != shown:
                shown = state
                self.report(NodesAwaited(state))
        return True

    async def run_host(self, start: StartHost) -> None:
        try:
            await super().run_host(start)
        except ray.exceptions.RayActorError as error:
            if "never ran" not in str(error):
                raise
            await super().run_host(start)  # its node had ended before, and Ray has only noticed now

    async def new_actor(self, start: StartHost) -> RayActor:
        assert self._group is not None
        if not await asyncio.to_thread(self._group.wait, _REPLACEMENT_TIMEOUT_S):
            raise ActorLost("Ray has no other node for the one that it has lost")
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=start.node)
        # Cores are not taken again: the actor of a host that is given up may still be ending.
        options = {"num_cpus": 0, "num_gpus": self._num_gpus, "max_restarts": 0, "max_concurrency": 2}
        actor = ray.remote(launched_child.LaunchedChild).options(**options, scheduling_strategy=strategy).remote()
        return RayActor(actor)


def _connect(cluster: str, temp: str) -> None:
    """Connect to a cluster, or start one. Blocks for some seconds.

    Args:
        temp: the folder for the files of one that is started.
    """
    if cluster == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it is Meshbook's, not one that the user set up
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))  # else Ray leaves one in the home folder
        ray.init("local", include_dashboard=False, _temp_dir=temp, log_to_driver=False, logging_level="ERROR")
        return
    if cluster != "auto":
        host, _, port = cluster.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"{cluster} cannot be reached: {error.strerror or error}") from None
    ray.init(cluster, log_to_driver=False, logging_level="ERROR")


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _describe_cluster() -> ClusterDescribed:
    rows = [
        (str(node["NodeManagerHostname"]), str(node["NodeManagerAddress"]),
         float(node["Resources"].get("CPU", 0)), float(node["Resources"].get("GPU", 0)))
        for node in _live_nodes()
    ]  # fmt: skip
    return ClusterDescribed(ray.__version__, platform.python_version(), tuple(sorted(rows)))


def _describe_wait(num_nodes: int, bundle: dict[str, float]) -> str:
    """Return what a placement group waits for: "Ray: waiting for 2 nodes with 8 GPUs each; the cluster has 1"."""
    have = [node["Resources"] for node in _live_nodes()]
    large = sum(all(node.get(name, 0) >= number for name, number in bundle.items()) for node in have)
    each = " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for name, number in reversed(bundle.items()))
    what = f"{num_nodes} nodes with {each} each" if num_nodes > 1 else f"a node with {each}"
    if large < num_nodes:
        return f"Ray: waiting for {what}; the cluster has {large or 'none'}"
    return f"Ray: waiting for {what}; the cluster has {large}, and too few of them are free"


if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(launched_child)
    serve(RayMain)
