"""Every word that Meshbook's processes say to each other.

Commands are verbs and go down (controller, supervisor, host, rank); reports are past tense and come up. Each is a
msgspec struct whose tag is its class name. Structs and nothing else: no sockets, no codec, no behaviour. Ranks travel
as sorted tuples of ints; seconds are floats; byte counts are ints.

An unknown field is ignored and a missing one takes its default, so a field may be added without a new protocol
version; anything else needs one (`codec.PROTOCOL`).

`core` has what starting, cells, values and Stop need, `looking` what ranks measure and what they are seen doing. Here
is who may say what to whom.
"""

from __future__ import annotations

from meshbook.wire.messages.actors import *
from meshbook.wire.messages.core import *
from meshbook.wire.messages.monitoring import *
from meshbook.wire.messages.store import *
from meshbook.wire.messages.tensors import *

ClientCommand = (
    Hello
    | StartMesh
    | RunCell
    | RunOps
    | CallFunction
    | Evaluate
    | SetNames
    | DeleteNames
    | Complete
    | Inspect
    | PreviewNames
    | OpenActors
    | Release
    | Interrupt
    | InputReply
    | KillRanks
    | QueryStatus
    | QueryLogs
    | QueryHistory
    | StopMesh
    | Detach
    | Ping
    | SetOrphanTtl
    | TakeSnapshots
    | Subscribe
)
HostCommand = (
    StartRanks
    | FormGroups
    | RunCell
    | RunOps
    | CallFunction
    | Evaluate
    | SetNames
    | DeleteNames
    | Complete
    | Inspect
    | PreviewNames
    | OpenActors
    | Release
    | Interrupt
    | InputReply
    | KillRanks
    | QueryLogs
    | AbortCollectives
    | QueryPositions
    | HoldCollectives
    | ResumeCollectives
    | RanksLeft
    | EndCall
    | Exit
    | TakeSnapshots
)
RankCommand = (
    FormGroups
    | RunCell
    | RunOps
    | CallFunction
    | Evaluate
    | SetNames
    | DeleteNames
    | Complete
    | Inspect
    | PreviewNames
    | OpenActors
    | Release
    | InputReply
    | AbortCollectives
    | QueryPositions
    | HoldCollectives
    | ResumeCollectives
    | RanksLeft
    | Interrupt
    | Exit
    | TakeSnapshots
)
RankReport = (
    RankReady
    | RankExiting
    | RankOutput
    | RankFinished
    | RankReply
    | RankInputRequest
    | RankHeartbeat
    | ServiceFailed
    | RankSnapshotReply
)
HostReport = (
    HostReady
    | HostFailed
    | HostHeartbeat
    | RankReady
    | RankExited
    | RankHeartbeat
    | CallOutput
    | CallFinished
    | CallProgressed
    | RanksStuck
    | InputRequest
    | CommandReply
    | SegmentsReleased
    | SnapshotReply
)
SupervisorReport = (
    Welcome
    | MeshReady
    | MeshChanged
    | MeshStopped
    | CallOutput
    | CallFinished
    | CallProgressed
    | RanksStuck
    | InputRequest
    | CommandReply
    | Refused
    | SegmentsReleased
    | SnapshotReply
    | MeshUpdate
    | Pong
)
AnyMessage = ClientCommand | HostCommand | RankReport | HostReport | SupervisorReport | StoreCommand


# Commands that a rank's main thread carries out, one at a time, in the order sent; the rest is the service thread's.
MAIN_THREAD_COMMANDS = (FormGroups, RunCell, RunOps, CallFunction, Evaluate, SetNames, DeleteNames)
QUERIES = (Complete, Inspect, PreviewNames, OpenActors)
