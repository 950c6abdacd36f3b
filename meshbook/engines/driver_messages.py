"""What an engine and its driver process say to each other, in lines of JSON: those of Ray, and of Monarch.

Commands are read on the driver's standard input, whose end means that the mesh has ended; reports are written to its
standard output.
"""

from __future__ import annotations

from msgspec import Struct


class DriverLine(Struct, frozen=True, tag=True):
    """A line. A field `launch` is the number of one start of one host; a host that is started again has another."""


# ---- to the driver


class AllocateNodes(DriverLine, frozen=True):
    """Connect to a Ray cluster, and wait until it has nodes for the hosts. The first command, and the only such."""

    cluster: str  # "auto", "local", or GCS's "head:6379"
    num_nodes: int
    num_cpus: float  # of each node
    num_gpus: float | None  # of each node; None: `gpus_if_any` if a node of the cluster has a GPU, else none
    gpus_if_any: int = 0


class DescribeCluster(DriverLine, frozen=True):
    """Connect to a Ray cluster, and say what it has. In place of AllocateNodes."""

    cluster: str


class AllocateJob(DriverLine, frozen=True):
    """Have a Monarch job give hosts. The first command, and the only such."""

    kind: str  # "process", "local", "ssh", "slurm" or "kubernetes"; "": that of `file`
    num_hosts: int
    options: dict[str, str]  # of the kind, in Monarch's words; or "mesh"
    file: str = ""  # a path: a program that makes a job
    name: str = ""  # of the job in it


class DescribeJob(DriverLine, frozen=True):
    """Make a Monarch job without starting it, and say what it is. In place of AllocateJob."""

    job: AllocateJob


class StartHost(DriverLine, frozen=True):
    """Start a process on a node: an actor does."""

    launch: int
    node: int  # which one
    python: str | None  # None: that of the launcher's workers there
    words: tuple[str, ...]  # that follow it
    environment: dict[str, str]  # in addition to that of the launcher's workers


class WriteInput(DriverLine, frozen=True):
    """Write to its standard input."""

    launch: int
    text: str


class FindWays(DriverLine, frozen=True):
    """Say at which addresses the host's node reaches these of the supervisor."""

    launch: int
    addresses: tuple[str, ...]  # "tcp://10.0.0.1:41234"


class CloseInput(DriverLine, frozen=True):
    """Close its standard input, at which it ends in order."""

    launch: int


class KillHost(DriverLine, frozen=True):
    """Kill the actor, and with it what it has started."""

    launch: int


# ---- from the driver


class ClusterFailed(DriverLine, frozen=True):
    """There is no cluster, or no nodes can be had of it."""

    words: str  # the launcher's own, or what is wrong
    advice: str = ""  # what to do; "": that is known from the words, or not at all


class ClusterDescribed(DriverLine, frozen=True):
    """What DescribeCluster has found."""

    version: str  # of Ray
    python: str
    nodes: tuple[tuple[str, str, float, float], ...]  # hostname, address, CPUs, GPUs of each that lives


class JobDescribed(DriverLine, frozen=True):
    """What DescribeJob has found."""

    version: str  # of Monarch
    kind: str  # the name of its class
    is_started: bool  # by the user's program


class NodesAwaited(DriverLine, frozen=True):
    """They are not there yet."""

    state: str  # "Ray: waiting for 2 nodes with 8 GPUs each; the cluster has 1"


class NodesAllocated(DriverLine, frozen=True):
    """There is a node for each host."""

    address: str  # of the driver's own machine, as nodes reach it


class HostStarted(DriverLine, frozen=True):
    launch: int
    node: str  # its hostname


class HostWrote(DriverLine, frozen=True):
    """The first line of its standard output."""

    launch: int
    line: str


class WaysFound(DriverLine, frozen=True):
    launch: int
    addresses: tuple[str, ...]  # in their order


class HostLogged(DriverLine, frozen=True):
    """A piece of what it has written to standard error."""

    launch: int
    text: str


class HostEnded(DriverLine, frozen=True):
    launch: int
    code: int  # negative: a signal


class HostActorLost(DriverLine, frozen=True):
    """Its actor could not be started, or has ended; its host ends then too, if the node lives."""

    launch: int
    words: str  # the launcher's own


DriverCommand = (
    AllocateNodes
    | DescribeCluster
    | AllocateJob
    | DescribeJob
    | StartHost
    | WriteInput
    | FindWays
    | CloseInput
    | KillHost
)
HostNews = HostStarted | HostWrote | WaysFound | HostLogged | HostEnded | HostActorLost
DriverReport = ClusterFailed | ClusterDescribed | JobDescribed | NodesAwaited | NodesAllocated | HostNews
