"""Commands of a controller. The supervisor passes those that name ranks on to hosts, and these to ranks."""

from __future__ import annotations

from typing import Literal

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.mesh import MeshSpec
from meshbook.wire.messages.payloads import Message, Payload
from meshbook.wire.messages.project import ProjectFile

# Which lines of several ranks become one: equal ones and those that differ in numbers, equal ones only, or none.
Folding = Literal["numbers", "equal", "off"]


class Hello(Message):
    """The first message of every connection. A peer that has not shown the token can send nothing else."""

    token: str
    client: str  # the client's random id, the same on its two sockets
    kind: str  # "kernel", "script", "marimo", "cli"; an agent's or a web client's with its name, "mcp:claude-code"
    pid: int
    channel: Literal["send", "receive"]  # a client sends on one socket and receives on the other
    observer: bool = False  # observes only; its presence does not keep the mesh alive
    orphan_ttl_s: float | None = None  # how long the mesh lives without clients after this one has disconnected


class StartMesh(Message):
    call: CallId
    spec: MeshSpec
    files: tuple[ProjectFile, ...] = ()  # of the spec's project


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
    allow_input: bool = False  # input() and the debugger may prompt the client
    setup: bool = False  # stored, and run again on ranks that join
    inline_limit: int = 0  # the outcome includes the value if it pickles to at most this many bytes
    fold: Folding = "numbers"
    stop_first: bool = False  # the debugger stops at its first line
    chosen_at: int | None = None  # `MeshInfo.num_rank_changes` when all ranks were chosen; None: these were asked for
    record_bytes: int = 0  # keep what a replay of it needs, up to this many bytes per rank; 0: do not


class CallFunction(Message):
    """Call a pickled function. Remote values among the arguments arrive as the rank's own objects."""

    call: CallId
    ranks: Ranks
    function: Payload  # of (fn, args, kwargs)
    label: str = ""
    inline_limit: int = 1 << 20
    retain: bool = True  # store a result above the limit under a ref
    always_retain: bool = False  # store under a ref even if it is small: for handles
    allow_input: bool = False  # input() and the debugger may prompt the client
    chosen_at: int | None = None  # see `RunCell`
    record_bytes: int = 0  # see `RunCell`


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
    payload: Payload  # of the tuple of values, in the order of `names`
    chosen_at: int | None = None  # see `RunCell`


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


class KeepSpares(Message):
    """Keep processes ready on each host that ranks of `HealMesh` and `ResizeMesh` can be; 0 ends them."""

    call: CallId
    num: int


class HealMesh(Message):
    """Start new processes in the place of ranks that have exited; the others keep all they have."""

    call: CallId
    replay: bool = True  # run the setup cells, and the imports and definitions of other cells, on the new ranks
    share: bool = True  # copy what is proven to be what they held
    # names to copy where the others are alike; None: all. Where no rank is lost, to those that were healed last.
    copy: tuple[str, ...] | None = ()


class ResizeMesh(Message):
    """Change the number of ranks. Those above it leave, new ones join; the others keep what they hold."""

    call: CallId
    axes: dict[str, int]  # of the mesh afterwards, in order


class QueryStatus(Message):
    call: CallId


class QueryHosts(Message):
    call: CallId


class QueryLogs(Message):
    """Request the last output of a rank, also of a dead one."""

    call: CallId
    rank: int
    limit_bytes: int = 1 << 16


class QueryHostLog(Message):
    """Request the last words of a host's agent, and of what has started it, also of one that is lost or never came."""

    call: CallId
    host: str  # its name, or its number
    limit_bytes: int = 1 << 16


class QueryHistory(Message):
    call: CallId


class QueryOutput(Message):
    """Request what is kept of the cells with this number: several clients, and a restarted one, count from 1."""

    call: CallId
    number: int


class QueryNewOutput(Message):
    """Request what is kept of cells' output after a place in the output of all of them (`KeptItem.place`)."""

    call: CallId
    since: int | None = None  # the oldest items after this place; None: the newest items
    target: CallId | None = None  # of this cell, with its end; None: of all cells
    max_items: int = 1000


class QueryUnattended(Message):
    """Request the running cells, and (as history) those that ended after their client was gone, until acknowledged."""

    call: CallId


class FollowCall(Message):
    """Receive the output and the end of a cell whose client is gone, beginning with what was printed since."""

    call: CallId  # the cell's own


class AcknowledgeCells(Message):
    """The user knows now that these cells ended without their client."""

    calls: tuple[CallId, ...]


class StopMesh(Message):
    call: CallId


class Ping(Message):
    """A liveness check. A client sends it while it waits and has received nothing for a second."""


class Detach(Message):
    """Detach this client; the mesh lives on for `orphan_ttl_s` seconds, or for ever if None."""

    call: CallId
    orphan_ttl_s: float | None = None


class SetOrphanTtl(Message):
    """Set how long the mesh lives without any client after this one has disconnected, for whatever reason."""

    orphan_ttl_s: float
