"""Messages for monitoring ranks: their metrics, and snapshots of what they are doing.

A snapshot is plain data from one rank, taken from inside (the rank's service thread) or from outside (its host), and
the only input of a diagnosis. Times are seconds before the snapshot was taken, so that clocks of different machines are
never compared.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.mesh import RankInfo, SpareInfo
from meshbook.wire.messages.payloads import Frame, Message
from meshbook.wire.messages.reports import RankExited

# Operations between two members of a group, in which the rest of the group takes no part.
POINT_TO_POINT = frozenset(("send", "recv"))

# Operations whose inputs must have one shape on all members. Others may differ: all_to_all and gathers into lists
# accept uneven tensors.
SAME_SHAPE_OPS = frozenset(
    (
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "reduce",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    )
)

# Frames of a stack that are retained at either end, the outermost and the innermost: a recursion has thousands between
# them. Threads per rank whose stacks are reported: a pool of hundreds is at one line.
MAX_END_FRAMES, MAX_STACKS = 100, 64

# The file of the frame that represents an operation on remote tensors; its function is the operation's name. The frame
# before it is the controller's line that issued the operation.
REMOTE_OPERATION_FILE = "<remote operation>"

# Name prefix of the threads that run actors.
ACTOR_THREAD_PREFIX = "actor "

# The file of functions generated from recorded steps, which are not user code.
RECORDED_STEP_FILE = "<recorded step>"


class Gpu(Struct, frozen=True, gc=False, omit_defaults=True):
    """One rank's GPU. Bytes; None where the driver does not report them."""

    name: str = ""
    uuid: str = ""  # the driver's, without "GPU-"
    allocated_bytes: int | None = None  # by torch's allocator, in this process
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    used_bytes: int | None = None  # on the device, by every process
    total_bytes: int | None = None
    utilisation: float | None = None  # 0..100, NVML


class Health(Struct, frozen=True, gc=False, omit_defaults=True):
    """A rank's measurements of itself since its last heartbeat."""

    cpu_percent: float = 0.0  # of one core, all threads
    gil_lag_s: float = 0.0  # the longest time that the service thread waited for the GIL
    num_collectives: int = 0  # started since the rank started
    num_steps: int = 0  # calls of `meshbook.log` since the rank started
    steps_per_s: float | None = None
    gpu: Gpu | None = None


class Scalar(Struct, array_like=True, frozen=True, gc=False):
    """One number that user code passed to `meshbook.log`."""

    name: str
    step: int
    value: float
    age_s: float  # before the report that contains it was made


class ThreadStack(Struct, frozen=True, gc=False, omit_defaults=True):
    """One thread's Python stack, outermost first. Meshbook's own service threads are left out."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    native_id: int | None = None  # the system's thread id
    has_gil: bool | None = None  # from outside only
    is_active: bool | None = None  # on a core when sampled; from outside only
    state: str = ""  # of this thread: "R", "S", "D", from /proc/<pid>/task/<tid>/stat
    syscall: str | None = None  # of this thread: "futex", "read", ...
    waits_on: str | None = None  # what it waits for, if known: "lock `a`"
    held_by: str | None = None  # name of this rank's thread that holds it, if known
    num_truncated: int = 0  # frames left out of a very deep stack ...
    truncated_at: int = 0  # ... between `frames[truncated_at - 1]` and `frames[truncated_at]`


class CollectiveInfo(Struct, frozen=True, gc=False, omit_defaults=True):
    """One collective of a rank's ring, independent of torch."""

    op: str  # "all_reduce", "send", ...
    group: str  # the group's label
    group_ranks: Ranks
    seq: int  # counted within the group and generation, on this rank; sends and receives separately
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    frame: Frame | None = None  # the user's line that started it
    peer: int | None = None  # of send and recv: the other's global rank
    began_s_ago: float = 0.0  # seconds ago
    ended_s_ago: float | None = None  # seconds ago; None: still open
    failure: str | None = None
    generation: int = 0  # of the group's connections: counts restart with each (`ring.Collective.generation`)


class RankMetrics(Struct, frozen=True, gc=False, omit_defaults=True):
    """One rank's measurements and activity since its last report."""

    rank: int
    age_s: float = 0.0  # of this report; its times are seconds before it was made
    health: Health | None = None
    scalars: tuple[Scalar, ...] = ()  # in the order they were logged; if there are too many, the oldest are dropped
    num_dropped: int = 0  # scalars that were logged and are not in this report
    # started, ended or open; oldest first, bounded, open ones always included
    collectives: tuple[CollectiveInfo, ...] = ()


class RankHeartbeat(Message):
    """A rank's service thread sends it once per second, with what it measured since the last one."""

    rank: int
    call: CallId | None  # running on the main thread
    line: int | None  # of the cell
    rss_bytes: int
    peak_rss_bytes: int
    released_segments: tuple[str, ...] = ()  # shared segments of other processes that this rank no longer maps
    metrics: RankMetrics | None = None  # None: the probes are switched off
    modules: tuple[str, ...] = ()  # that it has imported since the last one, in order


class HostHeartbeat(Message):
    """The heartbeats of one host's ranks, folded into one message, once per second."""

    host: int
    ranks: tuple[RankInfo, ...]
    metrics: tuple[RankMetrics, ...] = ()  # of the ranks that sent a heartbeat since the last one
    spares: tuple[SpareInfo, ...] = ()


class ProcessStatus(Struct, frozen=True, gc=False, omit_defaults=True):
    """The system's view of a rank's process."""

    state: str = ""  # "R", "S", "D", "T", "Z": /proc's letters
    syscall: str | None = None  # "futex", "read", "connect", ... of the main thread
    syscall_target: str | None = None  # its argument: a path, "socket 127.0.0.1:80", "pipe"
    cpu_s: float = 0.0
    rss_bytes: int = 0
    children: tuple[tuple[int, str, str], ...] = ()  # pid, state, command line (bounded)
    oom_killed: bool = False


class PendingEndpointCall(Struct, frozen=True, gc=False, omit_defaults=True):
    """A call made by an actor's endpoint that waits for the reply of one of the called actors."""

    actor: str  # its id
    name: str  # the name its mesh was spawned with
    endpoint: str
    node: str  # its process: `ActiveEndpoint.node`
    call: int  # the caller's number for it
    since_s: float = 0.0


class ActiveEndpoint(Struct, frozen=True, gc=False, omit_defaults=True):
    """An endpoint that an actor of this rank is running."""

    actor: str  # its id
    name: str  # the name its mesh was spawned with; its thread's name is ACTOR_THREAD_PREFIX plus this
    node: str  # this rank's process, among those with actors
    endpoint: str
    caller: str = ""  # the process that has called it, and ...
    call: int = 0  # ... its number there; 0: no reply is expected
    is_async: bool = False  # on an event loop: the actor handles the next message while this one awaits
    running_s: float = 0.0
    frames: tuple[Frame, ...] = ()  # where it awaits, if it runs on an event loop; else see its thread's stack
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
    collectives: tuple[CollectiveInfo, ...] = ()  # the last ones, oldest first, open ones always included
    num_collectives: int = 0
    forming: Ranks = ()  # members of the process group that it makes, as far as known; (): of none, or not known
    last_collective: str | None = None  # description of the last one started, if the rank does not reply
    health: Health | None = None
    process: ProcessStatus | None = None
    awaiting_input: bool = False  # waits for the user's reply to input()
    last_status: str | None = None  # how its part of the last call ended, if it is idle: "ok", "error", ...
    last_error: str | None = None  # of that call: "ValueError: ...", with its cell line in `cell_line`
    last_cell: str | None = None  # label of that call
    last_call: CallId | None = None
    endpoints: tuple[ActiveEndpoint, ...] = ()  # that its actors are running
    exited: RankExited | None = None
    problem: str | None = None  # why there are no stacks, and what would help
    starved_s: float = 0.0  # for so long one of its threads waited for a processor, ...
    looked_s: float = 0.0  # ... of so many seconds; 0: not known, as of a rank that has answered


class TakeSnapshots(Message):
    """Take snapshots of ranks.

    Hosts query each rank's service thread, and inspect from outside those that do not reply.
    """

    call: CallId
    ranks: Ranks
    num_collectives: int = 64  # of each rank's ring, beside the open ones


class RankSnapshotReply(Message):
    """A snapshot taken by a rank's service thread, rank to host."""

    rank: int
    call: CallId
    snapshot: RankSnapshot


class SnapshotReply(Message):
    """Snapshots of one host's ranks (host to supervisor), or of all requested ranks (supervisor to controller)."""

    call: CallId
    snapshots: tuple[RankSnapshot, ...]
    silent_hosts: tuple[str, ...] = ()


class Subscribe(Message):
    """Subscribe this client to updates about the ranks, at most `max_updates_per_s` per second; 0 ends it.

    The first reply contains everything that is known. With `max_updates_per_s` 0 and some history, that reply is all: a
    single query.
    """

    call: CallId
    max_updates_per_s: float = 2.0
    history_s: float = 0.0  # the reply includes the numbers of the last seconds
