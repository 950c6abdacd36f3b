"""What the ray engine and its driver process say to each other, in lines of JSON. Neither torch nor ray is needed here.

Commands are read on the driver's standard input, whose end means that the mesh has ended; reports are written to its
standard output.
"""

from __future__ import annotations

from msgspec import Struct


class RayLine(Struct, frozen=True, tag=True):
    """A line. A field `launch` is the number of one start of one host; a host that is started again has another."""


# ---- to the driver


class AllocateNodes(RayLine, frozen=True):
    """Connect to a cluster, and wait until it has nodes for the hosts. The first command; the only one of its kind."""

    cluster: str  # "auto", "local", or GCS's "head:6379"
    num_nodes: int
    num_cpus: float  # of each node
    num_gpus: float | None  # of each node; None: `gpus_if_any` if a node of the cluster has a GPU, else none
    gpus_if_any: int = 0


class DescribeCluster(RayLine, frozen=True):
    """Connect to a cluster, and say what it has. In place of AllocateNodes."""

    cluster: str


class StartHost(RayLine, frozen=True):
    """Start a process on a node: an actor does."""

    launch: int
    bundle: int  # of the placement group: which node
    python: str | None  # None: that of Ray's workers there
    words: tuple[str, ...]  # that follow it
    environment: dict[str, str]  # in addition to that of Ray's workers


class WriteInput(RayLine, frozen=True):
    """Write to its standard input."""

    launch: int
    text: str


class CloseInput(RayLine, frozen=True):
    """Close its standard input, at which it ends in order."""

    launch: int


class KillHost(RayLine, frozen=True):
    """Kill the actor, and with it what it has started."""

    launch: int


# ---- from the driver


class ClusterFailed(RayLine, frozen=True):
    """There is no cluster, or no nodes can be had of it."""

    words: str  # Ray's own


class ClusterDescribed(RayLine, frozen=True):
    """What DescribeCluster has found."""

    version: str  # of Ray
    python: str
    nodes: tuple[tuple[str, str, float, float], ...]  # hostname, address, CPUs, GPUs of each that lives


class NodesAwaited(RayLine, frozen=True):
    """The placement group is pending."""

    state: str  # "Ray: waiting for 2 nodes with 8 GPUs each; the cluster has 1"


class NodesAllocated(RayLine, frozen=True):
    """There is a node for each host."""

    address: str  # of the driver's own machine, as Ray knows it


class HostStarted(RayLine, frozen=True):
    launch: int
    node: str  # its hostname


class HostWrote(RayLine, frozen=True):
    """The first line of its standard output."""

    launch: int
    line: str


class HostLogged(RayLine, frozen=True):
    """A piece of what it has written to standard error."""

    launch: int
    text: str


class HostEnded(RayLine, frozen=True):
    launch: int
    code: int  # negative: a signal


class HostActorLost(RayLine, frozen=True):
    """Its actor could not be started, or has ended; its host ends then too, if the node lives."""

    launch: int
    words: str  # Ray's own


RayCommand = AllocateNodes | DescribeCluster | StartHost | WriteInput | CloseInput | KillHost
HostNews = HostStarted | HostWrote | HostLogged | HostEnded | HostActorLost
RayReport = ClusterFailed | ClusterDescribed | NodesAwaited | NodesAllocated | HostNews
