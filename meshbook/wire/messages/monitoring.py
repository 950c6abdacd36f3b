"""The words for looking at ranks: what they measure of themselves, and snapshots of what they are doing.

A snapshot is plain data from one rank, taken from inside (the rank's service thread) or from outside (its host), and
all that a diagnosis is made of. Times are seconds before the snapshot was taken, so that no two clocks are ever
compared.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.core import Frame, Message, RankExited, RankInfo

# What two members of a group do with each other, while the rest of it knows nothing of that.
POINT_TO_POINT = frozenset(("send", "recv"))

# Of a stack, frames that are kept at either end: what called, and where it is; recursion has thousands between them. Of
# a rank, threads whose stacks are told: a pool of hundreds stands at one line.
MAX_END_FRAMES, MAX_STACKS = 100, 64

# The file of the frame that stands for an operation on remote tensors; its function is the operation's name. The frame
# before it is the controller's line that issued the operation.
REMOTE_OPERATION_FILE = "<remote operation>"

# How the names of threads begin that actors have for themselves.
ACTOR_THREAD_PREFIX = "actor "

# The file of the functions that are generated from recorded steps: nobody's code.
RECORDED_STEP_FILE = "<recorded step>"


class Gpu(Struct, frozen=True, gc=False, omit_defaults=True):
    """One rank's GPU. Bytes; None where the driver does not say."""

    name: str = ""
    uuid: str = ""  # the driver's, without "GPU-"
    allocated_bytes: int | None = None  # by torch's allocator, in this process
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    used_bytes: int | None = None  # on the device, by every process
    total_bytes: int | None = None
    utilisation: float | None = None  # 0..100, NVML


class Health(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a rank measured of itself since its last beat."""

    cpu_percent: float = 0.0  # of one core, all threads
    gil_lag_s: float = 0.0  # the longest that the service thread waited for the GIL
    num_collectives: int = 0  # begun since the rank started
    num_steps: int = 0  # that `meshbook.log` was told of since the rank started
    steps_per_s: float | None = None
    gpu: Gpu | None = None


class Scalar(Struct, array_like=True, frozen=True, gc=False):
    """One number that user code gave to `meshbook.log`."""

    name: str
    step: int
    value: float
    age_s: float  # before the report it came in was made


class ThreadStack(Struct, frozen=True, gc=False, omit_defaults=True):
    """One thread's Python stack, outermost first, service threads of Meshbook's own left out."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    native_id: int | None = None  # the system's number of it
    has_gil: bool | None = None  # from outside only
    is_active: bool | None = None  # on a core when looked at; from outside only
    state: str = ""  # of this thread: "R", "S", "D", from /proc/<pid>/task/<tid>/stat
    syscall: str | None = None  # of this thread: "futex", "read", ...
    waits_on: str | None = None  # what it waits for, where that can be told: "lock `a`"
    held_by: str | None = None  # name of the thread of this rank that has it, where that can be told
    native_function: str | None = None  # the C function it is in, where that could be read; from outside only
    num_truncated: int = 0  # frames left out of a very deep stack ...
    truncated_at: int = 0  # ... between `frames[cut_at - 1]` and `frames[cut_at]`


class CollectiveInfo(Struct, frozen=True, gc=False, omit_defaults=True):
    """One collective of a rank's ring, told without torch."""

    op: str  # "all_reduce", "send", ...
    group: str  # the group's label
    group_ranks: Ranks
    seq: int  # counted within the group and epoch, on this rank; sends and receives by themselves
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    frame: Frame | None = None  # the user's line that began it
    peer: int | None = None  # of send and recv: the other's global rank
    began_s_ago: float = 0.0  # seconds ago
    ended_s_ago: float | None = None  # seconds ago; None: still open
    failure: str | None = None
    generation: int = 0  # of the group's connections: counts start again with each (`ring.Collective.epoch`)


class RankMetrics(Struct, frozen=True, gc=False, omit_defaults=True):
    """What one rank measured, and what it has done, since this was last told of it."""

    rank: int
    age_s: float = 0.0  # of this report; its times are seconds before it was made
    health: Health | None = None
    scalars: tuple[Scalar, ...] = ()  # in the order they were logged; the oldest are dropped where there are too many
    num_dropped: int = 0  # scalars that were logged and are not told
    collectives: tuple[CollectiveInfo, ...] = ()  # begun, ended or open; oldest first, bounded, open ones always


class RankHeartbeat(Message):
    """A rank lives, says its service thread once per second; and what it measured since the last time."""

    rank: int
    call: CallId | None  # running on the main thread
    line: int | None  # of the cell
    rss_bytes: int
    peak_rss_bytes: int
    released_segments: tuple[str, ...] = ()  # shared segments of others that this rank no longer maps
    metrics: RankMetrics | None = None  # None: the probes are switched off


class HostHeartbeat(Message):
    """One host's ranks, folded into one message, once per second."""

    host: int
    ranks: tuple[RankInfo, ...]
    metrics: tuple[RankMetrics, ...] = ()  # of the ranks that beat since the last one


class ProcessStatus(Struct, frozen=True, gc=False, omit_defaults=True):
    """What the system says of a rank's process."""

    state: str = ""  # "R", "S", "D", "T", "Z": /proc's letters
    syscall: str | None = None  # "futex", "read", "connect", ... of the main thread
    syscall_target: str | None = None  # what it is about: a path, "socket 127.0.0.1:80", "pipe"
    cpu_s: float = 0.0
    rss_bytes: int = 0
    children: tuple[tuple[int, str, str], ...] = ()  # pid, state, command line (bounded)
    oom_killed: bool = False


class PendingEndpointCall(Struct, frozen=True, gc=False, omit_defaults=True):
    """A call that an actor's endpoint has made, and whose answer somebody waits for: one of the actors called."""

    actor: str  # its id
    name: str  # what its mesh was spawned as
    endpoint: str
    node: str  # its process: `ActiveEndpoint.node`
    call: int  # the caller's number of it
    since_s: float = 0.0


class ActiveEndpoint(Struct, frozen=True, gc=False, omit_defaults=True):
    """An endpoint that an actor of this rank is in."""

    actor: str  # its id
    name: str  # what its mesh was spawned as; its thread is ACTOR_THREAD and this
    node: str  # this rank's process, among those with actors
    endpoint: str
    caller: str = ""  # the process that has called it, and ...
    call: int = 0  # ... its number there; 0: nobody waits for an answer
    is_async: bool = False  # on an event loop: the actor takes the next message while this one awaits
    running_s: float = 0.0
    frames: tuple[Frame, ...] = ()  # where it awaits, of one on an event loop; else its thread's stack tells
    pending_calls: tuple[PendingEndpointCall, ...] = ()


class RankSnapshot(Struct, frozen=True, gc=False, omit_defaults=True):
    """What one rank is doing."""

    rank: int
    host: str = ""
    pid: int | None = None
    source: Literal["inside", "outside", "none"] = "none"
    call: CallId | None = None  # running now
    cell: str | None = None  # "cell 7"
    file: str | None = None  # the running cell's file name, as in its frames
    cell_line: int | None = None
    running_s: float | None = None  # how long this call has been running
    beat_age_s: float | None = None
    stacks: tuple[ThreadStack, ...] = ()
    collectives: tuple[CollectiveInfo, ...] = ()  # the last ones, oldest first, open ones always among them
    num_collectives: int = 0
    last_collective: str | None = None  # the one it began last, in words, where it could not be asked
    health: Health | None = None
    process: ProcessStatus | None = None
    awaiting_input: bool = False  # waits for the user to answer input()
    last_status: str | None = None  # how its part of the last call ended, when it runs none: "ok", "error", ...
    finished_s_ago: float | None = None  # seconds ago
    last_error: str | None = None  # of that: "ValueError: ...", with its cell line in `cell_line`
    last_cell: str | None = None  # label of that call
    last_call: CallId | None = None
    endpoints: tuple[ActiveEndpoint, ...] = ()  # that its actors are in
    exited: RankExited | None = None
    problem: str | None = None  # why there are no stacks, and what would help


class TakeSnapshots(Message):
    """Look at ranks. Hosts ask each rank's service thread, and look from outside at those that do not answer."""

    call: CallId
    ranks: Ranks
    num_collectives: int = 64  # of each rank's ring, beside the open ones
    stacks: bool = True


class RankSnapshotReply(Message):
    """What a rank's service thread saw, rank to host."""

    rank: int
    call: CallId
    snapshot: RankSnapshot


class SnapshotReply(Message):
    """One host's ranks (host to supervisor), or all that were asked for (supervisor to controller)."""

    call: CallId
    snapshots: tuple[RankSnapshot, ...]
    silent_hosts: tuple[str, ...] = ()


class Subscribe(Message):
    """This client wants to be told what ranks measure, at most `per_s` times a second, until it says 0.

    It is answered at once with everything that is known. With `per_s` 0 and some history that is all: a question.
    """

    call: CallId
    max_updates_per_s: float = 2.0
    history_s: float = 0.0  # the answer brings the numbers of the last seconds along


class MeshUpdate(Message):
    """News for those that watch."""

    timestamp: float  # wall clock
    data: dict[str, Any]  # described in supervisor/telemetry.py
    call: CallId | None = None  # of the Watch that this answers
