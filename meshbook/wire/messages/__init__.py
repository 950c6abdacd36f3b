"""All messages between Meshbook's processes.

Commands are verbs and are sent downwards (controller, supervisor, host, rank); reports are past tense and are sent
upwards. Each is a msgspec struct tagged with its class name. This package contains structs only: no sockets, no codec,
no behaviour. Ranks travel as sorted tuples of ints; seconds are floats; byte counts are ints.

An unknown field is ignored and a missing one takes its default, so a field may be added without a new protocol version;
any other change needs one (`codec.PROTOCOL`).

`commands` has those of controllers, `host_commands` those of the supervisor, `reports` what is sent upwards,
`monitoring` metrics and snapshots, `mesh_status` what subscribers get, `checkpoints` and `preemption` all about these;
`payloads`, `output` and `mesh` have what they are made of. This module says which role may send which message to which.
"""

from __future__ import annotations

from meshbook.wire.messages.actors import *
from meshbook.wire.messages.checkpoints import *
from meshbook.wire.messages.commands import *
from meshbook.wire.messages.host_commands import *
from meshbook.wire.messages.mesh import *
from meshbook.wire.messages.mesh_status import *
from meshbook.wire.messages.monitoring import *
from meshbook.wire.messages.output import *
from meshbook.wire.messages.payloads import *
from meshbook.wire.messages.preemption import *
from meshbook.wire.messages.reports import *
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
    | SaveCheckpoint
    | RestoreCheckpoint
    | Complete
    | Inspect
    | PreviewNames
    | OpenActors
    | Release
    | Interrupt
    | InputReply
    | KillRanks
    | HealMesh
    | PlanPreemption
    | ResizeMesh
    | QueryStatus
    | QueryLogs
    | QueryHistory
    | QueryOutput
    | QueryUnattended
    | FollowCall
    | AcknowledgeCells
    | StopMesh
    | Detach
    | Ping
    | SetOrphanTtl
    | TakeSnapshots
    | Subscribe
)
HostCommand = (
    StartRanks
    | LeaveMesh
    | FindSharded
    | FormGroups
    | ReplayCells
    | ShareState
    | RunCell
    | RunOps
    | CallFunction
    | Evaluate
    | SetNames
    | DeleteNames
    | SaveCheckpoint
    | RestoreCheckpoint
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
    | WriteCheckpointMetadata
    | DropCheckpoint
    | EndCall
    | EndRanks
    | QueryPreemptionPoint
    | SetPreemptionPoint
    | RollBack
    | Exit
    | TakeSnapshots
)
RankCommand = (
    FormGroups
    | FindSharded
    | ReplayCells
    | ShareState
    | RunCell
    | RunOps
    | CallFunction
    | Evaluate
    | SetNames
    | DeleteNames
    | SaveCheckpoint
    | RestoreCheckpoint
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
    | WriteCheckpointMetadata
    | DropCheckpoint
    | QueryPreemptionPoint
    | SetPreemptionPoint
    | RollBack
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
    | CheckpointWritten
    | RankTerminating
)
HostReport = (
    HostReady
    | HostFailed
    | HostHeartbeat
    | RankExited
    | RanksExited
    | CallOutput
    | CallFinished
    | CallProgressed
    | RanksStuck
    | InputRequest
    | CommandReply
    | SegmentsReleased
    | SnapshotReply
    | CheckpointWritten
    | TerminationRequested
)
SupervisorReport = (
    Welcome
    | MeshReady
    | MeshHealed
    | MeshChanged
    | MeshStopped
    | CallOutput
    | CallFinished
    | RanksStuck
    | InputRequest
    | CommandReply
    | Refused
    | SegmentsReleased
    | SnapshotReply
    | MeshUpdate
    | CheckpointCommitted
    | CheckpointDiscarded
    | MeshPreempted
    | Pong
)
AnyMessage = ClientCommand | HostCommand | RankReport | HostReport | SupervisorReport | StoreCommand


# Commands that a rank's main thread runs, one at a time, in the order sent; the service thread handles the others.
MAIN_THREAD_COMMANDS = (
    FormGroups,
    FindSharded,
    ReplayCells,
    ShareState,
    RunCell,
    RunOps,
    CallFunction,
    Evaluate,
    SetNames,
    DeleteNames,
    SaveCheckpoint,
    RestoreCheckpoint,
    RollBack,
)
QUERIES = (Complete, Inspect, PreviewNames, OpenActors)
