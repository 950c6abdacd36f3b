"""What a host knows of one of its ranks: how far it has come, what it runs, what waits for it."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field

from meshbook.host.instructions import Instructions, SendService, SignalRank
from meshbook.host.logring import LogRing
from meshbook.wire import messages
from meshbook.wire.messages import Outcome
from meshbook.wire.stop_timing import STOP_SIGNAL

HEARTBEAT_S = 1.0


@dataclass
class QueuedCommand:
    """A main-thread command that waits for a rank, encoded."""

    call: str
    body: bytes
    is_cancelled: bool = False  # the call has ended; the rank is only notified that it was not run
    is_ready: bool = True  # False: its values are on their way from another machine


@dataclass
class RankRecord:
    """The host's state of one rank. Times are seconds of the agent's monotonic clock."""

    rank: int
    incarnation: int = 0  # how many processes it had before this one
    pid: int | None = None  # None: its process has not been started
    device: str = "cpu"
    work_ready: bool = False
    service_ready: bool = False
    exit_reason: str | None = None  # how it ended
    is_killed_by_us: bool = False  # by SIGKILL, as soon as there is a process
    is_preempted: bool = False  # it was asked to end
    has_actors: bool = False
    is_leaving: bool = False  # it will be a rank of the mesh no more
    queue: deque[QueuedCommand] = field(default_factory=deque)
    service_backlog: list[bytes] = field(default_factory=list)  # for the service thread, until it is ready
    running: QueuedCommand | None = None
    running_since: float = 0.0
    last_call: str | None = None
    num_outputs: int = 0  # pieces of output received in order
    early_outputs: dict[int, messages.RankOutput] = field(default_factory=dict)  # received out of order
    pending_finish: messages.RankFinished | None = None  # waits for output that is still in transit
    log: LogRing = field(default_factory=LogRing)
    pending_notices: list[messages.Notice] = field(default_factory=list)  # shown in the output of the next call
    heartbeat: messages.RankHeartbeat | None = None
    heartbeat_at: float | None = None

    def heartbeat_age_s(self, now: float) -> float | None:
        return None if self.heartbeat_at is None else now - self.heartbeat_at

    def is_heartbeat_older(self, age_s: float, now: float) -> bool:
        """Whether the last heartbeat is older than this; not if there never was one."""
        return self.heartbeat_at is not None and now - self.heartbeat_at > age_s

    def lost_outcome(self) -> Outcome:
        error = messages.RankError(ename="RankLost", evalue=f"rank {self.rank} {self.exit_reason}", traceback=())
        return Outcome(status="lost", error=error)

    def to_service(self, body: bytes) -> Instructions:
        """Send to the service thread, now or when it is ready."""
        if self.service_ready:
            return [SendService(self.rank, body)]
        self.service_backlog.append(body)
        return []

    def to_stop(self) -> Instructions:
        """Send the signal that interrupts what it runs. Before its handler is installed, it would end the process."""
        return self.to_signal(STOP_SIGNAL) if self.service_ready else []

    def to_signal(self, number: int) -> Instructions:
        """Send a signal, if there is a process to send it to; SIGKILL to one that has yet to start, too."""
        if self.exit_reason is not None:
            return []
        self.is_killed_by_us = self.is_killed_by_us or number == signal.SIGKILL
        return [SignalRank(self.rank, number)] if self.pid is not None else []

    def started(self, pid: int) -> Instructions:
        """Its process runs. One that was killed meanwhile ends at once, and its exit is reported like any other."""
        self.pid = pid
        return [SignalRank(self.rank, signal.SIGKILL)] if self.is_killed_by_us else []
