"""All messages between Meshbook's processes.

Commands are verbs and are sent downwards (controller, supervisor, host, rank); reports are past tense and are sent
upwards. Each is a msgspec struct tagged with its class name. This package contains structs only: no sockets, no codec,
no behaviour. Ranks travel as sorted tuples of ints; seconds are floats; byte counts are ints.

An unknown field is ignored and a missing one takes its default, so a field may be added without a new protocol version;
any other change needs one (`codec.PROTOCOL`).

`commands` has those of controllers, `host_commands` those of the supervisor, `reports` what is sent upwards,
`monitoring` metrics and snapshots, `mesh_status` what subscribers get, `checkpoints`, `debugging`, `differences`,
`exits`, `logs`, `preemption` and `project` all about these; `payloads`, `output` and `mesh` have what they are made of.
This module says which role may send which message to which.
"""

from __future__ import annotations

from meshbook.wire.messages.actors import *
from meshbook.wire.messages.checkpoints import *
from meshbook.wire.messages.commands import *
from meshbook.wire.messages.debugging import *
from meshbook.wire.messages.differences import *
from meshbook.wire.messages.exits import *
from meshbook.wire.messages.host_commands import *
from meshbook.wire.messages.logs import *
from meshbook.wire.messages.mesh import *
from meshbook.wire.messages.mesh_status import *
from meshbook.wire.messages.monitoring import *
from meshbook.wire.messages.output import *
from meshbook.wire.messages.payloads import *
from meshbook.wire.messages.preemption import *
from meshbook.wire.messages.project import *
from meshbook.wire.messages.reports import *
from meshbook.wire.messages.store import *
from meshbook.wire.messages.tensors import *

# What clients ask of ranks, by the thread that does it: the main thread one at a time, in the order sent.
MainThreadCall = (
    RunCell
    | RunOps
    | CallFunction
    | Evaluate
    | SetNames
    | SaveCheckpoint
    | RestoreCheckpoint
    | DescribeState
    | CompareTensors
    | SetSentinel
)
ServiceThreadCommand = (
    QuerySentinel
    | Complete
    | Inspect
    | PreviewNames
    | OpenActors
    | RelayBytes
    | Release
    | Interrupt
    | InputReply
    | StopInDebugger
    | LeaveDebugger
    | OpenDebugPort
    | TakeSnapshots
)
ClientCommand = (
    MainThreadCall
    | ServiceThreadCommand
    | Hello
    | StartMesh
    | ActorsOpened
    | CheckExits
    | KillRanks
    | KeepSpares
    | HealMesh
    | PlanPreemption
    | ResizeMesh
    | SyncProject
    | QueryStatus
    | QueryHosts
    | QueryLogs
    | QueryHostLog
    | SearchLogs
    | EndLogSearch
    | QueryHistory
    | QueryOutput
    | QueryNewOutput
    | QueryUnattended
    | FollowCall
    | AcknowledgeCells
    | StopMesh
    | Detach
    | Ping
    | SetOrphanTtl
    | Subscribe
)
MainThreadCommand = MainThreadCall | FormGroups | FindSharded | MoveShards | ReplayCells | ShareState | RollBack
RankCommand = (
    MainThreadCommand
    | ServiceThreadCommand
    | ExitsChecked
    | PromptsOpen
    | AbortCollectives
    | QueryPositions
    | HoldCollectives
    | ResumeCollectives
    | RanksLeft
    | WriteCheckpoint
    | WriteCheckpointMetadata
    | DropCheckpoint
    | QueryPreemptionPoint
    | SetPreemptionPoint
    | Exit
)
HostCommand = (
    RankCommand
    | StartRanks
    | PrepareSpares
    | KeepAlive
    | StagedCommand
    | BeginStaged
    | FetchChunk
    | BufferChunk
    | SyncFiles
    | FileParts
    | LeaveMesh
    | ShowNotice
    | CheckExits
    | KillRanks
    | QueryLogs
    | SearchLogs
    | EndLogSearch
    | EndCall
    | EndRanks
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
    | TransportFailed
    | ActorsOpened
    | BytesRelayed
)
HostReport = (
    HostReady
    | HostFailed
    | HostAlive
    | ValuesArrived
    | DataListening
    | FetchChunk
    | BufferChunk
    | FetchFiles
    | FilesSynced
    | HostHeartbeat
    | RankExited
    | CallOutput
    | CallFinished
    | CallProgressed
    | RanksStuck
    | InputRequest
    | CommandReply
    | LogsFound
    | SegmentsReleased
    | SnapshotReply
    | CheckpointWritten
    | TerminationRequested
    | TransportFailed
    | ActorsOpened
    | BytesRelayed
)
SupervisorReport = (
    Welcome
    | MeshStarting
    | MeshReady
    | MeshHealed
    | MeshChanged
    | MeshStopped
    | CallOutput
    | CallFinished
    | RanksStuck
    | InputRequest
    | CommandReply
    | LogsFound
    | Refused
    | SegmentsReleased
    | SnapshotReply
    | MeshUpdate
    | CheckpointCommitted
    | CheckpointDiscarded
    | MeshAnnounced
    | DebuggedCallEnded
    | BytesRelayed
    | Pong
)
AnyMessage = ClientCommand | HostCommand | RankReport | HostReport | SupervisorReport | StoreCommand

QUERIES = (Complete, Inspect, PreviewNames, OpenActors, CheckExits, QuerySentinel, StopInDebugger, OpenDebugPort)
