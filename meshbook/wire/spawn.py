"""How a rank comes into the world: what the host tells the fork server, or a fresh interpreter, and what it hears back.

The fork server is `python -m meshbook.rank.forkserver FD`; FD is one end of a SOCK_SEQPACKET pair, one message each.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from meshbook.wire.messages import MeshSpec


class RankConfig(Struct, frozen=True):
    """All that a new rank is told."""

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
    host_pid: int = 0  # of the agent; what it starts may look at this rank from outside
    max_files: int | None = None  # soft limit on open files; None: the one that it inherits


class ForkRank(Struct, tag=True, frozen=True):
    """Fork a rank. Five descriptors come along: read ends, then write ends, of its stdout and stderr pipes, and the
    ring for its last words."""

    config: RankConfig


class BranchForkServer(Struct, tag=True, frozen=True):
    """First word to a fork server at its listening socket: be one for me too, in a process of its own."""

    environment: dict[str, str]
    listen_path: str  # where the new one listens in turn


class CommandInFile(Struct, tag=True, frozen=True):
    """Instead of a command that is larger than a packet may be: it is the content of the last descriptor that comes
    along."""


class ForkServerReady(Struct, tag=True, frozen=True):
    """The imports are done."""

    seconds: float


class ForkUnsafe(Struct, tag=True, frozen=True):
    """This process must not fork, and ends; nothing that it was asked for has been done."""

    reason: str  # "it has 3 threads"


class Forked(Struct, tag=True, frozen=True):
    """The answer to ForkRank, in the order asked."""

    pid: int


class ForkFailed(Struct, tag=True, frozen=True):
    """The other answer: the system has no room for one more process."""

    reason: str


class ChildExited(Struct, tag=True, frozen=True):
    pid: int
    status: int  # as waitpid gives it


ForkCommand = ForkRank | CommandInFile
ForkReport = ForkServerReady | ForkUnsafe | Forked | ForkFailed | ChildExited

# The largest packet. Linux lets a process send 208 KiB (net.core.wmem_default), of which less is payload.
MAX_PACKET_BYTES = 64 << 10
RECEIVE_BYTES = 1 << 20

encoder = msgspec.msgpack.Encoder()
fork_commands = msgspec.msgpack.Decoder(ForkCommand)
fork_reports = msgspec.msgpack.Decoder(ForkReport)
branch_requests = msgspec.msgpack.Decoder(BranchForkServer)
rank_configs = msgspec.msgpack.Decoder(RankConfig)
