"""Messages between a host and the fork server, or a fresh interpreter, that spawns a rank; and to a spare process.

The fork server is `python -m meshbook.rank.forkserver FD PIPE LISTEN [--no-torch]`. FD is one end of a SOCK_SEQPACKET
pair, one message per packet; it ends when nobody holds the write end of PIPE; at LISTEN it is asked for branches. A
spare has such a socket of its own, over which it gets what it imports, and at last the rank it becomes.
"""

from __future__ import annotations

import os
import socket
from typing import TypeVar

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
    host_pid: int = 0  # of the agent or its keeper; its descendants may inspect this rank from outside
    max_files: int | None = None  # soft limit on open files; None: the inherited one
    incarnation: int = 0  # how many processes this rank has had before
    host: int = 0  # its host's number among the mesh's
    address: str | None = None  # by which other machines reach this one; None: the mesh is on one machine
    store_address: str | None = None  # of the mesh's store as seen from this machine; None: as the supervisor sees it
    store_key: str | None = None  # public CURVE key of the store, if its address is a tcp one


def rank_identity(rank: int, incarnation: int) -> bytes:
    """Return the zmq identity of a rank's sockets.

    A new process of a rank has another one: a socket ignores a peer with an identity that it believes to be in use.
    """
    return b"r%d" % rank if not incarnation else b"r%d.%d" % (rank, incarnation)


class ForkRank(Struct, tag=True, frozen=True):
    """Fork a rank.

    The packet carries six descriptors: read ends, then write ends, of its stdout and stderr pipes, the memory of its
    crash log, and the read end of the pipe whose write end its host holds.
    """

    number: int  # of the request; one that comes again gets the same process
    config: RankConfig


class SpareConfig(Struct, frozen=True):
    """The configuration of a process that waits to become a rank: what is equal for all ranks of its host."""

    spec: MeshSpec
    threads: int  # this and the others as in RankConfig
    blas_threads: int | None = None
    host_pid: int = 0
    max_files: int | None = None
    left_out: tuple[str, ...] = ()  # packages that it does not import


class ForkSpare(Struct, tag=True, frozen=True):
    """Fork a spare. The packet carries the descriptors of ForkRank, and the spare's end of its socket."""

    number: int
    config: SpareConfig


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
    """The reply to ForkRank; the same to a request that comes again."""

    number: int
    pid: int


class ForkFailed(Struct, tag=True, frozen=True):
    """The reply to ForkRank if the system cannot create another process."""

    number: int
    reason: str


class ChildExited(Struct, tag=True, frozen=True):
    pid: int
    status: int  # as returned by waitpid


class ForkServerTerminating(Struct, tag=True, frozen=True):
    """The fork server received SIGTERM. It goes on."""


class ImportModules(Struct, tag=True, frozen=True):
    """To a spare: import what it has not; the reply is `SpareReady` or `SpareUnfit`."""

    names: tuple[str, ...]  # in the order in which a rank has imported them


class BecomeRank(Struct, tag=True, frozen=True):
    """To a spare: be this rank. The reply is `SpareAccepted` or `SpareUnfit`."""

    config: RankConfig


class SpareImporting(Struct, tag=True, frozen=True):
    package: str


class SpareReady(Struct, tag=True, frozen=True):
    """All that was asked for is imported, but for what failed."""

    num_modules: int  # that it has imported
    seconds: float  # that took
    private_bytes: int  # of memory that it shares with nobody
    failed: tuple[tuple[str, str], ...] = ()  # modules, and why


class SpareUnfit(Struct, tag=True, frozen=True):
    """The spare can be no rank, and exits."""

    reason: str
    packages: tuple[tuple[str, str], ...] = ()  # that a spare must not import, and why


class SpareAccepted(Struct, tag=True, frozen=True):
    """The spare is the rank now, and reports to the host's sockets."""


ForkCommand = ForkRank | ForkSpare | CommandInFile
SpareCommand = ImportModules | BecomeRank
SpareReport = SpareImporting | SpareReady | SpareUnfit | SpareAccepted
ForkReport = ForkServerReady | ForkUnsafe | Forked | ForkFailed | ChildExited | ForkServerTerminating

# The largest packet. Linux lets a process send 208 KiB (net.core.wmem_default), of which less is payload.
MAX_PACKET_BYTES = 64 << 10
RECEIVE_BYTES = 1 << 20

encoder = msgspec.msgpack.Encoder()
fork_commands = msgspec.msgpack.Decoder(ForkCommand)
fork_reports = msgspec.msgpack.Decoder(ForkReport)
branch_requests = msgspec.msgpack.Decoder(BranchForkServer)
start_commands = msgspec.msgpack.Decoder(ForkRank | ForkSpare)
spare_commands = msgspec.msgpack.Decoder(SpareCommand)
spare_reports = msgspec.msgpack.Decoder(SpareReport)

T = TypeVar("T")


def make_file(message: Struct) -> int:
    """Return the descriptor of a memory file with a message; for messages that may be larger than a packet."""
    file = os.memfd_create("meshbook-spawn", os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(encoder.encode(message))
    return file


def read_file(file: int, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return the message in a memory file, and close that."""
    with open(file, "rb") as reader:
        reader.seek(0)
        return decoder.decode(reader.read())


def send_in_file(channel: socket.socket, message: Struct) -> None:
    """Send a message of any size in a memory file. Raises OSError: the other end has closed."""
    file = make_file(message)
    try:
        socket.send_fds(channel, [b"f"], [file])
    finally:
        os.close(file)


def receive_in_file(channel: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next message that `send_in_file` has sent; None: the other end has closed. Blocks."""
    data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return read_file(descriptors[0], decoder) if data else None
