"""Snapshots of one host's ranks: each is queried, and those that do not reply are inspected from outside.

The agent's loop never blocks here: operations that may block (/proc, py-spy) run on short-lived threads that post their
results, and a request ends after two seconds in any case. This module also stores the ranks' metrics from heartbeat to
heartbeat, because a stopped rank cannot report what it did last.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meshbook.host import procfs, stacks
from meshbook.host.gpus import GpuSampler
from meshbook.host.result_queue import ResultQueue
from meshbook.host.run_times import RunTimes, starved_s
from meshbook.wire import messages
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.messages import (
    CollectiveInfo,
    Health,
    ProcessStatus,
    RankExited,
    RankMetrics,
    RankSnapshot,
    ThreadStack,
)

# Seconds a rank has to reply before it is inspected from outside as well. A rank whose threads share the interpreter
# fairly replies in 5 to 20 ms, on a crowded machine in 50; the complete request should take at most 300.
_INSIDE_TIMEOUT_S = 0.15
# ... unless it is silent already: its last heartbeat is older than this (they come every second).
_SILENT_AFTER_S = 2.0
# Seconds after which the look from outside at a rank that was not silent suffices: one that lets its service thread run
# only now and then, on an overloaded machine, keeps no interpreter lock, and is to say itself what it does.
_LATE_ANSWER_S = 1.0
# Seconds after which a request ends, with the results so far.
_TIMEOUT_S = 2.0
# ... of which py-spy may take this much.
_PY_SPY_TIMEOUT_S = 1.6
# Concurrent py-spy runs: each keeps a core busy for some 30 ms.
_MAX_PY_SPY_RUNS = max(4, os.cpu_count() or 1)

# Collectives of a rank that are stored from its heartbeats, for when it does not reply.
_MAX_RETAINED_COLLECTIVES = 64

# Samples, one per second, of the system's count of out-of-memory kills: a kill is attributed to a rank within this
# time.
_OOM_WINDOW_S = 5

# Limits of what one host heartbeat reports of a rank.
_MAX_REPORTED_SCALARS = 8192
_MAX_REPORTED_COLLECTIVES = 512


@dataclass(frozen=True)
class SnapshotTarget:
    """What the agent knows of a rank to be inspected."""

    rank: int
    pid: int | None  # None: it is being started
    beat_age_s: float | None
    is_dead: bool
    call: str | None = None  # running now
    label: str | None = None
    is_cell: bool = False
    running_s: float | None = None
    last_collective: str | None = None  # from its crash log

    @property
    def is_silent(self) -> bool:
        return self.beat_age_s is None or self.beat_age_s > _SILENT_AFTER_S


@dataclass(frozen=True)
class _ProcessFacts:
    """What /proc reports."""

    process: ProcessStatus | None
    threads: dict[int, tuple[str, str | None]]
    run_times: RunTimes


@dataclass
class _PendingSnapshots:
    """One open request."""

    command: messages.TakeSnapshots
    targets: dict[int, SnapshotTarget]
    process_facts: dict[int, _ProcessFacts] = field(default_factory=dict)
    run_times: dict[int, list[RunTimes]] = field(default_factory=dict)
    inside_snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    outside_stacks: dict[int, tuple[tuple[ThreadStack, ...], str | None]] = field(default_factory=dict)
    inspected_outside: set[int] = field(default_factory=set)  # ranks for which an inspection from outside has started
    timers: list[Timer] = field(default_factory=list)
    is_late: bool = False  # _LATE_ANSWER_S have passed

    def is_complete(self, rank: int) -> bool:
        """Whether nothing remains to wait for; for a process that has exited, the report of its exit does."""
        if rank not in self.process_facts:
            return False
        stacks_seen, _ = self.outside_stacks.get(rank, ((), None))
        may_answer = not self.is_late and not self.targets[rank].is_silent and not self.is_stopped(rank)
        return rank in self.inside_snapshots or (
            not may_answer and (bool(stacks_seen) or (rank in self.outside_stacks and self.process(rank) is not None))
        )

    def is_stopped(self, rank: int) -> bool:
        """Whether the process is stopped by a signal or a debugger, and will not answer."""
        process = self.process(rank)
        return process is not None and process.state in ("T", "t")

    def starved(self, rank: int) -> tuple[float, float]:
        """Return for how many seconds some thread waited for a processor, and of how many that is known."""
        looks = self.run_times.get(rank, [])
        raw_stacks, _ = self.outside_stacks.get(rank, ((), None))
        holder = next((stack.native_id for stack in raw_stacks if stack.has_gil), None)
        return starved_s(looks, holder), looks[-1].at - looks[0].at if looks else 0.0

    def process(self, rank: int) -> ProcessStatus | None:
        """Return the system's status of a process; None if it is unknown or the process has exited."""
        return self.process_facts[rank].process if rank in self.process_facts else None

    def user_stacks(
        self, rank: int, raw_stacks: tuple[ThreadStack, ...], file: str | None, *, is_busy: bool
    ) -> tuple[ThreadStack, ...]:
        """Return the user's part of a rank's stacks, with the system's state of each thread."""
        threads = self.process_facts[rank].threads if rank in self.process_facts else {}
        trimmed = []
        for stack in raw_stacks:
            if stack.is_main and not is_busy:  # it waits for a command, which is not the user's code
                stack = msgspec.structs.replace(stack, frames=(), num_truncated=0, truncated_at=0)
            state, syscall = threads.get(stack.native_id or 0, ("", None))
            trimmed.append(
                msgspec.structs.replace(stacks.trim_to_user_frames(stack, file), state=state, syscall=syscall)
            )
        return tuple(trimmed)


@dataclass
class _RankRecord:
    """What a rank has reported by heartbeats, and how it ended."""

    health: Health | None = None
    collectives: OrderedDict[tuple[object, ...], tuple[CollectiveInfo, float]] = field(default_factory=OrderedDict)
    unsent: RankMetrics | None = None  # for the next host heartbeat
    received_at: float = 0.0
    exited: RankExited | None = None


class SnapshotCollector:
    """Takes snapshots of one host's ranks. Call every method from the loop."""

    def __init__(
        self,
        loop: Loop,
        hostname: str,
        send_to_rank: Callable[[int, bytes], None],
        report: Callable[[messages.SnapshotReply], None],
    ) -> None:
        """Create a collector.

        Args:
            send_to_rank: sends an encoded command to a rank's service thread.
            report: called with the reply to each request.
        """
        self._loop, self._hostname, self._send_to_rank, self._report = loop, hostname, send_to_rank, report
        self._pending: dict[str, _PendingSnapshots] = {}
        self._records: dict[int, _RankRecord] = {}
        self._gpus = GpuSampler()
        self._results = ResultQueue(loop, self._on_result)
        self._py_spy_slots = threading.Semaphore(_MAX_PY_SPY_RUNS)
        self._oom_kills: deque[int] = deque([procfs.num_oom_kills()], maxlen=_OOM_WINDOW_S)

    # ---- requests

    def collect(self, command: messages.TakeSnapshots, body: bytes, targets: list[SnapshotTarget]) -> None:
        """Take snapshots of `targets`; `report` gets them within two seconds."""
        pending = self._pending[command.call] = _PendingSnapshots(command, {target.rank: target for target in targets})
        for target in targets:
            if target.is_dead or target.pid is None:
                continue
            self._send_to_rank(target.rank, body)
            self._run_in_thread(self._read_process, command.call, target.rank, target.pid)
            if target.is_silent:
                self._inspect_outside(pending, target)
        pending.timers = [
            self._loop.call_later(_INSIDE_TIMEOUT_S, lambda: self._inspect_outside(pending, *pending.targets.values())),
            self._loop.call_later(_LATE_ANSWER_S, lambda: self._late(pending)),
            self._loop.call_later(_TIMEOUT_S, lambda: self._finish(pending)),
        ]
        self._finish_if_complete(pending)

    def reply_received(self, message: messages.RankSnapshotReply) -> None:
        """Record the snapshot that a rank has taken of itself."""
        pending = self._pending.get(message.call)
        if pending is not None and message.rank in pending.targets:
            pending.inside_snapshots[message.rank] = message.snapshot
            self._finish_if_complete(pending)

    def _inspect_outside(self, pending: _PendingSnapshots, *targets: SnapshotTarget) -> None:
        if pending.command.call not in self._pending:
            return
        for target in targets:
            rank, pid = target.rank, target.pid
            if (
                rank in pending.inspected_outside
                or rank in pending.inside_snapshots
                or self._is_dead(target)
                or pid is None
            ):
                continue
            pending.inspected_outside.add(rank)
            self._run_in_thread(self._read_stacks, pending.command.call, rank, pid)
        self._finish_if_complete(pending)

    def _late(self, pending: _PendingSnapshots) -> None:
        """Take a last look at the ranks that have not answered: whether they could."""
        pending.is_late = True
        for rank in pending.outside_stacks.keys() - pending.inside_snapshots.keys():
            self._run_in_thread(self._read_run_times, pending.command.call, rank, pending.targets[rank].pid)

    def _read_process(self, call: str, rank: int, pid: int) -> None:
        facts = _ProcessFacts(procfs.read_process(pid), procfs.read_threads(pid), procfs.read_run_times(pid))
        self._results.put((call, rank, facts))

    def _read_run_times(self, call: str, rank: int, pid: int) -> None:
        self._results.put((call, rank, procfs.read_run_times(pid)))

    def _read_stacks(self, call: str, rank: int, pid: int) -> None:
        self._read_process(call, rank, pid)  # again: now it is known to be stuck
        if not self._py_spy_slots.acquire(timeout=_TIMEOUT_S):  # the request has ended by now
            return
        try:
            if call not in self._pending:  # answered while this waited: by the rank itself, or without it
                return
            found = procfs.dump_python_stacks(pid, _PY_SPY_TIMEOUT_S)
            self._read_run_times(call, rank, pid)
            self._results.put((call, rank, found))
        finally:
            self._py_spy_slots.release()

    def _on_result(self, result: tuple[str, int, Any]) -> None:
        call, rank, found = result
        pending = self._pending.get(call)
        if pending is None:
            return
        if isinstance(found, _ProcessFacts):
            pending.process_facts[rank] = found
            pending.run_times.setdefault(rank, []).append(found.run_times)
            if pending.is_stopped(rank):
                self._inspect_outside(pending, pending.targets[rank])
        elif isinstance(found, RunTimes):
            pending.run_times.setdefault(rank, []).append(found)
        else:
            pending.outside_stacks[rank] = found
        self._finish_if_complete(pending)

    def _finish_if_complete(self, pending: _PendingSnapshots) -> None:
        if pending.command.call in self._pending and all(
            self._is_dead(target) or target.pid is None or pending.is_complete(rank)
            for rank, target in pending.targets.items()
        ):
            self._finish(pending)

    def _finish(self, pending: _PendingSnapshots) -> None:
        if self._pending.pop(pending.command.call, None) is None:
            return
        for timer in pending.timers:
            timer.cancel()
        snapshots = tuple(self._snapshot(pending, target) for target in pending.targets.values())
        self._report(messages.SnapshotReply(call=pending.command.call, snapshots=snapshots))

    # ---- snapshots

    def _snapshot(self, pending: _PendingSnapshots, target: SnapshotTarget) -> RankSnapshot:
        if self._is_dead(target):
            return self._dead_snapshot(pending, target)
        if target.pid is None:
            return RankSnapshot(rank=target.rank, host=self._hostname, problem="it is being started")
        snapshot = pending.inside_snapshots.get(target.rank)
        if snapshot is None:
            return self._outside_snapshot(pending, target)
        return msgspec.structs.replace(
            snapshot,
            host=self._hostname,
            pid=target.pid,
            beat_age_s=target.beat_age_s,
            stacks=pending.user_stacks(target.rank, snapshot.stacks, snapshot.file, is_busy=snapshot.call is not None),
            health=self._health(target.rank) or snapshot.health,
            process=pending.process(target.rank),
        )

    def _outside_snapshot(self, pending: _PendingSnapshots, target: SnapshotTarget) -> RankSnapshot:
        raw_stacks, problem = pending.outside_stacks.get(target.rank, ((), None))
        user_stacks = pending.user_stacks(target.rank, raw_stacks, None, is_busy=target.call is not None)
        main = next((stack for stack in user_stacks if stack.is_main and stack.frames), None)
        file = main.frames[0].file if main is not None and target.is_cell else None
        lines = [frame.line for frame in main.frames if frame.file == file] if main is not None else []
        if target.rank not in pending.outside_stacks:
            problem = "it did not answer, and could not be looked at from outside within 2 s"
        health, (starved, looked_s) = self._health(target.rank), pending.starved(target.rank)
        return RankSnapshot(
            rank=target.rank,
            host=self._hostname,
            pid=target.pid,
            starved_s=starved,
            looked_s=looked_s,
            source="outside" if raw_stacks else "none",
            call=target.call,  # type: ignore[arg-type]
            cell=target.label or None,
            file=file,
            cell_line=lines[-1] if lines else None,
            running_s=target.running_s,
            beat_age_s=target.beat_age_s,
            stacks=user_stacks,
            collectives=self._retained_collectives(target.rank, pending.command.num_collectives),
            num_collectives=0 if health is None else health.num_collectives,
            last_collective=target.last_collective,
            health=health,
            process=pending.process(target.rank),
            problem=problem,
        )

    def _dead_snapshot(self, pending: _PendingSnapshots, target: SnapshotTarget) -> RankSnapshot:
        exited = self._record_of(target.rank).exited
        health = self._health(target.rank)
        return RankSnapshot(
            rank=target.rank,
            host=self._hostname,
            pid=target.pid,
            collectives=self._retained_collectives(target.rank, pending.command.num_collectives),
            num_collectives=0 if health is None else health.num_collectives,
            last_collective=None if exited is None else exited.last_collective,
            health=health,
            process=ProcessStatus(state="X", oom_killed=exited is not None and exited.oom_killed),
            exited=exited,
            problem="its process is gone",
        )

    def _retained_collectives(self, rank: int, limit: int) -> tuple[CollectiveInfo, ...]:
        """Return the collectives that a rank has reported, with their times as of now."""
        now = self._loop.clock.monotonic()
        retained = list(self._record_of(rank).collectives.values())
        split = max(0, len(retained) - limit)
        retained = [entry for entry in retained[:split] if entry[0].ended_s_ago is None] + retained[split:]
        return tuple(
            msgspec.structs.replace(
                collective,
                began_s_ago=collective.began_s_ago + now - received_at,
                ended_s_ago=None if collective.ended_s_ago is None else collective.ended_s_ago + now - received_at,
            )
            for collective, received_at in retained
        )

    # ---- heartbeats and exits

    def add_metrics(self, metrics: RankMetrics | None) -> None:
        """Record the metrics of a heartbeat, if it has any."""
        if metrics is None:
            return
        record, now = self._record_of(metrics.rank), self._loop.clock.monotonic()
        for collective in metrics.collectives:
            record.collectives[_collective_key(collective)] = collective, now
        while len(record.collectives) > _MAX_RETAINED_COLLECTIVES:
            oldest_ended = (
                key for key, (collective, _) in record.collectives.items() if collective.ended_s_ago is not None
            )
            record.collectives.pop(next(oldest_ended, next(iter(record.collectives))))
        gpu = None if metrics.health is None else metrics.health.gpu
        if gpu is not None and gpu.uuid:
            self._loop.act(lambda: self._gpus.add(gpu.uuid))
        if record.unsent is not None:  # the second heartbeat since the last host heartbeat
            metrics = _merge_metrics(record.unsent, metrics, now - record.received_at)
        record.unsent, record.received_at, record.health = metrics, now, metrics.health

    def drain_metrics(self) -> tuple[RankMetrics, ...]:
        """Return the metrics since the last call, for the host's heartbeat."""
        now = self._loop.clock.monotonic()
        metrics = []
        for rank, record in sorted(self._records.items()):
            if record.unsent is not None:
                aged = msgspec.structs.replace(
                    record.unsent, age_s=now - record.received_at, health=self._health(rank) or record.unsent.health
                )
                metrics.append(aged)
                record.unsent = None
        self._oom_kills.append(self._loop.observe(procfs.num_oom_kills))
        return tuple(metrics)

    def rank_started(self, rank: int) -> None:
        """Reset the record of a rank that has a new process."""
        self._records[rank] = _RankRecord()

    def has_recent_oom_kill(self) -> bool:
        """Whether the system has killed a process for memory in the last seconds."""
        return self._loop.observe(procfs.num_oom_kills) > self._oom_kills[0]

    def rank_exited(self, exited: RankExited) -> None:
        """Record the exit of a rank's process."""
        self._record_of(exited.rank).exited = exited
        for pending in list(self._pending.values()):
            self._finish_if_complete(pending)

    def take_over(self) -> None:
        """Go on in a process that was forked from the collector's, without its threads: open requests end in time."""
        self._gpus = GpuSampler()
        self._results.take_over()
        self._py_spy_slots = threading.Semaphore(_MAX_PY_SPY_RUNS)

    def close(self) -> None:
        """Drop open requests and ignore the results of running threads."""
        for pending in self._pending.values():
            for timer in pending.timers:
                timer.cancel()
        self._pending.clear()
        self._results.close()
        self._gpus.close()

    # ---- helpers

    def _record_of(self, rank: int) -> _RankRecord:
        return self._records.setdefault(rank, _RankRecord())

    def _is_dead(self, target: SnapshotTarget) -> bool:
        exited = self._record_of(target.rank).exited
        return target.is_dead or (exited is not None and exited.pid == target.pid)

    def _health(self, rank: int) -> Health | None:
        """Return a rank's last metrics, with the driver's data on its GPU."""
        health = self._record_of(rank).health
        if health is None or health.gpu is None:
            return health
        uuid = health.gpu.uuid
        sample = self._loop.observe(lambda: self._gpus.last_sample(uuid))
        if sample is None:
            return health
        gpu = msgspec.structs.replace(
            health.gpu, used_bytes=sample.used_bytes, total_bytes=sample.total_bytes, utilisation=sample.utilisation
        )
        return msgspec.structs.replace(health, gpu=gpu)

    def _run_in_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, name="meshbook-look", daemon=True)
        self._loop.act(thread.start)


def _collective_key(collective: CollectiveInfo) -> tuple[object, ...]:
    """Return a key that is unique among a rank's collectives.

    Sends are counted separately, and counts restart with new connections.
    """
    return collective.group, collective.generation, collective.op, collective.seq


def _merge_metrics(older: RankMetrics, newer: RankMetrics, interval_s: float) -> RankMetrics:
    """Merge two reports of one rank, with times relative to the newer."""
    scalars = tuple(
        messages.Scalar(scalar.name, scalar.step, scalar.value, scalar.age_s + interval_s) for scalar in older.scalars
    )
    repeated = {_collective_key(collective) for collective in newer.collectives}
    collectives = tuple(
        msgspec.structs.replace(
            collective,
            began_s_ago=collective.began_s_ago + interval_s,
            ended_s_ago=None if collective.ended_s_ago is None else collective.ended_s_ago + interval_s,
        )
        for collective in older.collectives
        if _collective_key(collective) not in repeated
    )
    health = newer.health
    if health is not None and older.health is not None:  # the longer wait of the two; everything else from the newer
        lag_s = max(health.gil_lag_s, older.health.gil_lag_s)
        health = msgspec.structs.replace(health, gil_lag_s=lag_s)
    return msgspec.structs.replace(
        newer,
        health=health,
        scalars=(scalars + newer.scalars)[-_MAX_REPORTED_SCALARS:],
        num_dropped=older.num_dropped
        + newer.num_dropped
        + max(0, len(scalars) + len(newer.scalars) - _MAX_REPORTED_SCALARS),
        collectives=(collectives + newer.collectives)[-_MAX_REPORTED_COLLECTIVES:],
    )
