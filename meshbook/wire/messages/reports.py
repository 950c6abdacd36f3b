"""Reports: of ranks to their host, of hosts to the supervisor, of the supervisor to controllers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from meshbook.errors import describe_exit
from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.checkpoints import SavedFolder
from meshbook.wire.messages.mesh import HostInfo, MachineFacts, MeshInfo
from meshbook.wire.messages.output import FoldedItem, Outcome, OutcomeGroup, OutputItem
from meshbook.wire.messages.payloads import Message
from meshbook.wire.messages.project import HostFiles


class RankReady(Message):
    """A rank's process is up and listens; its first command forms its groups. Sent on both of its sockets."""

    rank: int
    pid: int
    device: str
    token: str


class RankExiting(Message):
    """A rank has sent all its output and exits; its host replies with `Exit`, so that no output is lost."""

    rank: int


class ServiceFailed(Message):
    """An exception in a rank's service thread, which continues. Sent once per kind."""

    rank: int
    activity: str  # what it did: "carrying out Release"
    error: str  # one line
    traceback: str


class RankOutput(Message):
    """Output of a running call, rank to host. `seq` counts from 1 within the rank."""

    rank: int
    call: CallId | None
    seq: int
    items: tuple[OutputItem, ...]


class RankFinished(Message):
    """A rank's part in a call has ended; includes the output not sent yet."""

    rank: int
    call: CallId
    outcome: Outcome
    seconds: float
    items: tuple[OutputItem, ...] = ()
    last_output_seq: int = 0  # of the last RankOutput before this; the host waits for it
    released_segments: tuple[str, ...] = ()  # shared segments of other processes that this rank no longer maps


class RankReply(Message):
    """From the service thread: the reply to Complete, Inspect, PreviewNames."""

    rank: int
    call: CallId
    content: Any


class DebuggerStop(Struct, frozen=True, gc=False):
    """The debugger has stopped a rank, and waits for a command."""

    place: str  # of the frame that commands look at: "cell 12, line 40 in train"
    text: str  # what the last command printed, and where the rank has stopped since
    has_breakpoints: bool = False  # a rank that goes on may stop again
    is_post_mortem: bool = False  # by %debug: there is nothing that could go on


class RankInputRequest(Message):
    """input() or getpass() on a rank waits for text; or its debugger for a command."""

    rank: int
    call: CallId
    prompt: str
    password: bool = False
    stop: DebuggerStop | None = None


class RankExited(Message):
    """A rank's process has exited."""

    rank: int
    pid: int
    exit_code: int | None  # None: ended by a signal
    signal: int | None
    host: str
    last_lines: tuple[str, ...]  # of its output, C and C++ included
    last_collective: str | None  # "all_reduce #41 at cell 7, line 3", if known
    oom_killed: bool = False  # killed because the system was out of memory
    cause: str | None = None  # what ended it, "ended with its host, which ..."; then there is no code or signal
    heals_when: str = ""  # what %mesh heal waits for, "machine n2 can be reached"; "": nothing
    is_killed_by_us: bool = False  # Meshbook sent the SIGKILL: a second Stop, a heal, %mesh kill

    @property
    def description(self) -> str:
        """How it ended, as a phrase that follows its name."""
        return self.cause or describe_exit(self.signal, self.exit_code)

    @property
    def description_with_reason(self) -> str:
        return f"{self.description} because the host ran out of memory" if self.oom_killed else self.description


class HostReady(Message):
    host: int
    hostname: str
    pid: int
    token: str = ""
    facts: MachineFacts | None = None  # of another machine than the supervisor's


class HostFailed(Message):
    host: int
    reason: str


class HostAlive(Message):
    """The reply to `KeepAlive`."""

    sent_at: float


class DataAddress(Struct, frozen=True, gc=False):
    """Where a process takes data connections (`wire/data_connections.py`)."""

    host: str
    port: int
    key: bytes  # secret; of 32 bytes


class DataListening(Message):
    """A host takes data connections."""

    address: DataAddress


class ValuesArrived(Message):
    """The values of a `StagedCommand` are on this host's machine, or cannot be had."""

    call: CallId
    error: str = ""


class SegmentsReleased(Message):
    """A rank has released shared segments."""

    rank: int
    segments: tuple[str, ...]


class CallOutput(Message):
    """Folded output of a call, in order."""

    call: CallId
    items: tuple[FoldedItem, ...]


class CallProgressed(Message):
    """The ranks of an open call that have finished; sent at most a few times per second."""

    call: CallId
    done: Ranks
    failure: str = ""  # of what ranks do together (forming groups, sharing state): which rank failed, and why


class Pong(Message):
    """The reply to Ping."""


class RanksStuck(Message):
    """The ranks of an open call that have not returned after a Stop."""

    call: CallId
    ranks: Ranks
    reason: str  # "rank 1 (pid 7) is in C code that keeps the GIL"


class CallFinished(Message):
    """A call has ended on every rank."""

    call: CallId
    outcomes: tuple[OutcomeGroup, ...]
    seconds: float  # the slowest rank's
    rank_seconds: dict[int, float] | None = None  # per rank, if the mesh is small (at most 64 ranks)
    lost: tuple[RankExited, ...] = ()
    items: tuple[FoldedItem, ...] = ()  # output that had not been sent yet


class InputRequest(Message):
    call: CallId
    rank: int
    prompt: str
    password: bool
    stop: DebuggerStop | None = None


class CommandReply(Message):
    """The reply to a command that ranks do not handle: status, logs, history, output, stop.

    In the reply to `QueryStatus`, `open_calls` are the cells and functions that run, oldest first.
    """

    call: CallId
    info: MeshInfo | None = None
    text: str | None = None
    history: tuple[HistoryEntry, ...] = ()
    kept: tuple[KeptCell, ...] = ()
    open_calls: tuple[OpenCall, ...] = ()
    hosts: tuple[HostInfo, ...] = ()
    output: NewOutput | None = None
    synced: tuple[HostFiles, ...] = ()  # of `SyncProject`, by host


class Refused(Message):
    """A command was refused. Nothing changed."""

    call: CallId | None
    error: str  # class name in meshbook.errors
    text: str


class Welcome(Message):
    info: MeshInfo
    open_calls: tuple[OpenCall, ...] = ()


class MeshStarting(Message):
    """What a mesh that is to start waits for."""

    call: CallId
    state: str  # "Slurm: job 7 is PENDING (Priority)", "3 of 4 ranks are ready; waiting for rank 3"; "": not known
    is_queued: bool = False  # it waits for its machines in the queue of their launcher, which says so


class MeshReady(Message):
    call: CallId
    info: MeshInfo
    seconds: float


class ResizeChanges(Struct, frozen=True, gc=False):
    """What a resize has changed, beside the new ranks."""

    before: dict[str, int]  # axes
    left: Ranks = ()  # ranks that are no more
    stale: tuple[str, ...] = ()  # names with plain values that cells have computed from the former number of ranks
    moved: tuple[str, ...] = ()  # names of DTensors that were cut anew, and of what is made of them
    num_bytes: int = 0  # that went from rank to rank for it


class MeshHealed(Message):
    """The reply to HealMesh, and to ResizeMesh."""

    call: CallId
    info: MeshInfo
    ranks: Ranks  # with new processes; (): all were alive
    seconds: float
    ran: tuple[str, ...] = ()  # labels of the setup cells that new ranks ran
    num_defined: int = 0  # other cells whose imports and definitions they ran
    failed: tuple[tuple[str, str], ...] = ()  # cells that could not be replayed: label, error
    restored: dict[int, dict[str, tuple[int, str]]] = msgspec.field(
        default_factory=dict
    )  # new rank -> name -> where it is from, and why
    missing: dict[int, dict[str, str]] = msgspec.field(default_factory=dict)  # new rank -> name -> why it has no value
    kept: dict[int, dict[str, str]] = msgspec.field(
        default_factory=dict
    )  # new rank -> name -> why it is as setup cells made it; those that are known to be wrong are missing too
    alike: tuple[str, ...] = ()  # names that `HealMesh.copy` would copy
    copied_to: Ranks = ()  # ranks that were healed before, and have got what was named
    checkpoint: SavedFolder | None = None  # of this mesh, the last that has names that are missing
    checkpoint_age_s: float = 0.0
    resized: ResizeChanges | None = None  # in the reply to ResizeMesh


class MeshChanged(Message):
    """The mesh has changed; sent to every client: a rank died, groups broke or were re-formed, cells bound names."""

    info: MeshInfo
    exited: tuple[RankExited, ...] = ()


class MeshStopped(Message):
    reason: str


class OpenCall(Struct, frozen=True, gc=False):
    call: CallId
    label: str
    ranks: Ranks
    client: str
    seconds: float  # since the call was opened
    number: int | None = None  # of the cell
    orphaned: bool = False  # its client is gone


class HistoryEntry(Struct, frozen=True, gc=False):
    number: int | None
    label: str
    source: str
    ranks: Ranks
    started_at: float  # wall clock
    seconds: float | None  # None: still running
    status: str  # "running", "ok", "error", "interrupted", "lost"
    setup: bool = False
    whole_mesh: bool = False  # it ran on all ranks that the mesh had then
    call: CallId = CallId("")
    num_lines: int | None = None  # that it printed; None: nothing of it is kept, or there was nothing to keep
    by: str = ""  # the kind of the client that ran it (`Hello.kind`)


class KeptCell(Struct, frozen=True, gc=False):
    """What is kept of a cell's output and of how it ended. Rank values are there to be shown, and not to be fetched."""

    entry: HistoryEntry
    items: tuple[FoldedItem, ...]
    finished: CallFinished | None  # without items; None: it still runs


class KeptItem(Struct, array_like=True, frozen=True, gc=False):
    """A piece of a cell's output, and its place in the output of all cells of the mesh, which only grows."""

    place: int  # from 1; 0: the present state of a line that is still being written, such as a progress bar
    call: CallId
    at: float  # wall clock
    item: FoldedItem


class NewOutput(Struct, frozen=True, gc=False):
    """The reply to QueryNewOutput."""

    items: tuple[KeptItem, ...]
    # Those that the items are of, or the one that was asked for; `items` has the notice of what is no longer kept.
    cells: tuple[KeptCell, ...]
    last_place: int  # of the newest item of all cells
    num_left: int = 0  # items that follow these
