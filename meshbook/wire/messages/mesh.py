"""What a mesh, its ranks and their process groups look like to who asks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshbook.ids import CallId, Ranks


class ProjectSpec(Struct, frozen=True, gc=False):
    """The project folder that goes to a mesh's machines."""

    root: str  # absolute, on the notebook's machine
    named: tuple[str, ...] = ()  # files and folders in it that go along although git ignores them
    uv: str | None = None  # the folder in it with uv.lock, in which hosts run `uv sync --frozen`; None: no uv


class MeshSpec(Struct, frozen=True, gc=False):
    """The requested configuration of a mesh."""

    axes: dict[str, int]  # in order; the product is world_size
    engine: str = "local"
    on: str = ""  # the engine's machines: "ssh://gpu1,gpu2"
    num_hosts: int = 1
    start_method: Literal["fork", "fresh"] = "fork"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    process_group: bool = True
    torch: bool = True  # False: light ranks, without torch
    env: dict[str, str] = {}
    cwd: str | None = None
    argv: tuple[str, ...] = ()  # sys.argv on ranks, the script's path first; (): [""], as in an interactive Python
    sys_path: tuple[str, ...] = ()  # entries of the controller's sys.path beyond the interpreter's own
    group_timeout_s: float = 1800.0
    threads_per_rank: int | None = None  # OMP_NUM_THREADS; None: cores / ranks on the host
    end_on_error: bool = True  # release ranks that wait in a collective for a rank that has left the call
    log_bytes: int = 256 << 20  # of output that each host keeps on its disk
    lost_after_s: float = 15.0  # without a word, ranks on another machine than the supervisor's
    lease_s: float = 30.0  # without a word from the supervisor, such ranks end by themselves
    project: ProjectSpec | None = None  # whose files ranks on other machines have; None: they have their own


class GpuFacts(Struct, frozen=True, gc=False):
    """A GPU of a machine."""

    name: str
    total_bytes: int
    free_bytes: int
    busy_by: str = ""  # who else computes on it, and ranks leave it alone; "": nobody


class MachineFacts(Struct, frozen=True, gc=False):
    """What a machine says of itself before ranks start on it."""

    machine: str  # an id: two hosts with the same one share memory and processes
    hostname: str
    address: str  # by which other machines reach it, "10.0.0.7"
    executable: str
    meshbook: str  # versions
    python: str
    torch: str | None  # None: not installed
    nccl: str | None
    driver: str | None  # of NVIDIA's GPUs
    num_cpus: int  # that a process may use
    free_memory_bytes: int
    wall_time: float
    gpus: tuple[GpuFacts, ...] = ()


class HostInfo(Struct, frozen=True, gc=False):
    """The supervisor's view of a host."""

    host: int
    name: str  # as the engine names its machine
    state: Literal["starting", "ready", "silent", "lost"]
    ranks: Ranks
    facts: MachineFacts | None = None
    latency_s: float | None = None  # of the last message there and back
    values: Literal["", "directly", "as messages"] = ""  # how they come there; "": by shared memory
    silent_s: float = 0.0  # since when nothing was heard of it
    reason: str = ""  # why it is lost


class CollectiveCall(Struct, array_like=True, frozen=True, gc=False):
    """A collective that a rank has begun, as far as it is the same on all members that run the same code."""

    seq: int  # in its group
    op: str
    file: str = ""  # the user's line; "": not known
    line: int = 0
    caller_file: str = ""  # the line that called that line's function; "": it is in no function of the user's
    caller_line: int = 0
    shapes: str = ""  # of the inputs, "4x8 float32"


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
    new_collectives: tuple[CollectiveCall, ...] = ()  # the last of them


class RankPosition(Struct, frozen=True, gc=False, omit_defaults=True):
    """A rank's position in the order of its collectives."""

    rank: int
    status: str  # how the call that the query is about ended here; "": it has not
    cause: str  # "rank 1 raised ValueError: no at line 3"; "" if it succeeded
    is_held_or_idle: bool  # the main thread starts no collective: it is idle, or held until `ResumeCollectives`
    is_idle: bool  # the main thread is idle
    # a thread other than the main one may start collectives: it did before, or it is an actor's
    has_other_collective_threads: bool
    num_groups_created: int  # number of groups that torch has created here
    groups: tuple[GroupPosition, ...]
    has_begun: bool = True  # the call that the query is about; False: it is queued, or was cancelled before it began


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
    incarnation: int = 0  # how many processes it had before this one
    problem: str | None = None  # why a living rank is of little use: "its CUDA context is dead (…)"
    heals_when: str = ""  # of a dead rank, what %mesh heal waits for: "machine n2 can be reached"; "": nothing


class SpareInfo(Struct, frozen=True, gc=False):
    """A process that waits to become a rank."""

    host: int
    hostname: str
    pid: int | None  # None: it is being started
    state: Literal["starting", "importing", "ready"]
    num_modules: int = 0  # that it has imported
    import_s: float = 0.0  # seconds that took
    private_bytes: int = 0  # of memory that it shares with nobody
    left_out: tuple[tuple[str, str], ...] = ()  # packages and modules that only a rank imports, and why
    former: str = ""  # how the one before it ended: "was killed by SIGKILL"; "": there was none, or it is a rank


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
    num_rank_changes: int = 0  # how often ranks were replaced, or their number changed
    spares: tuple[SpareInfo, ...] = ()
    ends_at: float | None = None  # wall clock, when its machines are taken away; None: not known, or never
