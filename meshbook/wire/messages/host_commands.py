"""Commands of the supervisor to hosts and ranks, beside those of controllers that it passes on."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.mesh import MeshSpec, RankPosition
from meshbook.wire.messages.output import Notice
from meshbook.wire.messages.payloads import Message, SharedBuffer

# Commands: supervisor -> host -> rank, beside those that are forwarded


class StartRanks(Message):
    """To a host: start and own these ranks of the mesh. A rank whose process has ended gets a new one."""

    spec: MeshSpec
    ranks: Ranks
    world_size: int
    host_ranks: Ranks  # all ranks of this host, these among them
    incarnations: tuple[int, ...] = ()  # how many processes each of `ranks` had before, on any host; (): none


class PrepareSpares(Message):
    """To a host: have this number of processes ready that ranks can be; `StartRanks` takes them first.

    One that was taken is not replaced before this comes again.
    """

    spec: MeshSpec
    num: int
    host_ranks: Ranks  # all ranks of this host


class KeepAlive(Message):
    """To a host on another machine, every second; answered by `HostAlive`."""

    sent_at: float  # of the supervisor's clock; sent back


class StagedCommand(Message):
    """To hosts on several machines: queue a command that has values of one machine, and wait for `BeginStaged`."""

    body: bytes  # the command, encoded
    fetch: bool  # the values are on another machine: fetch them, and report `ValuesArrived`


class BeginStaged(Message):
    """To hosts: the values of a command are on all machines, or will not be."""

    call: CallId
    error: str = ""  # why they will not be: no rank runs it


class FetchChunk(Message):
    """To the machine of a buffer, up or down: send a part of it. The reply are `BufferChunk`s, in order."""

    transfer: str  # the asking side's name for it
    index: int  # of the part, in this transfer
    buffer: SharedBuffer
    offset: int  # in the buffer
    nbytes: int
    directly: bool = False  # by the data connection, if there still is one


class BufferChunk(Message):
    """A piece of a buffer of another machine."""

    transfer: str
    index: int
    offset: int = 0  # in the buffer
    data: bytes = b""
    error: str = ""  # why it cannot be had
    left_out: int = 0  # bytes of the data that are not here, in a standby


class ShowNotice(Message):
    """To a host: show this once, in the calls that its ranks run, else in the next one."""

    notice: Notice


class LeaveMesh(Message):
    """To hosts: end these ranks in order, or by SIGKILL if they do not listen; they are no ranks of the mesh any more.

    The call ends when their processes have.
    """

    call: CallId
    ranks: Ranks


class FindSharded(Message):
    """To all ranks: which of the user's names hold DTensors, of which other ranks hold other parts?

    The reply is `{"sharded": [names], "problems": {name: why it cannot be cut for the new axes}, "needs_leaving":
    whether ranks that leave hold what no other does, "catalog": digest of what was found, "stale": [names]}`; stale are
    those of `size_dependent` with a plain value.
    """

    call: CallId
    ranks: Ranks
    axes: dict[str, int]  # that the mesh is to have
    setup_names: tuple[str, ...] | None = None  # names that setup cells bind, if ranks join; None: none do
    size_dependent: tuple[str, ...] = ()  # names that cells compute from the number of ranks


class MoveShards(Message):
    """To ranks, while the mesh is resized: have parts of DTensors go to the ranks that are to hold them.

    "give", before ranks leave: those that stay get their parts from all. "move", among the ranks of the new axes: each
    gets what it lacks. "commit", when all have ended that well: the tensors have what was moved. The reply to the first
    two is `{"lost": [names of which parts are gone], "num_bytes": received}`.
    """

    call: CallId
    ranks: Ranks
    step: Literal["give", "move", "commit"]
    axes: dict[str, int]  # that the mesh has afterwards
    world_size: int
    new_ranks: Ranks = ()  # hold nothing yet


class FormGroups(Message):
    """To every rank: form the process groups of this generation, the first time or again. Precedes queued commands."""

    call: CallId
    ranks: Ranks
    generation: int
    store_address: str  # of the mesh's store
    axes: dict[str, int] = msgspec.field(default_factory=dict)  # of the mesh, as it is now; {}: as it was started
    num_resizes: int = 0  # how often it was given others


class CellToReplay(Struct, frozen=True, gc=False):
    """A cell that ran before a rank was replaced."""

    source: str
    number: int | None
    label: str  # "cell 7"
    setup: bool  # run it whole; else only its imports, functions and classes


class ReplayCells(Message):
    """To new ranks, after their groups are formed: run these cells, in this order, without the other ranks.

    Collectives that they begin return at once, with this rank's own values. The reply is `{"ran": [labels], "defined":
    number of cells, "failed": [[label, "NameError: ..."]], "bound": [names], "built": [names that setup cells bound]}`.
    """

    call: CallId
    ranks: Ranks
    cells: tuple[CellToReplay, ...]


class ShareState(Message):
    """To all ranks: give the new ones what the others hold, as far as it is proven to be what they held.

    The reply of a new rank is `{"restored": {name: [source rank, why]}, "missing": {name: why}, "kept": {name: why},
    "alike": [names]}`: what it has, what it lacks, what it has as setup cells made it, and what could be copied.
    """

    call: CallId
    ranks: Ranks
    new_ranks: Ranks
    rank_dependent: tuple[str, ...] = ()  # names that cells compute from the rank: `is_main = rank == 0`
    built: tuple[str, ...] = ()  # names that setup cells have bound on the new ranks
    copy: tuple[str, ...] | None = ()  # names that are copied where the others are alike; None: all of them
    joined: Ranks = ()  # new ranks that a resize has added, in nobody's place: they get all that is alike
    names_only: bool = False  # the new ranks have been healed: only what `copy` says
    with_shards: bool = True  # False: DTensors are sent without their contents, which `MoveShards` brings


class AbortCollectives(Message):
    """To ranks in a collective that cannot finish: abort it with this reason. The groups are broken afterwards."""

    ranks: Ranks
    reason: str
    interrupt: bool = False  # the waiting call raises KeyboardInterrupt, not GroupBroken
    # of the groups: later ones are left alone, and if this one is formed after the message it is broken from the
    # start. It may arrive late or early, because groups are formed by another socket. None: those that there are.
    generation: int | None = None
    # that the rank runs; it may have ended when this arrives, and what the rank runs then is not meant. None: any.
    call: CallId | None = None


class QueryPositions(Message):
    """To ranks' service threads: query their positions in the order of collectives. The reply is a `RankPosition`.

    Sent after a call that did not succeed on all its ranks, or to ranks that have left a call that runs on others.
    """

    call: CallId
    ranks: Ranks
    about_call: CallId


class HoldCollectives(Message):
    """To ranks' service threads: a call is being stopped; after it, collectives wait for `ResumeCollectives`.

    This includes ranks that have already finished the call: their next collectives could match operations that other
    ranks are not yet stopped in.
    """

    ranks: Ranks
    about_call: CallId


class ResumeCollectives(Message):
    """To ranks' service threads: a failed call has ended everywhere, and these groups are out of step.

    Ranks whose next collective waits for this message continue.
    """

    ranks: Ranks
    about_call: CallId
    generation: int
    broken_groups: tuple[str, ...] = ()
    reason: str = ""


class RanksLeft(Message):
    """To ranks that still run a call: other ranks have left it and will reach no collective of it any more."""

    call: CallId
    ranks: Ranks
    left_positions: tuple[RankPosition, ...]


class EndCall(Message):
    """To a host: end its part of this call now. Ranks that have not returned from it are reported as skipped."""

    call: CallId


class Exit(Message):
    """Exit in order. The second one to a rank confirms its final output; a host ends every rank first."""

    ranks: Ranks = ()
    grace_s: float = 1.0
