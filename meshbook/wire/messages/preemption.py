"""Messages about preemption: processes of a mesh are asked to end (SIGTERM), and what is saved before they do."""

from __future__ import annotations

from meshbook.ids import CallId, Ranks
from meshbook.wire.messages.payloads import Message

# Commands: controller -> supervisor


class PlanPreemption(Message):
    """From now on, what is done between a SIGTERM and the end. Replaces the plan before it."""

    call: CallId
    path: str  # absolute, as in SaveCheckpoint; "": nothing is saved
    names: tuple[str, ...]
    grace_s: float  # from the SIGTERM until ranks must have ended
    resize: bool = False  # if the highest ranks are to end, the mesh goes on without them, instead of a save


# Commands: supervisor -> host -> rank


class QueryPreemptionPoint(Message):
    """To service threads: how often has this call asked whether it was preempted? The reply is `{"asked": number}`.

    From then on it waits where it asks again, until `SetPreemptionPoint` comes.
    """

    call: CallId
    ranks: Ranks
    about_call: CallId


class SetPreemptionPoint(Message):
    """To service threads: the call is preempted from this time on that it asks, on all its ranks alike."""

    ranks: Ranks
    about_call: CallId
    at: int | None  # counted from 1; None: it is not preempted
    reason: str  # "rank 2 received SIGTERM"


class RollBack(Message):
    """To all ranks: load the last snapshot of the elastic loop that one of these calls has left in the middle.

    No calls: of any loop that was cut off, and has one of these names in its state.

    The reply is `{"names": [names that were loaded], "step": number}`; no names: there is no such snapshot.
    """

    call: CallId
    ranks: Ranks
    about_calls: tuple[CallId, ...]
    names: tuple[str, ...] = ()


class EndRanks(Message):
    """To hosts: these ranks end in order, as preempted ones. A host that received SIGTERM ends with its last rank."""

    ranks: Ranks


# Reports: rank -> host


class RankTerminating(Message):
    """This rank's process received SIGTERM. It goes on."""

    rank: int


# Reports: host -> supervisor


class TerminationRequested(Message):
    """These ranks received SIGTERM, or their host or fork server did."""

    ranks: Ranks


# Reports: supervisor -> controllers


class MeshAnnounced(Message):
    """What all users of a mesh are to hear: a SIGTERM and what came of it, or when its job will end."""

    ranks: Ranks
    text: str
