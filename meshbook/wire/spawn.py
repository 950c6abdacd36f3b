"""Messages between a host and the fork server, or a fresh interpreter, that spawns a rank.

The fork server is `python -m meshbook.rank.forkserver FD`; FD is one end of a SOCK_SEQPACKET pair, one message per
packet.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from meshbook.wire.messages import MeshSpec


class RankConfig(Struct, frozen=True):
    """The complete configuration of a new rank."""

    rank: int
    local_rank: int
    local_world_size: int  # ranks of this mesh on this host
    world_size: int
    token: str
    work_address: str  # of the host's two sockets
    service_address: str
    spec: MeshSpec
    threads: int  # for torch's own thread pool
    blas_threads: int | None = None  # for NumPy's; None: as the user's environment says
    host_pid: int = 0  # of the agent; its child processes may inspect this rank from outside
    max_files: int | None = None  # soft limit on open files; None: the inherited one
    incarnation: int = 0  # how many processes this rank has had before


def rank_identity(rank: int, incarnation: int) -> bytes:
    """Return the zmq identity of a rank's sockets.

    A new process of a rank has another one: a socket ignores a peer with an identity that it believes to be in use.
    """
    return b"r%d" % rank if not incarnation else b"r%d.%d" % (rank, incarnation)


class ForkRank(Struct, tag=True, frozen=True):
    """Fork a rank.

    The packet carries five descriptors: read ends, then write ends, of its stdout and stderr pipes, and the memory of
    its crash log.
    """

    config: RankConfig


class BranchForkServer(Struct, tag=True, frozen=True):
    """First message to a fork server at its listening socket: fork a new fork server for the sender."""

    environment: dict[str, str]
    listen_path: str  # where the new one listens in turn


class CommandInFile(Struct, tag=True, frozen=True):
    """Replaces a command that is larger than a packet: the command is in the file of the packet's last descriptor."""


class ForkServerReady(Struct, tag=True, frozen=True):
    """The imports are done."""

    seconds: float


class ForkUnsafe(Struct, tag=True, frozen=True):
    """This process must not fork, and exits; it has carried out none of its requests."""

    reason: str  # "it has 3 threads"


class Forked(Struct, tag=True, frozen=True):
    """The reply to ForkRank, in the order of the requests."""

    pid: int


class ForkFailed(Struct, tag=True, frozen=True):
    """The reply to ForkRank if the system cannot create another process."""

    reason: str


class ChildExited(Struct, tag=True, frozen=True):
    pid: int
    status: int  # as returned by waitpid


class ForkServerTerminating(Struct, tag=True, frozen=True):
    """The fork server received SIGTERM. It goes on."""


ForkCommand = ForkRank | CommandInFile
ForkReport = ForkServerReady | ForkUnsafe | Forked | ForkFailed | ChildExited | ForkServerTerminating

# The largest packet. Linux lets a process send 208 KiB (net.core.wmem_default), of which less is payload.
MAX_PACKET_BYTES = 64 << 10
RECEIVE_BYTES = 1 << 20

encoder = msgspec.msgpack.Encoder()
fork_commands = msgspec.msgpack.Decoder(ForkCommand)
fork_reports = msgspec.msgpack.Decoder(ForkReport)
branch_requests = msgspec.msgpack.Decoder(BranchForkServer)
rank_configs = msgspec.msgpack.Decoder(RankConfig)
