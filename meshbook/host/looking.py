"""Looking at one host's ranks: each is asked, and those that do not answer are looked at from outside.

The agent's loop never waits here: what may take time (/proc, py-spy) runs on short-lived threads that post what they
found, and a look is over after two seconds whatever they do. Also keeps what ranks measure from beat to beat, because a
rank that has stopped cannot say what it did last.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meshbook.host import outside, stacks
from meshbook.host.gpus import GpuSampler
from meshbook.wire import messages
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.messages import CollectiveSeen, Health, Measured, Process, RankExited, RankSnapshot, ThreadStack

# Seconds a rank has to answer before it is looked at from outside as well. A rank whose threads share the interpreter
# fairly answers in 5 to 20 ms, on a crowded machine in 50; the whole look should take no more than 300.
_INSIDE_S = 0.15
# ... unless it is silent already: its last beat is older than this (they come every second).
_LATE_S = 2.0
# Seconds after which a look is over, with what is known by then.
_LOOK_S = 2.0
# ... of which py-spy may take this much.
_PY_SPY_S = 1.6
# Looks from outside at one time: each keeps a core busy for some 30 ms.
_AT_ONCE = max(4, os.cpu_count() or 1)

# Collectives of a rank that are remembered from its beats, for when it cannot be asked.
_REMEMBERED = 64

# Looks back, one per second, at how often the system has run out of memory: a killed rank's end is noticed within this.
_OOM_SECONDS = 5

# What one host beat tells of a rank at most.
_MAX_SCALARS = 8192
_MAX_COLLECTIVES = 512


@dataclass(frozen=True)
class Subject:
    """What the agent knows of a rank that is to be looked at."""

    rank: int
    pid: int | None  # None: it is being started
    beat_age_s: float | None
    dead: bool
    call: str | None = None  # running now
    label: str | None = None
    is_cell: bool = False
    running_s: float | None = None
    last_collective: str | None = None  # from its last words


@dataclass(frozen=True)
class _Facts:
    """What /proc says."""

    process: Process | None
    threads: dict[int, tuple[str, str | None]]


@dataclass
class _Look:
    """One look in progress."""

    command: messages.TakeSnapshots
    subjects: dict[int, Subject]
    facts: dict[int, _Facts] = field(default_factory=dict)
    inside: dict[int, RankSnapshot] = field(default_factory=dict)
    found: dict[int, tuple[tuple[ThreadStack, ...], str | None]] = field(default_factory=dict)
    sent_out: set[int] = field(default_factory=set)  # ranks that are being looked at from outside
    timers: list[Timer] = field(default_factory=list)

    def is_seen(self, rank: int) -> bool:
        """Whether there is nothing to wait for; of a process that is gone, there is: the news of how it ended."""
        if rank not in self.facts:
            return False
        stacks_seen, _ = self.found.get(rank, ((), None))
        return rank in self.inside or bool(stacks_seen) or (rank in self.found and self.process(rank) is not None)

    def process(self, rank: int) -> Process | None:
        """What the system says of it; None while that is not known, and when it is gone."""
        return self.facts[rank].process if rank in self.facts else None

    def kept(
        self, rank: int, told: tuple[ThreadStack, ...], file: str | None, *, busy: bool
    ) -> tuple[ThreadStack, ...]:
        """The user's part of a rank's stacks, with what the system says of each thread."""
        threads = self.facts[rank].threads if rank in self.facts else {}
        kept = []
        for stack in told:
            if stack.main and not busy:  # it waits for a command, and that is no work of the user's
                stack = msgspec.structs.replace(stack, frames=(), num_cut=0, cut_at=0)
            state, syscall = threads.get(stack.native_id or 0, ("", None))
            kept.append(msgspec.structs.replace(stacks.users_part(stack, file), state=state, syscall=syscall))
        return tuple(kept)


@dataclass
class _Known:
    """What a rank has told with its beats, and how it ended."""

    health: Health | None = None
    collectives: OrderedDict[tuple[object, ...], tuple[CollectiveSeen, float]] = field(default_factory=OrderedDict)
    untold: Measured | None = None  # for the next host beat
    heard_at: float = 0.0
    exited: RankExited | None = None


class Looker:
    """Takes snapshots of one host's ranks. Every method is the loop's."""

    def __init__(
        self,
        loop: Loop,
        hostname: str,
        ask: Callable[[int, bytes], None],
        report: Callable[[messages.SnapshotsTaken], None],
    ) -> None:
        """
        Args:
            ask: sends an encoded command to a rank's service thread.
            report: is given the answer to each look.
        """
        self._loop, self._hostname, self._ask, self._report = loop, hostname, ask, report
        self._looks: dict[str, _Look] = {}
        self._known: dict[int, _Known] = {}
        self._gpus = GpuSampler()
        self._posts = _Posts(loop, self._posted)
        self._turns = threading.Semaphore(_AT_ONCE)
        self._oom_kills: deque[int] = deque([outside.oom_kills()], maxlen=_OOM_SECONDS)

    # ---- looking

    def look(self, command: messages.TakeSnapshots, body: bytes, subjects: list[Subject]) -> None:
        """Take snapshots of `subjects`; `report` gets them within two seconds."""
        look = self._looks[command.call] = _Look(command, {subject.rank: subject for subject in subjects})
        for subject in subjects:
            if subject.dead or subject.pid is None:
                continue
            self._ask(subject.rank, body)
            self._in_thread(self._see_process, command.call, subject.rank, subject.pid)
            if subject.beat_age_s is None or subject.beat_age_s > _LATE_S:
                self._go_outside(look, subject)
        look.timers = [
            self._loop.call_later(_INSIDE_S, lambda: self._go_outside(look, *look.subjects.values())),
            self._loop.call_later(_LOOK_S, lambda: self._close(look)),
        ]
        self._close_if_done(look)

    def heard(self, message: messages.SnapshotTaken) -> None:
        """A rank has looked at itself."""
        look = self._looks.get(message.call)
        if look is not None and message.rank in look.subjects:
            look.inside[message.rank] = message.snapshot
            self._close_if_done(look)

    def _go_outside(self, look: _Look, *subjects: Subject) -> None:
        if look.command.call not in self._looks:
            return
        for subject in subjects:
            rank, pid = subject.rank, subject.pid
            if rank in look.sent_out or rank in look.inside or self._is_dead(subject) or pid is None:
                continue
            look.sent_out.add(rank)
            if look.command.stacks:
                self._in_thread(self._see_stacks, look.command.call, rank, pid)
            else:
                look.found[rank] = (), None
        self._close_if_done(look)

    def _see_process(self, call: str, rank: int, pid: int) -> None:
        self._posts.post((call, rank, _Facts(outside.process(pid), outside.threads(pid))))

    def _see_stacks(self, call: str, rank: int, pid: int) -> None:
        self._see_process(call, rank, pid)  # again: now it is known to be stuck
        if not self._turns.acquire(timeout=_LOOK_S):  # the look is over by now
            return
        try:
            self._posts.post((call, rank, outside.python_stacks(pid, _PY_SPY_S)))
        finally:
            self._turns.release()

    def _posted(self, post: tuple[str, int, Any]) -> None:
        call, rank, what = post
        look = self._looks.get(call)
        if look is None:
            return
        if isinstance(what, _Facts):
            look.facts[rank] = what
            if what.process is not None and what.process.state in ("T", "t"):  # stopped: it will not answer
                self._go_outside(look, look.subjects[rank])
        else:
            look.found[rank] = what
        self._close_if_done(look)

    def _close_if_done(self, look: _Look) -> None:
        if look.command.call in self._looks and all(
            self._is_dead(subject)
            or subject.pid is None
            or look.is_seen(rank)
            for rank, subject in look.subjects.items()
        ):
            self._close(look)

    def _close(self, look: _Look) -> None:
        if self._looks.pop(look.command.call, None) is None:
            return
        for timer in look.timers:
            timer.cancel()
        snapshots = tuple(self._snapshot(look, subject) for subject in look.subjects.values())
        self._report(messages.SnapshotsTaken(call=look.command.call, snapshots=snapshots))

    # ---- what is said of each rank

    def _snapshot(self, look: _Look, subject: Subject) -> RankSnapshot:
        if self._is_dead(subject):
            return self._of_dead(look, subject)
        if subject.pid is None:
            return RankSnapshot(rank=subject.rank, host=self._hostname, problem="it is being started")
        seen = look.inside.get(subject.rank)
        if seen is None:
            return self._from_outside(look, subject)
        return msgspec.structs.replace(
            seen,
            host=self._hostname,
            pid=subject.pid,
            beat_age_s=subject.beat_age_s,
            stacks=look.kept(subject.rank, seen.stacks, seen.file, busy=seen.call is not None),
            health=self._health(subject.rank) or seen.health,
            process=look.process(subject.rank),
        )

    def _from_outside(self, look: _Look, subject: Subject) -> RankSnapshot:
        told, problem = look.found.get(subject.rank, ((), None))
        kept = look.kept(subject.rank, told, None, busy=subject.call is not None)
        main = next((stack for stack in kept if stack.main and stack.frames), None)
        file = main.frames[0].file if main is not None and subject.is_cell else None
        lines = [frame.line for frame in main.frames if frame.file == file] if main is not None else []
        if subject.rank not in look.found and look.command.stacks:
            problem = "it did not answer, and could not be looked at from outside within 2 s"
        health = self._health(subject.rank)
        return RankSnapshot(
            rank=subject.rank,
            host=self._hostname,
            pid=subject.pid,
            source="outside" if told else "none",
            call=subject.call,  # type: ignore[arg-type]
            cell=subject.label or None,
            file=file,
            cell_line=lines[-1] if lines else None,
            running_s=subject.running_s,
            beat_age_s=subject.beat_age_s,
            stacks=kept,
            collectives=self._remembered(subject.rank, look.command.num_collectives),
            num_collectives=0 if health is None else health.num_collectives,
            last_collective=subject.last_collective,
            health=health,
            process=look.process(subject.rank),
            problem=problem,
        )

    def _of_dead(self, look: _Look, subject: Subject) -> RankSnapshot:
        exited = self._know(subject.rank).exited
        health = self._health(subject.rank)
        return RankSnapshot(
            rank=subject.rank,
            host=self._hostname,
            pid=subject.pid,
            collectives=self._remembered(subject.rank, look.command.num_collectives),
            num_collectives=0 if health is None else health.num_collectives,
            last_collective=None if exited is None else exited.last_collective,
            health=health,
            process=Process(state="X", oom_killed=exited is not None and exited.oom_killed),
            exited=exited,
            problem="its process is gone",
        )

    def _remembered(self, rank: int, limit: int) -> tuple[CollectiveSeen, ...]:
        """The collectives that it has told of, with their times as of now."""
        now = self._loop.clock.monotonic()
        kept = list(self._know(rank).collectives.values())
        split = max(0, len(kept) - limit)
        kept = [entry for entry in kept[:split] if entry[0].ended_s is None] + kept[split:]
        return tuple(
            msgspec.structs.replace(
                seen,
                began_s=seen.began_s + now - heard_at,
                ended_s=None if seen.ended_s is None else seen.ended_s + now - heard_at,
            )
            for seen, heard_at in kept
        )

    # ---- what ranks tell by themselves

    def measured(self, measured: Measured) -> None:
        """A beat brought this."""
        known, now = self._know(measured.rank), self._loop.clock.monotonic()
        for seen in measured.collectives:
            known.collectives[_key(seen)] = seen, now
        while len(known.collectives) > _REMEMBERED:
            oldest_ended = (key for key, (seen, _) in known.collectives.items() if seen.ended_s is not None)
            known.collectives.pop(next(oldest_ended, next(iter(known.collectives))))
        gpu = None if measured.health is None else measured.health.gpu
        if gpu is not None and gpu.uuid:
            self._gpus.want(gpu.uuid)
        if known.untold is not None:  # two beats since the last host beat
            measured = _joined(known.untold, measured, now - known.heard_at)
        known.untold, known.heard_at, known.health = measured, now, measured.health

    def take_measured(self) -> tuple[Measured, ...]:
        """What was measured since the last time, for the host's beat."""
        now = self._loop.clock.monotonic()
        taken = []
        for rank, known in sorted(self._known.items()):
            if known.untold is not None:
                aged = msgspec.structs.replace(
                    known.untold, age_s=now - known.heard_at, health=self._health(rank) or known.untold.health
                )
                taken.append(aged)
                known.untold = None
        self._oom_kills.append(outside.oom_kills())
        return tuple(taken)

    def started(self, rank: int) -> None:
        """A new process is this rank from now on."""
        self._known[rank] = _Known()

    def out_of_memory(self) -> bool:
        """Whether the system has killed something for memory in the last seconds."""
        return outside.oom_kills() > self._oom_kills[0]

    def ended(self, exited: RankExited) -> None:
        """A rank's process is gone."""
        self._know(exited.rank).exited = exited
        for look in list(self._looks.values()):
            self._close_if_done(look)

    def close(self) -> None:
        """Open looks are forgotten, and what threads still find is heard by nobody."""
        for look in self._looks.values():
            for timer in look.timers:
                timer.cancel()
        self._looks.clear()
        self._posts.close()
        self._gpus.close()

    # ---- helpers

    def _know(self, rank: int) -> _Known:
        return self._known.setdefault(rank, _Known())

    def _is_dead(self, subject: Subject) -> bool:
        exited = self._know(subject.rank).exited
        return subject.dead or (exited is not None and exited.pid == subject.pid)

    def _health(self, rank: int) -> Health | None:
        """What it measured last, with what the driver says of its GPU."""
        health = self._know(rank).health
        if health is None or health.gpu is None:
            return health
        seen = self._gpus.seen(health.gpu.uuid)
        if seen is None:
            return health
        gpu = msgspec.structs.replace(
            health.gpu, used_bytes=seen.used_bytes, total_bytes=seen.total_bytes, utilisation=seen.utilisation
        )
        return msgspec.structs.replace(health, gpu=gpu)

    def _in_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name="meshbook-look", daemon=True).start()


class _Posts:
    """What threads have found, handed to the loop in the order it came."""

    def __init__(self, loop: Loop, hear: Callable[[tuple[str, int, Any]], None]) -> None:
        self._loop, self._hear = loop, hear
        self._found: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._open = True
        loop.watch_fd(self._readable, self._drain)

    def post(self, found: tuple[str, int, Any]) -> None:
        """From any thread."""
        self._found.put(found)
        with self._lock, contextlib.suppress(BlockingIOError):  # full: the loop has been told often enough
            if self._open:
                os.write(self._writable, b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        while True:
            try:
                found = self._found.get_nowait()
            except queue.Empty:
                return
            self._hear(found)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._loop.unwatch(self._readable)
                os.close(self._readable)
                os.close(self._writable)


def _key(seen: CollectiveSeen) -> tuple[object, ...]:
    """What tells one collective of a rank from all others: sends are counted apart, and new connections anew."""
    return seen.group, seen.epoch, seen.op, seen.seq


def _joined(older: Measured, newer: Measured, apart_s: float) -> Measured:
    """Two reports of one rank as one, its times counted from the newer."""
    scalars = tuple(
        messages.Scalar(scalar.name, scalar.step, scalar.value, scalar.age_s + apart_s) for scalar in older.scalars
    )
    again = {_key(seen) for seen in newer.collectives}
    collectives = tuple(
        msgspec.structs.replace(
            seen,
            began_s=seen.began_s + apart_s,
            ended_s=None if seen.ended_s is None else seen.ended_s + apart_s,
        )
        for seen in older.collectives
        if _key(seen) not in again
    )
    health = newer.health
    if health is not None and older.health is not None:  # the longest wait of the two; all else is as it is now
        lag_s = max(health.gil_lag_s, older.health.gil_lag_s)
        health = msgspec.structs.replace(health, gil_lag_s=lag_s)
    return msgspec.structs.replace(
        newer,
        health=health,
        scalars=(scalars + newer.scalars)[-_MAX_SCALARS:],
        num_dropped=older.num_dropped + newer.num_dropped + max(0, len(scalars) + len(newer.scalars) - _MAX_SCALARS),
        collectives=(collectives + newer.collectives)[-_MAX_COLLECTIVES:],
    )

