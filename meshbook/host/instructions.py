"""What a host's ledger decides, for its agent to carry out: instructions, in the order in which they are to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshbook.ids import Ranks


@dataclass(frozen=True)
class SendWork:
    """Send an encoded message to a rank's main thread."""

    rank: int
    body: bytes


@dataclass(frozen=True)
class SendService:
    """Send an encoded message to a rank's service thread, which is ready."""

    rank: int
    body: bytes


@dataclass(frozen=True)
class SignalRank:
    rank: int
    signal: int


@dataclass(frozen=True)
class ContinueStopped:
    """Send SIGCONT to those of the ranks whose processes are stopped, and carry out what `report` returns for them."""

    ranks: Ranks
    report: Callable[[Ranks], Instructions]


@dataclass(frozen=True)
class InspectStuck:
    """Look at the processes' states, and call `HostLedger.stuck` with them."""

    ranks: Ranks


@dataclass(frozen=True)
class SendReport:
    """Send a report to the supervisor."""

    report: Any  # a messages.HostReport


@dataclass(frozen=True)
class SendHeartbeat:
    """Send the host's heartbeat now, because the reports after it rely on it."""


@dataclass(frozen=True)
class SetAlarm:
    """Call `action` with the time then, `after_s` seconds from now, and carry out what it returns."""

    after_s: float
    action: Callable[[float], Instructions]


Instruction = (
    SendWork | SendService | SignalRank | ContinueStopped | InspectStuck | SendReport | SendHeartbeat | SetAlarm
)
Instructions = list[Instruction]
