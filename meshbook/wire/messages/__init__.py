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
from meshbook.wire.messages.looking import *
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
    | Peek
    | OpenActors
    | Release
    | Interrupt
    | ReplyInput
    | KillRanks
    | AskStatus
    | AskLogs
    | AskHistory
    | StopMesh
    | Detach
    | Ping
    | SetOrphanTtl
    | TakeSnapshots
    | Watch
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
    | Peek
    | OpenActors
    | Release
    | Interrupt
    | ReplyInput
    | KillRanks
    | AskLogs
    | Unblock
    | AskPositions
    | HoldGroups
    | GroupsChecked
    | RanksLeft
    | Conclude
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
    | Peek
    | OpenActors
    | Release
    | ReplyInput
    | Unblock
    | AskPositions
    | HoldGroups
    | GroupsChecked
    | RanksLeft
    | Interrupt
    | Exit
    | TakeSnapshots
)
RankReport = (
    RankReady
    | RankEnding
    | RankSaid
    | RankFinished
    | RankAnswered
    | RankAsked
    | RankBeat
    | ServiceFailed
    | SnapshotTaken
)
HostReport = (
    HostReady
    | HostFailed
    | HostBeat
    | RankReady
    | RankExited
    | RankBeat
    | CallOutput
    | CallFinished
    | CallProgressed
    | RanksStuck
    | InputRequested
    | Answered
    | Segments
    | SnapshotsTaken
)
SupervisorReport = (
    Welcome
    | MeshReady
    | RanksChanged
    | MeshStopped
    | CallOutput
    | CallFinished
    | CallProgressed
    | RanksStuck
    | InputRequested
    | Answered
    | Refused
    | Segments
    | SnapshotsTaken
    | Watched
    | Pong
)
AnyMessage = ClientCommand | HostCommand | RankReport | HostReport | SupervisorReport | StoreCommand


# Commands that a rank's main thread carries out, one at a time, in the order sent; the rest is the service thread's.
MAIN_THREAD = (FormGroups, RunCell, RunOps, CallFunction, Evaluate, SetNames, DeleteNames)
QUESTIONS = (Complete, Inspect, Peek, OpenActors)
