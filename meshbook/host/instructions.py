"""What a host's ledger decides, for its agent to carry out: instructions, in the order in which they are to be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from meshbook.host.run_times import RunTimes
from meshbook.ids import Ranks


class SendWork(Struct, frozen=True):
    """Send an encoded message to a rank's main thread."""

    rank: int
    body: bytes


class SendService(Struct, frozen=True):
    """Send an encoded message to a rank's service thread, which is ready."""

    rank: int
    body: bytes


class SignalRank(Struct, frozen=True):
    rank: int
    signal: int


class ContinueStopped(Struct, frozen=True):
    """Send SIGCONT to those of the ranks whose processes are stopped, and carry out what `report` returns for them."""

    ranks: Ranks
    report: Callable[[Ranks], Instructions]


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """What the system says of a rank's process at one moment."""

    state: str | None  # in the letters of /proc; None: not known
    run_times: RunTimes | None


class InspectProcesses(Struct, frozen=True):
    """Look at the ranks' processes, and carry out what `report` returns for that."""

    ranks: Ranks
    report: Callable[[Mapping[int, ProcessLook]], Instructions]


class SendReport(Struct, frozen=True):
    """Send a report to the supervisor."""

    report: Any  # a messages.HostReport


class SendHeartbeat(Struct, frozen=True):
    """Send the host's heartbeat now, because the reports after it rely on it."""


class KeepOutput(Struct, frozen=True):
    """Keep what a rank has printed, or whole lines about an event of it, for later searches."""

    rank: int
    kind: Literal["stdout", "stderr", "event"]
    text: str


class SetAlarm(Struct, frozen=True):
    """Call `action` with the time then, `after_s` seconds from now, and carry out what it returns."""

    after_s: float
    action: Callable[[float], Instructions]


Instruction = (
    SendWork
    | SendService
    | SignalRank
    | ContinueStopped
    | InspectProcesses
    | SendReport
    | SendHeartbeat
    | KeepOutput
    | SetAlarm
)
Instructions = list[Instruction]
