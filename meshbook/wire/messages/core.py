"""Messages for meshes, cells, values and the reports of ranks."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from meshbook.errors import describe_exit
from meshbook.ids import CallId, Ranks


class Message(Struct, tag=True, frozen=True, gc=False):
    """Base of every message: immutable, and tagged on the wire with its class name."""


# ---------------------------------------------------------------------------------------------------------------------
# Payloads: Python objects in transit


class SharedBuffer(Struct, tag="shared", frozen=True, gc=False):
    """Bytes in an anonymous memory file of a process on this machine, readable through /proc/<pid>/fd/<fd>."""

    pid: int
    fd: int
    offset: int
    nbytes: int
    segment: str  # the owner's name for it; sent back in `Release`


class InlineBuffer(Struct, tag="inline", frozen=True, gc=False):
    """Bytes that are part of the message itself."""

    data: bytes


class Payload(Struct, frozen=True, gc=False):
    """One pickled object: protocol 5, with its large buffers out of band, in the pickle's order."""

    pickled: bytes  # empty: the pickle is the last of the buffers
    buffers: tuple[SharedBuffer | InlineBuffer, ...] = ()
    # where in `pickled` the last buffers belong that are pieces of it (large bytes, text)
    splice_offsets: tuple[int, ...] = ()


class TensorMeta(Struct, frozen=True, gc=False):
    """Metadata of a tensor, without its data."""

    shape: tuple[int, ...]  # local shape, or the global one if `placements` is set
    dtype: str  # "float32", without "torch."
    device: str  # "cpu", "cuda:0"
    requires_grad: bool = False
    placements: str | None = None  # "(Shard(dim=0),)" of a DTensor; None for a plain tensor
    local_shape: tuple[int, ...] | None = None  # of a DTensor
    stride: tuple[int, ...] | None = None  # in items, of `shape`; None: it has none (sparse), or it was not requested


class Preview(Struct, frozen=True, gc=False):
    """A bounded representation of a value: enough to display it and to compare it between ranks."""

    kind: Literal["plain", "tensor", "object", "none"]
    type: str  # "int", "torch.Tensor", "numpy.ndarray", "__main__.Model"
    text: str  # bounded repr
    html: str | None = None  # bounded _repr_html_
    data: dict[str, Any] = {}  # other MIME types of a rich display, bounded; bytes already in base64
    metadata: dict[str, Any] = {}
    tensor: TensorMeta | None = None
    digest: str | None = None  # equal digests mean equal content even if the text is truncated; None: not computed
    truncated: bool = False


class Value(Struct, frozen=True, gc=False):
    """The value of an expression on a rank."""

    preview: Preview
    # the rank stores the object under this name until `Release`; None: it is complete in `payload`
    ref: str | None = None
    payload: Payload | None = None  # the object itself, when small


class Frame(Struct, frozen=True, gc=False):
    """One line of a Python stack."""

    file: str
    line: int
    function: str


class RankError(Struct, frozen=True, gc=False):
    """An exception raised on a rank."""

    ename: str  # class name, "ZeroDivisionError"
    evalue: str  # str(exception)
    traceback: tuple[str, ...]  # rendered by IPython on the rank: ANSI colours, cell source lines
    frames: tuple[Frame, ...] = ()  # outermost first; identifies equal failures
    pickled: bytes | None = None  # the exception itself, if it can be pickled and is small
    notes: tuple[str, ...] = ()
    released_from: str | None = None  # "all_reduce at line 4": it waited there for ranks that had left the call


# ---------------------------------------------------------------------------------------------------------------------
# Output of a cell


class Text(Struct, tag="text", frozen=True, gc=False):
    """A piece of stdout or stderr as written: may hold part of a line, many lines, carriage returns."""

    stream: Literal["stdout", "stderr"]
    text: str


class Display(Struct, tag="display", frozen=True, gc=False):
    """A display_data message, or update_display_data if `update`."""

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str | None = None
    update: bool = False


class ClearOutput(Struct, tag="clear", frozen=True, gc=False):
    wait: bool = False


class Notice(Struct, tag="notice", frozen=True, gc=False):
    """A message of Meshbook's own in the output: text truncated, a rank that does not stop."""

    text: str


OutputItem = Text | Display | ClearOutput | Notice


class VaryingNumber(Struct, array_like=True, frozen=True, gc=False):
    """A number of a folded line that differs between its ranks."""

    position: int  # index among the line's numbers, counted from 0
    texts: tuple[str, ...]  # as each rank wrote it, in the order of the line's ranks


class Line(Struct, tag="line", frozen=True, gc=False, omit_defaults=True):
    """One folded line of text, printed by `ranks`: equal on all of them, or equal except for numbers.

    `text` is ready for display, without the ranks and the line end; where numbers differ it shows their range.
    """

    ranks: Ranks
    stream: Literal["stdout", "stderr"]
    text: str
    live: bool = False  # state of an unfinished line, such as a progress bar; replaces these ranks' earlier live lines
    end: str = "\n"  # "" where the last line of a cell had no line end
    first_text: str = ""  # the line as its first rank wrote it, if numbers differ; host to supervisor only
    # the differing numbers, so that lines of several hosts fold exactly; host to supervisor only
    varying_numbers: tuple[VaryingNumber, ...] = ()


class RankDisplay(Struct, tag="rank_display", frozen=True, gc=False):
    """A display, a display update or clear_output, with the ranks that produced the same one."""

    ranks: Ranks
    item: Display | ClearOutput | Notice


FoldedItem = Line | RankDisplay


# ---------------------------------------------------------------------------------------------------------------------
# The outcome of a call


class Outcome(Struct, frozen=True, gc=False):
    """How a call ended on one rank; equal outcomes of several ranks are folded."""

    status: Literal["ok", "error", "interrupted", "lost", "skipped"]
    value: Value | None = None  # of the last expression; None: there was none
    error: RankError | None = None  # for "error" and "interrupted"; for "lost" a description of what is known
    bound_names: tuple[str, ...] = ()  # names of the namespace that the cell bound, changed or rebound
    deleted_names: tuple[str, ...] = ()  # names that the cell deleted
    groups_broken: bool = False  # a process group of this rank cannot be used until it is re-formed
    reply: Any = None  # the reply to a query (Complete, Inspect, PreviewNames): plain data


class OutcomeGroup(Struct, frozen=True, gc=False):
    """Ranks with the same outcome."""

    ranks: Ranks
    outcome: Outcome


# ---------------------------------------------------------------------------------------------------------------------
# Mesh descriptions


class MeshSpec(Struct, frozen=True, gc=False):
    """The requested configuration of a mesh."""

    axes: dict[str, int]  # in order; the product is world_size
    engine: str = "local"
    num_hosts: int = 1
    start_method: Literal["fork", "fresh"] = "fork"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    process_group: bool = True
    torch: bool = True  # False: light ranks, without torch
    env: dict[str, str] = {}
    cwd: str | None = None
    sys_path: tuple[str, ...] = ()  # entries of the controller's sys.path beyond the interpreter's own
    group_timeout_s: float = 1800.0
    threads_per_rank: int | None = None  # OMP_NUM_THREADS; None: cores / ranks on the host
    end_on_error: bool = True  # release ranks that wait in a collective for a rank that has left the call


class GroupPosition(Struct, frozen=True, gc=False, omit_defaults=True):
    """A rank's progress in one process group, counted since the group was last formed."""

    name: str
    ranks: Ranks
    num_started: int  # collectives; sends and receives are not counted
    failed: tuple[int, ...] = ()  # numbers of the collectives that raised on this rank, which has no part in them
    sent: dict[int, int] = {}  # peer -> number of sends to it
    received: dict[int, int] = {}  # peer -> number of receives from it
    received_from_any: int = 0
    is_uncertain: bool = False  # an operation was interrupted while it started
    num_in_flight: int = 0  # of all of these operations
    has_new_collectives: bool = False  # some were started in the call that the query is about


class RankPosition(Struct, frozen=True, gc=False, omit_defaults=True):
    """A rank's position in the order of its collectives."""

    rank: int
    last_call: CallId | None  # the last one that ended on the main thread
    last_status: str  # how that call ended
    cause: str  # "rank 1 raised ValueError: no at line 3"; "" if it succeeded
    is_held_or_idle: bool  # the main thread starts no collective: it is idle, or held until `ResumeCollectives`
    is_idle: bool  # the main thread is idle
    # a thread other than the main one may start collectives: it did before, or it is an actor's
    has_other_collective_threads: bool
    num_groups_created: int  # number of groups that torch has created here
    groups: tuple[GroupPosition, ...]


class RankInfo(Struct, frozen=True, gc=False):
    """The supervisor's view of a rank."""

    rank: int
    state: Literal["starting", "idle", "busy", "silent", "dead"]
    host: str
    pid: int | None = None
    device: str = "cpu"
    call: CallId | None = None  # running now
    cell: str | None = None  # the user's name for that call: "cell 7"
    line: int | None = None  # of that cell
    beat_age_s: float | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    exit: str | None = None  # "killed by SIGKILL", "exited with 3"


class MeshInfo(Struct, frozen=True, gc=False):
    """The data behind `status` and `list`."""

    name: str
    spec: MeshSpec | None  # None: the supervisor is up, but no ranks were requested yet
    ranks: tuple[RankInfo, ...]
    supervisor_pid: int
    started_at: float  # wall clock
    group_generation: int  # how often the process groups were formed
    groups: Literal["none", "forming", "ready", "broken"]
    clients: tuple[str, ...]
    names: tuple[str, ...]  # bound on the ranks by cells, in order of appearance
    backend: str | None = None  # "gloo", "nccl"
    cells_run: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# Commands: controller -> supervisor


class Hello(Message):
    """The first message of every connection. A peer that has not shown the token can send nothing else."""

    token: str
    client: str  # the client's random id, the same on its two sockets
    kind: str  # "kernel", "script", "marimo", "cli"
    pid: int
    channel: Literal["send", "receive"]  # a client sends on one socket and receives on the other
    observer: bool = False  # observes only; its presence does not keep the mesh alive
    orphan_ttl_s: float | None = None  # how long the mesh lives without clients after this one has disconnected


class StartMesh(Message):
    call: CallId
    spec: MeshSpec


class RunCell(Message):
    """Run source in the shells of `ranks`."""

    call: CallId
    ranks: Ranks
    source: str
    execution_count: int | None = None  # shown in tracebacks; None: the rank's own next
    filename: str | None = None  # the file name for compile(); None: the shell's usual one
    label: str = ""  # the user's name for this call: "cell 7"
    store_history: bool = True
    silent: bool = False  # no output, no value
    allow_input: bool = False  # input() may prompt the client
    setup: bool = False  # stored, and run again on ranks that join
    background: bool = False
    inline_limit: int = 0  # the outcome includes the value if it pickles to at most this many bytes


class CallFunction(Message):
    """Call a pickled function. Remote values among the arguments arrive as the rank's own objects."""

    call: CallId
    ranks: Ranks
    function: Payload  # of (fn, args, kwargs)
    label: str = ""
    inline_limit: int = 1 << 20
    retain: bool = True  # store a result above the limit under a ref
    always_retain: bool = False  # store under a ref even if it is small: for handles


class Evaluate(Message):
    """Evaluate a path from a name or a stored object, on the main thread: `x`, `x.shape`, `x[0]`, `x(…)`, `x + y`."""

    call: CallId
    ranks: Ranks
    expression: Payload  # of a `rank.expressions.Expression`
    inline_limit: int = 1 << 20
    retain: bool = True
    always_retain: bool = False  # store under a ref even if it is small: for handles


class SetNames(Message):
    """Bind names in the ranks' namespaces."""

    call: CallId
    ranks: Ranks
    names: tuple[str, ...]
    payload: Payload  # of the tuple of values, in the order of `names`; with `per_rank`, of {rank: tuple}
    per_rank: bool = False


class DeleteNames(Message):
    call: CallId
    ranks: Ranks
    names: tuple[str, ...]


class Complete(Message):
    """Request completions at a cursor. The service thread replies, also while a cell runs."""

    call: CallId
    ranks: Ranks
    code: str
    cursor: int


class Inspect(Message):
    """Request `?` (detail 0) or `??` (detail 1). The service thread replies."""

    call: CallId
    ranks: Ranks
    code: str
    cursor: int
    detail: int = 0


class PreviewNames(Message):
    """Request previews of names or attribute paths, without running user code. The service thread replies."""

    call: CallId
    ranks: Ranks
    names: tuple[str, ...]  # "x", "x.weight"; a reply holds {name: Preview | None}


class Release(Message):
    """Release stored objects and shared segments that this side no longer needs."""

    ranks: Ranks
    refs: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    client: str | None = None  # a disconnected client: release all that it holds, remote tensors too


class Interrupt(Message):
    """Stop what the ranks run. With `target`, only that call, so that no later call is interrupted by mistake.

    Without a target: the running call, whichever client started it, and this client's own queued calls.
    """

    ranks: Ranks  # ranks that are not in the mesh are ignored
    target: CallId | None = None
    client: str | None = None  # the client that stops, filled in by the supervisor
    hard: bool = False  # a second Stop: also kill the ranks that do not return


class InputReply(Message):
    target: CallId
    rank: int
    text: str | None  # None: no user can be prompted; the rank gets EOFError
    interrupted: bool = False


class KillRanks(Message):
    call: CallId
    ranks: Ranks
    signal: int = 9


class QueryStatus(Message):
    call: CallId


class QueryLogs(Message):
    """Request the last output of a rank, also of a dead one."""

    call: CallId
    rank: int
    limit_bytes: int = 1 << 16


class QueryHistory(Message):
    call: CallId


class StopMesh(Message):
    call: CallId
    now: bool = False  # do not wait for running cells


class Ping(Message):
    """A liveness check. A client sends it while it waits and has received nothing for a second."""


class Detach(Message):
    """Detach this client; the mesh lives on for `orphan_ttl_s` seconds, or for ever if None."""

    call: CallId
    orphan_ttl_s: float | None = None


class SetOrphanTtl(Message):
    """Set how long the mesh lives without any client after this one has disconnected, for whatever reason."""

    orphan_ttl_s: float


# Commands: supervisor -> host -> rank, beside those that are forwarded


class StartRanks(Message):
    """To a host: start and own these ranks of the mesh."""

    spec: MeshSpec
    ranks: Ranks
    world_size: int


class FormGroups(Message):
    """To every rank: form the process groups of this generation, the first time or again. Precedes queued commands."""

    call: CallId
    ranks: Ranks
    generation: int
    store_address: str  # of the mesh's store


class AbortCollectives(Message):
    """To ranks in a collective that cannot finish: abort it with this reason. The groups are broken afterwards."""

    ranks: Ranks
    reason: str
    interrupt: bool = False  # the waiting call raises KeyboardInterrupt, not GroupBroken


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


# ---------------------------------------------------------------------------------------------------------------------
# Reports: rank -> host -> supervisor -> controller


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


class RankInputRequest(Message):
    """input() or getpass() on a rank waits for text."""

    rank: int
    call: CallId
    prompt: str
    password: bool = False


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

    @property
    def description(self) -> str:
        """How it ended, as a phrase that follows its name."""
        return self.cause or describe_exit(self.signal, self.exit_code)


class HostReady(Message):
    host: int
    hostname: str
    pid: int
    token: str = ""


class HostFailed(Message):
    host: int
    reason: str


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
    failure: str = ""  # while process groups are formed: which rank failed, and why


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


class CommandReply(Message):
    """The reply to a command that ranks do not handle: status, logs, history, stop."""

    call: CallId
    info: MeshInfo | None = None
    text: str | None = None
    history: tuple[HistoryEntry, ...] = ()


class Refused(Message):
    """A command was refused. Nothing changed."""

    call: CallId | None
    error: str  # class name in meshbook.errors
    text: str


class Welcome(Message):
    info: MeshInfo
    open_calls: tuple[OpenCall, ...] = ()


class MeshReady(Message):
    call: CallId
    info: MeshInfo
    seconds: float


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


class HistoryEntry(Struct, frozen=True, gc=False):
    number: int | None
    label: str
    source: str
    ranks: Ranks
    started_at: float  # wall clock
    seconds: float | None  # None: still running
    status: str  # "running", "ok", "error", "interrupted", "lost"
    setup: bool = False
