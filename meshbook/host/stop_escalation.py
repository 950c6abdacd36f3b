"""What a host does to the ranks that run a call that is stopped, and when: the host's rows of `wire.stop_timing`. Pure.

Later steps are for the ranks that run the same command as when the Stop came; one that has returned is left alone.
"""

from __future__ import annotations

import enum
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from meshbook.host.instructions import ContinueStopped, InspectStuck, Instructions, SendReport, SetAlarm
from meshbook.host.open_calls import OpenCalls
from meshbook.host.rank_record import HEARTBEAT_S, QueuedCommand, RankRecord
from meshbook.ids import CallId, Ranks, client_of_call, name_ranks
from meshbook.wire import codec, messages
from meshbook.wire.messages import Outcome, RankDisplay
from meshbook.wire.stop_timing import ABORT_AFTER_S, KILL_AFTER_S, SIGINT_REPEATS_S, STUCK_AFTER_S


class StopAction(enum.Enum):
    INTERRUPT = "SIGINT, and SIGCONT to a stopped process"
    ABORT = "have the service thread abort the groups"
    REPORT_STUCK = "report the ranks that have not returned, and why"
    KILL = "SIGKILL"


class StopStep(NamedTuple):
    after_s: float
    action: StopAction


_REPEATS = tuple(StopStep(delay_s, StopAction.INTERRUPT) for delay_s in SIGINT_REPEATS_S)

# Later steps of a first Stop and of a second one, in order of time. `StopEscalation.interrupt` takes the step at 0:
# SIGINT, and with a second Stop the groups are aborted.
FIRST_STOP = (
    *_REPEATS[:2],
    StopStep(ABORT_AFTER_S, StopAction.ABORT),
    *_REPEATS[2:],
    StopStep(STUCK_AFTER_S, StopAction.REPORT_STUCK),
)
SECOND_STOP = (*_REPEATS, StopStep(KILL_AFTER_S, StopAction.KILL))


@dataclass(frozen=True)
class Stop:
    """One Stop: the ranks that it signalled, each with the command that it ran then.

    Attributes:
        continued: ranks that it has let go on, which was reported.
    """

    targets: tuple[tuple[RankRecord, QueuedCommand], ...]
    continued: set[int] = field(default_factory=set)

    def unreturned(self) -> list[RankRecord]:
        """The ranks that still run the command of then."""
        return [rank for rank, queued in self.targets if rank.running is queued and rank.exit_reason is None]


class StopEscalation:
    """Stops of the calls of a host's ranks."""

    def __init__(self, ranks: Mapping[int, RankRecord], calls: OpenCalls) -> None:
        self._ranks, self._calls = ranks, calls

    def interrupt(self, command: messages.Interrupt, now: float) -> Instructions:
        """Take back what waits of a call, interrupt the ranks that run it, and schedule the later steps of the Stop."""
        todo: Instructions = []
        targets: list[tuple[RankRecord, QueuedCommand]] = []
        cancelled: dict[str, QueuedCommand] = {}
        for record in [self._ranks[rank] for rank in command.ranks if rank in self._ranks]:
            if record.exit_reason is not None:
                continue
            todo += self._take_back(record, command, cancelled, now)
            if record.running is not None and command.target in (None, record.running.call):
                targets.append((record, record.running))
                # By its id, which also works before the rank has read the command from its socket; and by a signal,
                # which needs no service thread that is able to run.
                one = messages.Interrupt(ranks=(record.rank,), target=record.running.call)  # type: ignore[arg-type]
                todo += record.to_service(codec.encode_body(one))
                todo += record.to_signal(signal.SIGINT)
        stop = Stop(tuple(targets))
        todo.append(self._continue_stopped(stop, tuple(record.rank for record, _ in targets)))
        if command.hard:
            todo += self._stop_step(stop, StopAction.ABORT)
        for after_s, action in SECOND_STOP if command.hard else FIRST_STOP:
            todo.append(SetAlarm(after_s, lambda then, action=action: self._stop_step(stop, action)))  # type: ignore[misc]
        return todo

    def _take_back(
        self, record: RankRecord, command: messages.Interrupt, cancelled: dict[str, QueuedCommand], now: float
    ) -> Instructions:
        """Take the commands that a Stop is meant for out of a rank's queue.

        Args:
            cancelled: the cancelled commands of this Stop by call, which its ranks share.
        """
        todo: Instructions = []
        for queued in [one for one in record.queue if _is_target(command, one.call) and not one.is_cancelled]:
            pending = self._calls.get(queued.call)
            if pending is not None and isinstance(pending.command, messages.RunOps):
                # Other ranks may have changed tensors by it: this one must be notified that it has not.
                cancelled[queued.call] = cancelled.get(queued.call) or _cancelled(pending.command)
                record.queue[record.queue.index(queued)] = cancelled[queued.call]
            else:
                record.queue.remove(queued)
            todo += self._calls.finish_rank(queued.call, record.rank, Outcome(status="interrupted"), now)
        return todo

    def _stop_step(self, stop: Stop, action: StopAction) -> Instructions:
        """A step of a Stop's escalation, for the ranks that have not returned."""
        records = stop.unreturned()
        ranks = tuple(record.rank for record in records)
        todo: Instructions = []
        match action:
            case StopAction.INTERRUPT:
                # Ranks ignore a signal that follows soon after one that worked for the same Stop
                # (`stop_timing.SIGINT_DEBOUNCE_S`).
                for record in records:
                    todo += record.to_signal(signal.SIGINT)
                todo.append(self._continue_stopped(stop, ranks))
            case StopAction.ABORT:
                for record in records:
                    assert record.running is not None  # it has not returned
                    running = CallId(record.running.call)
                    abort = messages.AbortCollectives((record.rank,), "interrupted", interrupt=True, call=running)
                    todo += record.to_service(codec.encode_body(abort))
            case StopAction.REPORT_STUCK:
                todo.append(InspectStuck(ranks))
            case StopAction.KILL:
                for call, group in self._by_call(ranks).items():
                    late = f"did not come back within {KILL_AFTER_S:.0f} s and {_were(group)} killed"
                    text = f"second Stop: {name_ranks(group)} {late}"
                    todo.append(_notice(call, group, text))
                    for rank in group:
                        todo += self._ranks[rank].to_signal(signal.SIGKILL)
        return todo

    def _continue_stopped(self, stop: Stop, ranks: Ranks) -> ContinueStopped:
        return ContinueStopped(ranks, lambda continued: self._continued(stop, continued))

    def _continued(self, stop: Stop, ranks: Ranks) -> Instructions:
        """Ranks were stopped by a signal, and a Stop has let them go on. Reported once for each."""
        new = [rank for rank in ranks if rank not in stop.continued]
        stop.continued.update(new)
        return [
            _notice(
                call, group, f"{name_ranks(group)} {_were(group)} stopped (SIGSTOP), and let go on (SIGCONT) by Stop"
            )
            for call, group in self._by_call(new).items()
        ]

    def stuck(self, states: Mapping[int, str | None], now: float) -> Instructions:
        """Report the ranks that a Stop has not brought back.

        Args:
            states: of their processes, by rank, in the letters of /proc; None: not known.
        """
        todo: Instructions = []
        for call, group in self._by_call(states).items():
            by_reason = defaultdict[str, list[int]](list)
            for rank in group:
                by_reason[_describe_stuck(self._ranks[rank], states[rank], now)].append(rank)
            where = "; ".join(f"{name_ranks(ranks)} {reason}" for reason, ranks in by_reason.items())
            todo.append(SendReport(messages.RanksStuck(call=call, ranks=group, reason=where)))  # type: ignore[arg-type]
        return todo

    def _by_call(self, ranks: Iterable[int]) -> dict[str, Ranks]:
        """Those of the ranks that run something, by the call that they run."""
        found = defaultdict[str, list[int]](list)
        for rank in ranks:
            if (running := self._ranks[rank].running) is not None:
                found[running.call].append(rank)
        return {call: tuple(group) for call, group in found.items()}


def _notice(call: str, ranks: Ranks, text: str) -> SendReport:
    item = RankDisplay(ranks=ranks, item=messages.Notice(text))
    return SendReport(messages.CallOutput(call=call, items=(item,)))  # type: ignore[arg-type]


def _were(ranks: Ranks) -> str:
    return "was" if len(ranks) == 1 else "were"


def _describe_stuck(record: RankRecord, state: str | None, now: float) -> str:
    """Return why a rank does not return from a Stop, as seen from outside, as the end of a sentence."""
    pid = record.pid or 0
    line = None if record.heartbeat is None else record.heartbeat.line
    at = "" if line is None else f", at line {line} of the cell"
    match state:
        case "t":
            return f"(pid {pid}) is held by a debugger"
        case "D":
            return f"(pid {pid}) waits in the system, for a disk or a driver, where no signal reaches it"
        case "T":
            return f"(pid {pid}) stops itself (SIGSTOP) again and again{at}"
    if record.is_heartbeat_older(1.5 * HEARTBEAT_S, now):
        return f"(pid {pid}) is in C code that keeps the GIL{at}"
    return f"(pid {pid}) is in C code, or in code that catches KeyboardInterrupt{at}"


def _is_target(command: messages.Interrupt, call: str) -> bool:
    """Whether a Stop also cancels a queued call: the named one, or without a target those of the client that stops."""
    if command.target is not None:
        return command.target == call
    return command.client in (None, client_of_call(call))


def _cancelled(command: messages.RunOps) -> QueuedCommand:
    """Return the command for ranks that must not run it."""
    cancelled_command = msgspec.structs.replace(command, fetch=None, is_cancelled=True)
    return QueuedCommand(command.call, codec.encode_body(cancelled_command), is_cancelled=True)
