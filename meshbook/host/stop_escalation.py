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

from meshbook.host.instructions import (
    ContinueStopped,
    InspectProcesses,
    Instructions,
    ProcessLook,
    SendReport,
    SetAlarm,
)
from meshbook.host.open_calls import OpenCalls
from meshbook.host.rank_record import HEARTBEAT_S, QueuedCommand, RankRecord
from meshbook.host.run_times import RunTimes, starved_s
from meshbook.ids import CallId, Ranks, client_of_call, name_ranks
from meshbook.wire import codec, messages
from meshbook.wire.messages import Outcome, RankDisplay
from meshbook.wire.stop_timing import (
    ABORT_AFTER_S,
    KILL_AFTER_S,
    KILL_STARVED_AFTER_S,
    SIGINT_DEBOUNCE_S,
    SIGINT_REPEATS_S,
    STUCK_AFTER_S,
)

# The part of a Stop's time for which a thread of a rank waited for a processor, from which that is why it is late.
_STARVED_SHARE = 0.8
# A signal that is sent has come to the rank after so many seconds.
_TRANSIT_S = 0.05
# Seconds between looks whether such a rank has had a processor since.
_LOOK_AGAIN_S = 0.25


class StopAction(enum.Enum):
    INTERRUPT = "STOP_SIGNAL, and SIGCONT to a stopped process"
    ABORT = "have the service thread abort the groups"
    REPORT_STUCK = "report the ranks that have not returned, and why"
    KILL = "SIGKILL"


class StopStep(NamedTuple):
    after_s: float
    action: StopAction


_REPEATS = tuple(StopStep(delay_s, StopAction.INTERRUPT) for delay_s in SIGINT_REPEATS_S)

# Later steps of a first Stop and of a second one, in order of time. `StopEscalation.interrupt` takes the step at 0:
# STOP_SIGNAL, and with a second Stop the groups are aborted.
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
        looks: at the processes of its ranks.
    """

    began_at: float
    targets: tuple[tuple[RankRecord, QueuedCommand], ...]
    continued: set[int] = field(default_factory=set)
    looks: defaultdict[int, list[RunTimes]] = field(default_factory=lambda: defaultdict(list))

    def note(self, processes: Mapping[int, ProcessLook]) -> Instructions:
        """Keep a look at the processes."""
        for rank, process in processes.items():
            if process.run_times is not None:
                self.looks[rank].append(process.run_times)
        return []

    def starved(self, rank: int) -> tuple[float, float] | None:
        """Return for how many seconds a rank waited for a processor, and of how many; None: not for a large part."""
        looks = self.looks[rank]
        looked_s = looks[-1].at - looks[0].at if looks else 0.0
        waited_s = starved_s(looks)
        return (waited_s, looked_s) if 0.0 < _STARVED_SHARE * looked_s <= waited_s else None

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
                todo += [*_interrupt_by_id(record, hard=command.hard), *record.to_stop()]
        stop = Stop(now, tuple(targets))
        todo.append(self._continue_stopped(stop, tuple(record.rank for record, _ in targets)))
        if command.hard:
            todo += self._stop_step(stop, StopAction.ABORT, now)
        for after_s, action in SECOND_STOP if command.hard else FIRST_STOP:
            todo.append(SetAlarm(after_s, lambda then, action=action: self._stop_step(stop, action, then)))  # type: ignore[misc]
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
                cancelled[queued.call] = cancelled.get(queued.call) or cancelled_command(pending.command)
                record.queue[record.queue.index(queued)] = cancelled[queued.call]
            else:
                record.queue.remove(queued)
            todo += self._calls.finish_rank(queued.call, record.rank, Outcome(status="interrupted"), now)
        return todo

    def _stop_step(self, stop: Stop, action: StopAction, now: float) -> Instructions:
        """A step of a Stop's escalation, for the ranks that have not returned."""
        records = stop.unreturned()
        ranks = tuple(record.rank for record in records)
        todo: Instructions = []
        match action:
            case StopAction.INTERRUPT:
                # Ranks ignore a signal that follows soon after one that worked for the same Stop. One that is late,
                # because this host stood still, would end the user's clean-up; what names the call does not.
                is_late = now - stop.began_at > SIGINT_DEBOUNCE_S - _TRANSIT_S
                for record in records:
                    todo += _interrupt_by_id(record) if is_late else record.to_stop()
                todo += [self._continue_stopped(stop, ranks), InspectProcesses(ranks, stop.note)]
            case StopAction.ABORT:
                for record in records:
                    assert record.running is not None  # it has not returned
                    running = CallId(record.running.call)
                    abort = messages.AbortCollectives((record.rank,), "interrupted", interrupt=True, call=running)
                    todo += record.to_service(codec.encode_body(abort))
            case StopAction.REPORT_STUCK:
                todo.append(InspectProcesses(ranks, lambda processes: self.stuck(stop, processes, now)))
            case StopAction.KILL:
                todo.append(InspectProcesses(ranks, lambda processes: self._kill(stop, processes, KILL_AFTER_S)))
        return todo

    def _kill(self, stop: Stop, processes: Mapping[int, ProcessLook], after_s: float) -> Instructions:
        """Kill ranks, but for those that got no processor to come back in: they have until KILL_STARVED_AFTER_S."""
        stop.note(processes)
        starved = [rank for rank in processes if after_s < KILL_STARVED_AFTER_S and stop.starved(rank) is not None]
        todo: Instructions = []
        for call, group in self._by_call(rank for rank in processes if rank not in starved).items():
            late = f"did not come back within {after_s:.2g} s and {_were(group)} killed"
            todo.append(_notice(call, group, f"second Stop: {name_ranks(group)} {late}"))
            for rank in group:
                todo += self._ranks[rank].to_signal(signal.SIGKILL)

        def again(then: float) -> Instructions:
            late = tuple(record.rank for record in stop.unreturned() if record.rank in starved)
            return [InspectProcesses(late, lambda processes: self._kill(stop, processes, after_s + _LOOK_AGAIN_S))]

        return [*todo, *([SetAlarm(_LOOK_AGAIN_S, again)] if starved else [])]

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

    def stuck(self, stop: Stop, processes: Mapping[int, ProcessLook], now: float) -> Instructions:
        """Report the ranks that a Stop has not brought back, whose processes these are."""
        stop.note(processes)
        todo: Instructions = []
        for call, group in self._by_call(processes).items():
            by_reason = defaultdict[str, list[int]](list)
            for rank in group:
                reason = _describe_stuck(self._ranks[rank], processes[rank].state, stop.starved(rank), now)
                by_reason[reason].append(rank)
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


def _interrupt_by_id(record: RankRecord, *, hard: bool = False) -> Instructions:
    """Have a rank's service thread interrupt the call that the rank runs, if nothing has interrupted that yet.

    Args:
        hard: a second Stop.
    """
    assert record.running is not None
    one = messages.Interrupt(ranks=(record.rank,), target=CallId(record.running.call), hard=hard)
    return record.to_service(codec.encode_body(one))


def _notice(call: str, ranks: Ranks, text: str) -> SendReport:
    item = RankDisplay(ranks=ranks, item=messages.Notice(text))
    return SendReport(messages.CallOutput(call=call, items=(item,)))  # type: ignore[arg-type]


def _were(ranks: Ranks) -> str:
    return "was" if len(ranks) == 1 else "were"


def _describe_stuck(record: RankRecord, state: str | None, starved: tuple[float, float] | None, now: float) -> str:
    """Return why a rank does not return from a Stop, as seen from outside, as the end of a sentence.

    Args:
        starved: for how many seconds it waited for a processor, and of how many; None: that is not why.
    """
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
    if starved is not None:
        waited = f"has waited for a processor for {starved[0]:.1f} of {starved[1]:.1f} s"
        return f"(pid {pid}) {waited}, because its machine is overloaded, and may come back yet{at}"
    if record.is_heartbeat_older(1.5 * HEARTBEAT_S, now):
        return f"(pid {pid}) is in C code that keeps the GIL{at}"
    return f"(pid {pid}) is in C code, or in code that catches KeyboardInterrupt{at}"


def _is_target(command: messages.Interrupt, call: str) -> bool:
    """Whether a Stop also cancels a queued call: the named one, or without a target those of the client that stops."""
    if command.target is not None:
        return command.target == call
    return command.client in (None, client_of_call(call))


def cancelled_command(command: messages.RunOps) -> QueuedCommand:
    """Return the command for ranks that must not run it."""
    cancelled = msgspec.structs.replace(command, fetch=None, is_cancelled=True)
    return QueuedCommand(command.call, codec.encode_body(cancelled), is_cancelled=True)
