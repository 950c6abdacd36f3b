"""The words for meshes, cells, values and what ranks say."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from meshbook.errors import describe_exit
from meshbook.ids import CallId, Ranks


class Message(Struct, tag=True, frozen=True, gc=False):
    """What every message is: immutable, and named on the wire by its class."""


# ---------------------------------------------------------------------------------------------------------------------
# Payloads: Python objects on their way


class SharedBuffer(Struct, tag="shared", frozen=True, gc=False):
    """Bytes in an anonymous memory file of a process on this machine, readable through /proc/<pid>/fd/<fd>."""

    pid: int
    fd: int
    offset: int
    nbytes: int
    segment: str  # the owner's name for it; quoted back in `Release`


class InlineBuffer(Struct, tag="inline", frozen=True, gc=False):
    """Bytes that ride in the message itself."""

    data: bytes


class Payload(Struct, frozen=True, gc=False):
    """One pickled object: protocol 5, its large buffers out of band, in the order the pickle wants them."""

    pickled: bytes  # empty: in the last of the buffers
    buffers: tuple[SharedBuffer | InlineBuffer, ...] = ()
    splice_offsets: tuple[
        int, ...
    ] = ()  # where in `pickled` the last buffers belong that are parts of it (large bytes, text)


class TensorMeta(Struct, frozen=True, gc=False):
    """What can be said of a tensor without moving it."""

    shape: tuple[int, ...]  # local shape, or the global one if `placements` is set
    dtype: str  # "float32", without "torch."
    device: str  # "cpu", "cuda:0"
    requires_grad: bool = False
    placements: str | None = None  # "(Shard(dim=0),)" of a DTensor; None for a plain tensor
    local_shape: tuple[int, ...] | None = None  # of a DTensor
    stride: tuple[int, ...] | None = None  # in items, of `shape`; None: it has none (sparse), or it was not asked for


class Preview(Struct, frozen=True, gc=False):
    """A value as a reader sees it: enough to show it and to tell whether two ranks hold the same."""

    kind: Literal["plain", "tensor", "object", "none"]
    type: str  # "int", "torch.Tensor", "numpy.ndarray", "__main__.Model"
    text: str  # bounded repr
    html: str | None = None  # bounded _repr_html_
    data: dict[str, Any] = {}  # other MIME types of a rich display, bounded; bytes already in base64
    metadata: dict[str, Any] = {}
    tensor: TensorMeta | None = None
    digest: str | None = None  # equal digests mean equal content even where the text is cut; None: not computed
    truncated: bool = False


class Value(Struct, frozen=True, gc=False):
    """The value of an expression on a rank."""

    preview: Preview
    ref: str | None = None  # the rank keeps the object under this name until `Release`; None: it is all in `payload`
    payload: Payload | None = None  # the object itself, when small


class Frame(Struct, frozen=True, gc=False):
    """One line of a Python stack."""

    file: str
    line: int
    function: str


class RankError(Struct, frozen=True, gc=False):
    """An exception as a rank saw it."""

    ename: str  # class name, "ZeroDivisionError"
    evalue: str  # str(exception)
    traceback: tuple[str, ...]  # rendered by IPython on the rank, ANSI colours, cell source lines
    frames: tuple[Frame, ...] = ()  # outermost first; what equal failures are recognised by
    pickled: bytes | None = None  # the exception itself, when it can be pickled and is small
    notes: tuple[str, ...] = ()
    released_from: str | None = None  # "all_reduce at line 4": it waited there for ranks that had left the call


# ---------------------------------------------------------------------------------------------------------------------
# Output of a cell


class Text(Struct, tag="text", frozen=True, gc=False):
    """A piece of stdout or stderr as it was written: may hold part of a line, many lines, carriage returns."""

    stream: Literal["stdout", "stderr"]
    text: str


class Display(Struct, tag="display", frozen=True, gc=False):
    """display_data, or update_display_data when `update`."""

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str | None = None
    update: bool = False


class ClearOutput(Struct, tag="clear", frozen=True, gc=False):
    wait: bool = False


class Notice(Struct, tag="notice", frozen=True, gc=False):
    """Something Meshbook itself has to say in the output: text cut, a rank that would not stop."""

    text: str


OutputItem = Text | Display | ClearOutput | Notice


class VaryingNumber(Struct, array_like=True, frozen=True, gc=False):
    """A number of a folded line that is not the same on all its ranks."""

    position: int  # which of the line's numbers, counted from 0
    texts: tuple[str, ...]  # as each rank wrote it, in the order of the line's ranks


class Line(Struct, tag="line", frozen=True, gc=False, omit_defaults=True):
    """One folded line of text: said by `ranks`, equal on all of them, or equal but for numbers.

    `text` is ready to be shown, without the ranks and without the line end; where numbers differ it shows their range.
    """

    ranks: Ranks
    stream: Literal["stdout", "stderr"]
    text: str
    live: bool = False  # an unfinished line's state, such as a progress bar's; replaces these ranks' earlier live lines
    end: str = "\n"  # "" where the last line of a cell had no line end
    first_text: str = ""  # the line as its first rank wrote it, where numbers differ; host to supervisor only
    varying_numbers: tuple[
        VaryingNumber, ...
    ] = ()  # those numbers, so that lines of several hosts fold exactly; as `lead`


class RankDisplay(Struct, tag="rank_display", frozen=True, gc=False):
    """A display, an update of one, or clear_output, with the ranks that made the same one."""

    ranks: Ranks
    item: Display | ClearOutput | Notice


FoldedItem = Line | RankDisplay


# ---------------------------------------------------------------------------------------------------------------------
# What a rank's part in a call came to


class Outcome(Struct, frozen=True, gc=False):
    """How a call ended on one rank; equal outcomes of many ranks are folded."""

    status: Literal["ok", "error", "interrupted", "lost", "skipped"]
    value: Value | None = None  # of the last expression; None: there was none
    error: RankError | None = None  # for "error" and "interrupted"; for "lost" the text of what is known
    bound_names: tuple[str, ...] = ()  # names of the namespace that the cell bound, changed or rebound
    deleted_names: tuple[str, ...] = ()  # names that it deleted
    groups_broken: bool = False  # a process group of this rank cannot be used until it is re-formed
    reply: Any = None  # of the calls that are questions (Complete, Inspect, Peek): plain data


class OutcomeGroup(Struct, frozen=True, gc=False):
    """Ranks whose outcome is the same."""

    ranks: Ranks
    outcome: Outcome


# ---------------------------------------------------------------------------------------------------------------------
# The mesh, described


class MeshSpec(Struct, frozen=True, gc=False):
    """What a mesh was asked to be."""

    axes: dict[str, int]  # in order; the product is world_size
    engine: str = "local"
    num_hosts: int = 1
    start_method: Literal["fork", "fresh"] = "fork"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    process_group: bool = True
    torch: bool = True  # False: light ranks, without torch
    env: dict[str, str] = {}
    cwd: str | None = None
    sys_path: tuple[str, ...] = ()  # what the controller's sys.path has beyond the interpreter's own
    group_timeout_s: float = 1800.0
    threads_per_rank: int | None = None  # OMP_NUM_THREADS; None: cores / ranks on the host
    end_on_error: bool = True  # ranks that wait in a collective for one that has left the call are released


class GroupPosition(Struct, frozen=True, gc=False, omit_defaults=True):
    """How far a rank has come in one process group, counted from the last time that the group was formed."""

    name: str
    ranks: Ranks
    num_started: int  # collectives, sends and receives not counted
    failed: tuple[int, ...] = ()  # numbers of those that raised on this rank: it has no part in them
    sent: dict[int, int] = {}  # peer -> number of sends to it
    received: dict[int, int] = {}  # peer -> number of receives from it
    received_from_any: int = 0
    is_uncertain: bool = False  # one of these was cut short as it began
    num_in_flight: int = 0  # of all of these: under way
    has_new_collectives: bool = False  # some were begun in the call that is asked about


class RankPosition(Struct, frozen=True, gc=False, omit_defaults=True):
    """Where a rank is in the order of its collectives."""

    rank: int
    last_call: CallId | None  # that ended last on the main thread
    last_status: str  # how that ended
    cause: str  # "rank 1 raised ValueError: no at line 3"; "" if it went well
    is_held_or_idle: bool  # the main thread begins no collective: it runs nothing, or is held until `ResumeCollectives`
    is_idle: bool  # the main thread runs nothing
    has_other_collective_threads: (
        bool  # a thread beside the main one may begin collectives: it did before, or is an actor's
    )
    num_groups_created: int  # how many groups torch has made here
    groups: tuple[GroupPosition, ...]


class RankInfo(Struct, frozen=True, gc=False):
    """What the supervisor knows of a rank."""

    rank: int
    state: Literal["starting", "idle", "busy", "silent", "dead"]
    host: str
    pid: int | None = None
    device: str = "cpu"
    call: CallId | None = None  # running now
    cell: str | None = None  # how people know that call: "cell 7"
    line: int | None = None  # of that cell
    beat_age_s: float | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    exit: str | None = None  # "killed by SIGKILL", "exited with 3"


class MeshInfo(Struct, frozen=True, gc=False):
    """What `status` and `list` show."""

    name: str
    spec: MeshSpec | None  # None: the supervisor is up, no ranks were asked for yet
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
    """First word of every connection. Nothing else is heard from a peer that has not shown the token."""

    token: str
    client: str  # the client's random id: its two sockets say the same
    kind: str  # "kernel", "script", "marimo", "cli"
    pid: int
    channel: Literal["send", "receive"]  # a client speaks on one socket and is answered on the other
    observer: bool = False  # looks on; its presence does not keep the mesh alive
    orphan_ttl_s: float | None = None  # how long the mesh lives on without clients once this one is gone


class StartMesh(Message):
    call: CallId
    spec: MeshSpec


class RunCell(Message):
    """Run source in the shells of `ranks`."""

    call: CallId
    ranks: Ranks
    source: str
    execution_count: int | None = None  # execution count to show in tracebacks; None: the rank's own next
    filename: str | None = None  # what compile() is given; None: the shell's usual name
    label: str = ""  # how people know this call: "cell 7"
    store_history: bool = True
    silent: bool = False  # no output, no value
    allow_input: bool = False  # input() may ask the client
    setup: bool = False  # kept, to be run again on ranks that join
    background: bool = False
    inline_limit: int = 0  # a value that pickles to at most this many bytes comes along in the outcome


class CallFunction(Message):
    """Call a pickled function. Remote values among the arguments arrive as the rank's own objects."""

    call: CallId
    ranks: Ranks
    function: Payload  # of (fn, args, kwargs)
    label: str = ""
    inline_limit: int = 1 << 20
    retain: bool = True  # a result above the limit is kept under a ref
    always_retain: bool = False  # under a ref even if it is small: for handles


class Evaluate(Message):
    """Follow a path from a name or a kept object, on the main thread: `x`, `x.shape`, `x[0]`, `x(…)`, `x + y`."""

    call: CallId
    ranks: Ranks
    expression: Payload  # of a rank.paths.Path
    inline_limit: int = 1 << 20
    retain: bool = True
    always_retain: bool = False  # under a ref even if it is small: for handles


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
    """Completions at a cursor. Answered by the service thread, cell or no cell."""

    call: CallId
    ranks: Ranks
    code: str
    cursor: int


class Inspect(Message):
    """`?` (detail 0) and `??` (detail 1). Answered by the service thread."""

    call: CallId
    ranks: Ranks
    code: str
    cursor: int
    detail: int = 0


class PreviewNames(Message):
    """Previews of names, or of attribute paths, without running user code. Answered by the service thread."""

    call: CallId
    ranks: Ranks
    names: tuple[str, ...]  # "x", "x.weight"; an answer holds {name: Preview | None}


class Release(Message):
    """Kept objects and shared segments that nobody on this side needs any more."""

    ranks: Ranks
    refs: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    client: str | None = None  # that is gone: all that was held for it, remote tensors too


class Interrupt(Message):
    """Stop what the ranks run. Only `target`, if given: a call that has ended is not interrupted by mistake.

    Without a target it is whatever runs, whoever began it, and of what waits behind it that which is the client's own.
    """

    ranks: Ranks  # those that the mesh does not have are left out
    target: CallId | None = None
    client: str | None = None  # who stops, filled in by the supervisor
    hard: bool = False  # a second Stop: also kill the ranks that do not come back


class InputReply(Message):
    target: CallId
    rank: int
    text: str | None  # None: there is nobody to ask; the rank gets EOFError
    interrupted: bool = False


class KillRanks(Message):
    call: CallId
    ranks: Ranks
    signal: int = 9


class QueryStatus(Message):
    call: CallId


class QueryLogs(Message):
    """The last output of a rank, also of a dead one."""

    call: CallId
    rank: int
    limit_bytes: int = 1 << 16


class QueryHistory(Message):
    call: CallId


class StopMesh(Message):
    call: CallId
    now: bool = False  # do not wait for running cells


class Ping(Message):
    """Are you there? A client asks when it waits for something and has heard nothing for a second."""


class Detach(Message):
    """This client leaves; the mesh stays for `orphan_ttl_s` seconds, or for ever when None."""

    call: CallId
    orphan_ttl_s: float | None = None


class SetOrphanTtl(Message):
    """How long the mesh may live without any client once this one is gone, however it goes."""

    orphan_ttl_s: float


# Commands: supervisor -> host -> rank, beside those that are passed on


class StartRanks(Message):
    """To a host: start these ranks of the mesh and keep them."""

    spec: MeshSpec
    ranks: Ranks
    world_size: int


class FormGroups(Message):
    """To every rank: make the process groups of this epoch, the first time or again. Goes before queued commands."""

    call: CallId
    ranks: Ranks
    generation: int
    store_address: str  # address of the mesh's store


class AbortCollectives(Message):
    """To ranks in a collective that cannot finish: give up on it, with this reason. Groups are broken afterwards."""

    ranks: Ranks
    reason: str
    interrupt: bool = False  # the waiter sees KeyboardInterrupt, not GroupBroken


class QueryPositions(Message):
    """To ranks' service threads, after a call that did not end well on all its ranks, or on ranks that have left one in
    which others go on: where they are in the order of their collectives. The answer is a `RankPosition`."""

    call: CallId
    ranks: Ranks
    about_call: CallId


class HoldCollectives(Message):
    """To ranks' service threads: a call is being stopped. From its end on collectives wait for `ResumeCollectives`,
    also on ranks that are done with it already: what they begin could meet what others have not yet been stopped in."""

    ranks: Ranks
    about_call: CallId


class ResumeCollectives(Message):
    """To ranks' service threads: a call that did not end well is over everywhere, and these groups are out of step.
    Ranks whose next collective waits for this word go on."""

    ranks: Ranks
    about_call: CallId
    generation: int
    broken_groups: tuple[str, ...] = ()
    reason: str = ""


class RanksLeft(Message):
    """To ranks that work on a call: others have left it, and come to no collective of it any more."""

    call: CallId
    ranks: Ranks
    left_positions: tuple[RankPosition, ...]


class EndCall(Message):
    """To a host: end its part of this call now. Ranks that have not come back from it are told as skipped."""

    call: CallId


class Exit(Message):
    """To a rank: end in order; the second time, that its last words were heard. To a host: end every rank, then
    itself."""

    ranks: Ranks = ()
    grace_s: float = 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Reports: rank -> host -> supervisor -> controller


class RankReady(Message):
    """A rank's process is up and listens; its groups are formed by its first command. Sent on both of its sockets."""

    rank: int
    pid: int
    device: str
    token: str


class RankExiting(Message):
    """A rank has said everything, and ends; its host answers with `Exit`, so that nothing said is lost on the way."""

    rank: int


class ServiceFailed(Message):
    """An exception in a rank's service thread, which goes on. Sent once for each kind."""

    rank: int
    activity: str  # what it was at, "carrying out Release"
    error: str  # one line
    traceback: str


class RankOutput(Message):
    """Output of a running call, rank to host. `seq` counts from 1 within the rank."""

    rank: int
    call: CallId | None
    seq: int
    items: tuple[OutputItem, ...]


class RankFinished(Message):
    """A rank's part in a call is over, with the output that had not been sent yet."""

    rank: int
    call: CallId
    outcome: Outcome
    seconds: float
    items: tuple[OutputItem, ...] = ()
    last_output_seq: int = 0  # the last RankSaid before this; the host waits for it
    released_segments: tuple[str, ...] = ()  # shared segments of others that this rank no longer maps


class RankReply(Message):
    """From the service thread: the answer to Complete, Inspect, Peek."""

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
    """A rank's process is gone."""

    rank: int
    pid: int
    exit_code: int | None  # None: ended by a signal
    signal: int | None
    host: str
    last_lines: tuple[str, ...]  # of what it printed, C and C++ included
    last_collective: str | None  # "all_reduce #41 at cell 7, line 3", if known
    oom_killed: bool = False  # the system was out of memory, and killed it
    cause: str | None = None  # what took it along, "ended with its host, which ..."; then there is no code or signal

    @property
    def description(self) -> str:
        """How it ended, in words that follow its name."""
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
    """Shared segments that a rank has let go of."""

    rank: int
    segments: tuple[str, ...]


class CallOutput(Message):
    """Folded output of a call, in order."""

    call: CallId
    items: tuple[FoldedItem, ...]


class CallProgressed(Message):
    """Ranks of an open call that are done; sent at most a few times per second."""

    call: CallId
    done: Ranks
    failure: str = ""  # of process groups that are being formed: which rank could not, and why


class Pong(Message):
    """The answer to Ping."""


class RanksStuck(Message):
    """Ranks of an open call that have not come back from a Stop."""

    call: CallId
    ranks: Ranks
    reason: str  # `rank 1 (pid 7) is in C code that keeps the GIL`


class CallFinished(Message):
    """Every rank's part is over."""

    call: CallId
    outcomes: tuple[OutcomeGroup, ...]
    seconds: float  # the slowest rank's
    rank_seconds: dict[int, float] | None = None  # per rank, when the mesh is small (at most 64 ranks)
    lost: tuple[RankExited, ...] = ()
    items: tuple[FoldedItem, ...] = ()  # output that had not been sent yet


class InputRequest(Message):
    call: CallId
    rank: int
    prompt: str
    password: bool


class CommandReply(Message):
    """The answer to a question that is not asked of ranks: status, logs, history, stop."""

    call: CallId
    info: MeshInfo | None = None
    text: str | None = None
    history: tuple[HistoryEntry, ...] = ()


class Refused(Message):
    """A command that was not carried out. Nothing changed."""

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
    """News about the mesh, to every client: a rank died, groups broke or were re-formed, cells bound names."""

    info: MeshInfo
    exited: tuple[RankExited, ...] = ()


class MeshStopped(Message):
    reason: str


class OpenCall(Struct, frozen=True, gc=False):
    call: CallId
    label: str
    ranks: Ranks
    client: str
    seconds: float  # since it was asked for


class HistoryEntry(Struct, frozen=True, gc=False):
    number: int | None
    label: str
    source: str
    ranks: Ranks
    started_at: float  # wall clock
    seconds: float | None  # None: still running
    status: str  # "running", "ok", "error", "interrupted", "lost"
    setup: bool = False
