"""A host's memory of its ranks and of the calls they work on, and the two sockets it reaches them by.

Commands come in through `handle`, folded reports go out through `report`; the supervisor may sit in the same process
(the local engine) or behind a socket (`host/main.py`), the agent does not know. A rank gets one main-thread command at
a time: the queue is kept here, so that an interrupt is a signal to a process whose work is known, and never hits the
next cell.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import os
import signal
import socket as sockets
import sys
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from meshbook.errors import ProtocolError, VersionMismatch, describe_exit
from meshbook.fold.lines import LineFolder
from meshbook.fold.outcomes import fold_outcomes
from meshbook.host import outside
from meshbook.host.cores import cgroup_quota, num_cores, threads_per_rank
from meshbook.host.descriptors import limit_of_users
from meshbook.host.logring import LogRing, last_lines_of
from meshbook.host.looking import Looker, Subject
from meshbook.host.starter import Child, ForkStarter, FreshStarter, Starter
from meshbook.ids import Ranks, client_of, name_ranks
from meshbook.wire import birth, codec, keys, messages
from meshbook.wire.lifeline import ACTORS_GRACE_S
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.messages import Outcome, RankDisplay
from meshbook.wire.refusals import Refusals
from meshbook.wire.stop import KILL_AFTER_S, REPEAT_S, STUCK_AFTER_S, UNBLOCK_AFTER_S

log = logging.getLogger("meshbook.host")

# Seconds a question (completion, inspection) waits for ranks that keep the GIL.
_QUESTION_S = 1.0
# Seconds without a beat (they come every second) before a rank counts as silent.
_SILENT_S = 5.0
# Seconds that an open call must have lasted before its progress is reported.
_PROGRESS_AFTER_S = 0.5
# ... after a rank's part did not end well, before the supervisor is told that the others go on: they mostly fail alike.
_LEFT_AFTER_S = 0.2
_BEAT_S = 1.0
_FLUSH_S = 0.05
# Messages of one rank that may lie in a socket when it ends: it sends output 33 times a second at most.
_LAST_MESSAGES = 256
_TAIL_BYTES = 8 << 10  # of a log, in which its last line is
# Characters that one flush may give; the rest waits, and is cut with a notice when it grows too large. Twenty times a
# second this is about what a front end takes (1 MB/s).
_FLUSH_CHARS = 32 << 10


@dataclass
class Queued:
    """A main-thread command waiting for a rank, in the form it is sent."""

    call: str
    body: bytes
    stopped: bool = False  # the call is over, and the rank only hears that it was not run


@dataclass
class Link:
    """What the host knows of one rank."""

    rank: int
    child: Child | None = None
    device: str = "cpu"
    work_ready: bool = False
    service_ready: bool = False
    dead: str | None = None  # how it ended
    killed: bool = False  # by us
    has_actors: bool = False
    queue: deque[Queued] = field(default_factory=deque)
    backlog: list[bytes] = field(default_factory=list)  # for the service thread, until it listens
    running: Queued | None = None
    said: int = 0  # pieces of output heard
    early: dict[int, messages.RankSaid] = field(default_factory=dict)  # heard out of order
    finish: messages.RankFinished | None = None  # waits for output that is still on its way
    log: LogRing = field(default_factory=LogRing)
    untold: list[messages.Notice] = field(default_factory=list)  # for the next call: it shows what it is told
    beat: messages.RankBeat | None = None
    beat_at: float | None = None
    last_call: str | None = None
    running_since: float = 0.0


@dataclass
class Tally:
    """An open call: who is still at it, and what the others came to."""

    call: str
    command: Any
    waiting: set[int]
    opened_at: float
    folder: LineFolder
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    flush: Timer | None = None
    progress_told: int = 0
    told_soon: bool = False  # a timer will tell of its progress


@dataclass
class Stray:
    """Output that belongs to no open call, until it has been shown."""

    call: str
    ranks: Ranks
    folder: LineFolder
    flush: Timer | None = None


class HostAgent:
    """One host's ranks of one mesh."""

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        token: str,
        host: int,
        report: Callable[[messages.HostReport], None],
        *,
        mergeable: bool = False,
    ) -> None:
        """
        Args:
            folder: where the sockets go; mode 0700.
            report: called with every report, from the loop.
            mergeable: other hosts' output will be folded with ours.
        """
        self._mergeable = mergeable
        self._loop, self._folder, self._token = loop, folder, token
        self._host, self._report = host, report
        self.hostname = sockets.gethostname()
        self._links: dict[int, Link] = {}
        self._by_pid: dict[int, Link] = {}
        self._known: set[tuple[zmq.Socket[bytes], bytes]] = set()  # peers at our sockets that have shown the token
        self._refusals = Refusals(log)
        self._tallies: dict[str, Tally] = {}
        self._strays: dict[str, Stray] = {}
        self._starter: Starter | None = None
        self._spec: messages.MeshSpec | None = None
        self._unfit: messages.Notice | None = None  # why ranks are not forked
        self._when_empty: Callable[[], None] | None = None
        self._work, self._work_address = self._bind(context, "work")
        self._service, self._service_address = self._bind(context, "service")
        loop.watch_socket(self._work, lambda frames: self._hear(self._work, frames))
        loop.watch_socket(self._service, lambda frames: self._hear(self._service, frames))
        self._looker = Looker(loop, self.hostname, lambda rank, body: self._to_service(self._links[rank], body), report)
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.SnapshotTaken: self._looker.heard,
            messages.RankReady: self._ready,
            messages.RankEnding: self._heard_out,
            messages.RankSaid: self._heard_output,
            messages.RankFinished: self._finished,
            messages.RankAnswered: self._answered,
            messages.RankAsked: self._asked,
            messages.RankBeat: self._beat,
            messages.ServiceFailed: self._service_failed,
        }
        self._beat_timer = loop.call_later(_BEAT_S, self._tick)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.harden(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        address = f"ipc://{self._folder}/h{self._host}-{name}.sock"
        socket.bind(address)
        return socket, address

    # ---- commands from above

    def warm_up(self, *, with_torch: bool = True, source: str | None = None) -> None:
        """Start the fork server before anybody asked for ranks, so that its imports are done when they do."""
        if self._starter is None:
            self._starter = self._fork_starter(with_torch=with_torch, source=source)

    def handle(self, command: messages.HostCommand, body: bytes) -> None:
        """Carry out a command. `body` is its encoding, which is passed on to ranks as it came."""
        match command:
            case messages.StartRanks():
                self._start_ranks(command)
            case messages.FormGroups():
                self._enqueue(command, body, urgent=True)
            case (
                messages.Complete()
                | messages.Inspect()
                | messages.Peek()
                | messages.OpenActors()
                | messages.AskPositions()
            ):
                self._question(command, body)
            case messages.Release():
                for link in self._living(command.ranks):
                    self._to_service(link, body)
            case messages.Interrupt():
                self._interrupt(command)
            case messages.Unblock() | messages.HoldGroups() | messages.GroupsChecked() | messages.RanksLeft():
                for link in self._living(command.ranks):
                    self._to_service(link, body)
            case messages.Conclude():
                tally = self._tallies.get(command.call)
                if tally is not None:
                    self._give_up(tally)
            case messages.ReplyInput(rank=rank, target=target):
                asking = self._links.get(rank)
                if asking is not None and asking.running is not None and asking.running.call == target:
                    self._to_work(asking, body)
            case messages.KillRanks():
                for link in self._living(command.ranks):
                    self._signal(link, command.signal)
            case messages.AskLogs():
                said = self._links.get(command.rank)
                text = said.log.tail(command.limit_bytes) if said is not None else ""
                self._report(messages.Answered(call=command.call, text=text))
            case messages.TakeSnapshots():
                subjects = [self._subject(self._links[rank]) for rank in self._mine(command.ranks)]
                self._looker.look(command, body, subjects)
            case messages.Exit():
                self.stop(command.grace_s, lambda: None)
            case _:
                self._enqueue(command, body)

    def _start_ranks(self, command: messages.StartRanks) -> None:
        spec = self._spec = command.spec
        if self._starter is None or (
            isinstance(self._starter, ForkStarter)
            and (spec.start_method != "fork" or spec.torch != self._starter.with_torch)
        ):
            if self._starter is not None:
                self._starter.close()
            self._starter = (
                self._fork_starter(with_torch=spec.torch)
                if spec.start_method == "fork"
                else FreshStarter(self._loop, self._exited)
            )
        starter = self._starter
        try:
            threads = spec.threads_per_rank or threads_per_rank(len(command.ranks), num_cores(), cgroup_quota())
            for local_rank, rank in enumerate(command.ranks):
                link = self._links[rank] = Link(rank, beat_at=None)
                told = birth.RankBirth(
                    rank=rank,
                    local_rank=local_rank,
                    local_world_size=len(command.ranks),
                    world_size=command.world_size,
                    token=self._token,
                    work_address=self._work_address,
                    service_address=self._service_address,
                    spec=spec,
                    threads=threads,
                    blas_threads=None if "OPENBLAS_NUM_THREADS" in {*os.environ, *spec.env} else threads,
                    host_pid=os.getpid(),
                    max_files=limit_of_users(),
                )
                starter.start_rank(told, lambda child, link=link: self._started(link, child))  # type: ignore[misc]
        except OSError as error:
            self._not_started(str(error))

    def _fork_starter(self, *, with_torch: bool, source: str | None = None) -> ForkStarter:
        return ForkStarter(
            self._loop,
            self._exited,
            on_end=self._starter_ended,
            on_failure=self._not_started,
            on_unfit=self._starter_unfit,
            with_torch=with_torch,
            listen=f"{self._folder}/h{self._host}-fork.sock",
            source=source,
        )

    def _starter_ended(self, how: str) -> None:
        """The fork server is gone, and with it everything it had forked; nobody else will say so."""
        said = last_lines_of(_tail(self._folder / "supervisor.log"), 1)
        self._not_started(": ".join([f"the fork server {how}", *said]))
        for link in [link for link in self._links.values() if link.dead is None]:
            if link.child is not None:
                cause = f"ended with the fork server that it was forked from, which {how}"
                self._exited(link.child.pid, signal.SIGKILL, cause)

    def _not_started(self, reason: str) -> None:
        """There will be no process for ranks that have none yet."""
        self._report(messages.HostFailed(host=self._host, reason=reason))
        for link in self._links.values():
            if link.child is None and link.dead is None:
                link.dead = "was never started"
        self._check_empty()

    def _starter_unfit(self, reason: str, asked: list[Callable[[Starter], None]]) -> None:
        """Start ranks in fresh interpreters instead of forking them."""
        text = f"ranks are not forked but started in fresh interpreters, which is slower: {reason}"
        log.warning("%s", text)
        starter = self._starter = FreshStarter(self._loop, self._exited)
        self._unfit = messages.Notice(text)
        try:
            for again in asked:
                again(starter)
        except OSError as error:
            self._not_started(str(error))

    def _started(self, link: Link, child: Child) -> None:
        if link.dead is not None:  # another could not be started, and the mesh with it
            os.kill(child.pid, signal.SIGKILL)
            child.close()
            return
        link.child = child
        if self._unfit is not None:
            link.untold.append(self._unfit)
        self._looker.started(link.rank)
        self._by_pid[child.pid] = link

    def _enqueue(self, command: Any, body: bytes, *, urgent: bool = False) -> None:
        ranks = self._mine(command.ranks)
        tally = self._open(command, ranks)
        queued = Queued(command.call, body)
        for rank in ranks:
            link = self._links[rank]
            if link.dead is not None:
                self._settle(tally, rank, self._lost(link))
                continue
            if urgent:
                link.queue.appendleft(queued)
            else:
                link.queue.append(queued)
            self._dispatch(link)
        self._close_if_done(tally)

    def _question(self, command: Any, body: bytes) -> None:
        ranks = self._mine(command.ranks)
        tally = self._open(command, ranks)
        for rank in ranks:
            link = self._links[rank]
            if link.dead is None:
                self._to_service(link, body)
                link.has_actors |= isinstance(command, messages.OpenActors)
            else:
                self._settle(tally, rank, self._lost(link))
        self._close_if_done(tally)
        self._loop.call_later(_QUESTION_S, lambda: self._give_up(tally))

    def _give_up(self, tally: Tally) -> None:
        """Of a question that some rank has not answered: it keeps the GIL, or is stopped. Or of a call that is ended
        without them."""
        for rank in sorted(tally.waiting):
            self._settle(tally, rank, Outcome(status="skipped"))
        self._close_if_done(tally)

    def _interrupt(self, command: messages.Interrupt) -> None:
        told: list[tuple[Link, Queued]] = []
        continued: list[Link] = []
        unheard: dict[str, Queued] = {}
        for link in self._living(command.ranks):
            for queued in [one for one in link.queue if _is_meant(command, one.call) and not one.stopped]:
                tally = self._tallies.get(queued.call)
                if tally is not None and isinstance(tally.command, messages.RunOps):
                    # Other ranks may have changed tensors by it: this one must know that it has not.
                    unheard[queued.call] = unheard.get(queued.call) or _stopped(tally.command)
                    link.queue[link.queue.index(queued)] = unheard[queued.call]
                else:
                    link.queue.remove(queued)
                self._end_part(queued.call, link.rank, Outcome(status="interrupted"))
            if link.running is not None and command.target in (None, link.running.call):
                # By its name, which counts also before the rank has taken the command from its socket; and by a signal,
                # which needs no service thread that comes to run.
                named = messages.Interrupt(ranks=(link.rank,), target=link.running.call)  # type: ignore[arg-type]
                self._to_service(link, codec.encode_body(named))
                self._signal(link, signal.SIGINT)
                told.append((link, link.running))
                if self._continue(link):
                    continued.append(link)

        def still() -> list[Link]:
            return [link for link, queued in told if link.running is queued and link.dead is None]

        def again() -> None:
            for link in still():
                self._signal(link, signal.SIGINT)
                self._continue(link)

        self._tell_continued(continued)
        # Ranks take those that follow soon after one that worked for the same Stop (`stop.SAME_STOP_S`).
        for delay_s in REPEAT_S:
            self._loop.call_later(delay_s, again)
        if command.hard:
            self._free(still())
            self._loop.call_later(KILL_AFTER_S, lambda: self._kill_stubborn(still()))
        else:
            self._loop.call_later(UNBLOCK_AFTER_S, lambda: self._free(still()))
            self._loop.call_later(STUCK_AFTER_S, lambda: self._tell_stuck(still()))

    def _free(self, links: list[Link]) -> None:
        for link in links:
            unblock = messages.Unblock(ranks=(link.rank,), reason="interrupted", interrupt=True)
            self._to_service(link, codec.encode_body(unblock))

    def _continue(self, link: Link) -> bool:
        """Continue a rank that is stopped (SIGSTOP): no other signal would reach it. Call it after SIGINT, so that this
        is what the rank finds first. Returns whether it was stopped."""
        if link.child is None or link.dead is not None or outside.state(link.child.pid) != "T":
            return False
        self._signal(link, signal.SIGCONT)
        return True

    def _tell_continued(self, links: list[Link]) -> None:
        for call, group in _by_call(links).items():
            ranks = tuple(link.rank for link in group)
            was = "was" if len(ranks) == 1 else "were"
            self._notice(call, ranks, f"{name_ranks(ranks)} {was} stopped (SIGSTOP), and let go on (SIGCONT) by Stop")

    def _tell_stuck(self, links: list[Link]) -> None:
        for call, group in _by_call(links).items():
            by_reason: dict[str, list[int]] = {}
            for link in group:
                by_reason.setdefault(self._why_stuck(link), []).append(link.rank)
            ranks = tuple(link.rank for link in group)
            where = "; ".join(f"{name_ranks(found)} {reason}" for reason, found in by_reason.items())
            self._report(messages.RanksStuck(call=call, ranks=ranks, reason=where))  # type: ignore[arg-type]

    def _why_stuck(self, link: Link) -> str:
        """What keeps a rank from coming back from a Stop, as seen from outside; the end of a sentence."""
        pid = link.child.pid if link.child is not None else 0
        line = None if link.beat is None else link.beat.line
        at = "" if line is None else f", at line {line} of the cell"
        match outside.state(pid):
            case "t":
                return f"(pid {pid}) is held by a debugger"
            case "D":
                return f"(pid {pid}) waits in the system, for a disk or a driver, where no signal reaches it"
            case "T":
                return f"(pid {pid}) stops itself (SIGSTOP) again and again{at}"
        now = self._loop.clock.monotonic()
        if link.beat_at is not None and now - link.beat_at > 1.5 * _BEAT_S:
            return f"(pid {pid}) is in C code that keeps the GIL{at}"
        return f"(pid {pid}) is in C code, or in code that catches KeyboardInterrupt{at}"

    def _kill_stubborn(self, links: list[Link]) -> None:
        for call, group in _by_call(links).items():
            ranks = tuple(link.rank for link in group)
            were = "was" if len(ranks) == 1 else "were"
            text = f"second Stop: {name_ranks(ranks)} did not come back within {KILL_AFTER_S:.0f} s and {were} killed"
            self._notice(call, ranks, text)
            for link in group:
                self._signal(link, signal.SIGKILL)

    def _notice(self, call: str, ranks: Ranks, text: str) -> None:
        item = RankDisplay(ranks=ranks, item=messages.Notice(text))
        self._report(messages.CallOutput(call=call, items=(item,)))  # type: ignore[arg-type]

    def stop(self, grace_s: float, then: Callable[[], None]) -> None:
        """End every rank, in order where it listens, by force after `grace_s` seconds; `then` when none is left. One
        whose actors are at their end, and that beats meanwhile, has ACTORS_GRACE_S more."""
        self._when_empty = then
        body = codec.encode_body(messages.Exit())
        for link in self._living(tuple(self._links)):
            link.queue.clear()
            if link.running is None and link.work_ready:
                self._to_work(link, body)
            else:
                self._to_service(link, body)
        self._loop.call_later(grace_s, lambda: self._kill_all(but_actors=True))
        self._loop.call_later(grace_s + ACTORS_GRACE_S, self._kill_all)
        self._check_empty()

    def _kill_all(self, *, but_actors: bool = False) -> None:
        for link in self._living(tuple(self._links)):
            if not (but_actors and link.has_actors and not self._is_silent(link)):
                self._signal(link, signal.SIGKILL)

    def _check_empty(self) -> None:
        if self._when_empty is not None and all(link.dead is not None for link in self._links.values()):
            then, self._when_empty = self._when_empty, None
            for stray in list(self._strays.values()):
                self._flush_stray(stray, last=True)
            if self._starter is not None:
                self._starter.close()
                self._starter = None
            then()

    def close(self) -> None:
        """Let go of the sockets. Call after `stop`."""
        self._beat_timer.cancel()
        self._looker.close()
        for socket in (self._work, self._service):
            self._loop.unwatch(socket)
            socket.close()

    # ---- reports from ranks

    def _hear(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        peer = frames[0]
        known = (socket, peer) in self._known
        try:
            message = (codec.rank_reports if known else codec.rank_hellos).decode(frames[1:])
        except (ProtocolError, VersionMismatch) as error:
            self._refusals.tell("a message from %r was refused: %s", peer[:16], error)
            return
        link = self._links.get(message.rank)
        if link is None or peer != b"r%d" % message.rank:
            self._refusals.tell("a report from %r speaks for rank %s, and was refused", peer[:16], message.rank)
            return
        if isinstance(message, messages.RankReady):
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                self._refusals.tell(
                    "a peer without the mesh's token says it is rank %s, and was refused", message.rank
                )
                return
            self._known.add((socket, peer))
            if socket is self._work:
                link.work_ready = True
            else:
                link.service_ready = True
        self._handlers[type(message)](message)

    def _ready(self, message: messages.RankReady) -> None:
        link = self._links[message.rank]
        link.device = message.device
        if link.service_ready and link.backlog:
            backlog, link.backlog = link.backlog, []
            for body in backlog:
                self._to_service(link, body)
        if link.work_ready:
            self._dispatch(link)

    def _heard_out(self, message: messages.RankEnding) -> None:
        self._to_service(self._links[message.rank], codec.encode_body(messages.Exit()))

    def _heard_output(self, message: messages.RankSaid) -> None:
        link = self._links[message.rank]
        link.early[message.seq] = message
        while (piece := link.early.pop(link.said + 1, None)) is not None:
            link.said += 1
            self._take_output(link, piece.call, piece.items)
        if link.finish is not None and link.finish.said_seq <= link.said:
            finish, link.finish = link.finish, None
            self._finished(finish)

    def _take_output(self, link: Link, call: str | None, items: tuple[messages.OutputItem, ...]) -> None:
        for item in items:
            if isinstance(item, messages.Text):
                link.log.append(item.text)
        if call is None:
            return
        tally = self._tallies.get(call)
        now = self._loop.clock.monotonic()
        if tally is None:  # an actor prints, or a thread of a cell that is over
            stray = self._strays.get(call)
            if stray is None or link.rank not in stray.ranks:
                ranks = tuple(rank for rank, other in self._links.items() if other.dead is None or rank == link.rank)
                stray = self._strays[call] = Stray(call, ranks, LineFolder(ranks, mergeable=self._mergeable))
            stray.folder.feed(link.rank, items, now)
            if stray.flush is None:
                stray.flush = self._loop.call_later(_FLUSH_S, lambda: self._flush_stray(stray))
            return
        tally.folder.feed(link.rank, items, now)
        if tally.flush is None:
            tally.flush = self._loop.call_later(_FLUSH_S, lambda: self._flush(tally))

    def _flush_stray(self, stray: Stray, *, last: bool = False) -> None:
        """Show what no open call has said; what equal lines other ranks may say is waited for as in a cell, unless
        these were the last."""
        now = self._loop.clock.monotonic()
        items = list(stray.folder.flush(now, max_chars=_FLUSH_CHARS))
        deadline = stray.folder.next_deadline() if not last else None
        if deadline is None:
            items += stray.folder.flush(now, final=True)
            if self._strays.get(stray.call) is stray:
                del self._strays[stray.call]
        else:
            stray.flush = self._loop.call_later(max(_FLUSH_S, deadline - now), lambda: self._flush_stray(stray))
        if items:
            self._report(messages.CallOutput(call=stray.call, items=tuple(items)))  # type: ignore[arg-type]

    def _flush(self, tally: Tally) -> None:
        if tally.call not in self._tallies:
            return
        now = self._loop.clock.monotonic()
        items = tuple(tally.folder.flush(now, max_chars=_FLUSH_CHARS))
        if items:
            self._report(messages.CallOutput(call=tally.call, items=items))  # type: ignore[arg-type]
        deadline = tally.folder.next_deadline()
        tally.flush = None
        if deadline is not None:
            tally.flush = self._loop.call_later(max(_FLUSH_S, deadline - now), lambda: self._flush(tally))

    def _finished(self, message: messages.RankFinished) -> None:
        link = self._links[message.rank]
        if message.said_seq > link.said:
            link.finish = message
            return
        if message.released:
            self._report(messages.Segments(rank=message.rank, segments=message.released))
        if message.items:
            self._take_output(link, message.call, message.items)
        if link.running is not None and link.running.call == message.call:
            link.running = None
        tally = self._tallies.get(message.call)
        if tally is not None:
            tally.seconds[message.rank] = message.seconds
        self._end_part(message.call, message.rank, message.outcome)
        if tally is not None and message.outcome.status != "ok" and not tally.told_soon:
            tally.told_soon = True
            self._loop.call_later(_LEFT_AFTER_S, lambda: self._tell_progress(tally))
        self._dispatch(link)

    def _answered(self, message: messages.RankAnswered) -> None:
        self._end_part(message.call, message.rank, Outcome(status="ok", answer=message.answer))

    def _asked(self, message: messages.RankAsked) -> None:
        tally = self._tallies.get(message.call)
        if tally is not None:  # what was printed before the question must be on the screen before it
            self._flush_now(tally)
        self._report(
            messages.InputRequested(
                call=message.call, rank=message.rank, prompt=message.prompt, password=message.password
            )
        )

    def _flush_now(self, tally: Tally) -> None:
        items = tuple(tally.folder.flush(self._loop.clock.monotonic(), max_age_s=0.0))
        if items:
            self._report(messages.CallOutput(call=tally.call, items=items))  # type: ignore[arg-type]

    def _beat(self, message: messages.RankBeat) -> None:
        link = self._links[message.rank]
        link.beat, link.beat_at = message, self._loop.clock.monotonic()
        if message.measured is not None:
            self._looker.measured(message.measured)
        if message.released:
            self._report(messages.Segments(rank=message.rank, segments=message.released))

    def _service_failed(self, message: messages.ServiceFailed) -> None:
        """Tell the user in the output of the call that runs, or of the next one; keep the traceback in the logs."""
        link = self._links[message.rank]
        log.error("rank %d, %s: %s\n%s", message.rank, message.doing, message.error, message.traceback)
        link.log.append(message.traceback)
        link.untold.append(
            messages.Notice(
                f"an error in Meshbook's own thread on this rank, {message.doing}: {message.error}. The rank goes on; "
                "the traceback is in %mesh logs"
            )
        )
        if link.running is not None:
            self._tell_untold(link, link.running)

    def _tell_untold(self, link: Link, queued: Queued) -> None:
        tally = self._tallies.get(queued.call)
        if link.untold and tally is not None and not isinstance(tally.command, messages.FormGroups):
            untold, link.untold = tuple(link.untold), []
            self._take_output(link, queued.call, untold)

    def _tick(self) -> None:
        self._beat_timer = self._loop.call_later(_BEAT_S, self._tick)
        if not self._links:
            return
        for link in self._links.values():
            self._relieve(link)
        self._tell_beat()
        now = self._loop.clock.monotonic()
        for tally in list(self._tallies.values()):  # what is told may begin a question to ranks at once
            if now - tally.opened_at > _PROGRESS_AFTER_S:
                self._tell_progress(tally)

    def _tell_progress(self, tally: Tally) -> None:
        """Say which ranks are done, if that is news."""
        tally.told_soon = False
        done = len(tally.outcomes)
        if done != tally.progress_told and self._tallies.get(tally.call) is tally:
            tally.progress_told = done
            failed = _failed(tally) if isinstance(tally.command, messages.FormGroups) else ""
            told = messages.CallProgressed(call=tally.call, done=tuple(sorted(tally.outcomes)), failed=failed)  # type: ignore[arg-type]
            self._report(told)

    def _tell_beat(self) -> None:
        ranks = tuple(self._info(link) for link in self._links.values())
        self._report(messages.HostBeat(host=self._host, ranks=ranks, measured=self._looker.take_measured()))

    def _relieve(self, link: Link) -> None:
        """Read the output of a rank that is silent: C code that keeps the GIL would block on a full pipe for ever."""
        if link.child is not None and link.dead is None and self._is_silent(link):
            self._read_pipes(link)

    def _is_silent(self, link: Link) -> bool:
        return link.beat_at is not None and self._loop.clock.monotonic() - link.beat_at > 2 * _BEAT_S

    def _info(self, link: Link) -> messages.RankInfo:
        now = self._loop.clock.monotonic()
        age = None if link.beat_at is None else now - link.beat_at
        state = "idle" if link.running is None else "busy"
        if link.dead is not None:
            state = "dead"
        elif not link.work_ready:
            state = "starting"
        elif age is not None and age > _SILENT_S:
            state = "silent"
        tally = self._tallies.get(link.running.call) if link.running is not None else None
        beat = link.beat
        return messages.RankInfo(
            rank=link.rank,
            state=state,  # type: ignore[arg-type]
            host=self.hostname,
            pid=link.child.pid if link.child is not None else None,
            device=link.device,
            call=link.running.call if link.running is not None else None,  # type: ignore[arg-type]
            cell=getattr(tally.command, "label", None) if tally is not None else None,
            line=beat.line
            if beat is not None and link.running is not None and beat.call == link.running.call
            else None,
            beat_age_s=age,
            rss_bytes=beat.rss_bytes if beat is not None else None,
            peak_rss_bytes=beat.peak_rss_bytes if beat is not None else None,
            exit=link.dead,
        )

    # ---- the end of a rank

    def _exited(self, pid: int, status: int, cause: str | None = None) -> None:
        """A rank's process has ended.

        Args:
            status: as waitpid gives it.
            cause: what took it along, if that is known; then `status` says nothing.
        """
        link = self._by_pid.pop(pid, None)
        if link is None or link.child is None:
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if cause is not None:
            number = code = None
        link.dead = cause or describe_exit(number, code)
        oom_killed = number == signal.SIGKILL and not link.killed and self._looker.out_of_memory()
        if oom_killed:
            link.dead += " because the host ran out of memory"
        self._hear_the_rest()
        if link.finish is not None:  # it finished, and died before its last output came
            finish, link.finish = link.finish, None
            link.said = finish.said_seq
            self._finished(finish)
        rest = self._read_pipes(link)
        last_lines = last_lines_of(link.child.last_words.read() + rest)
        last_collective = link.child.last_words.read_note()
        link.child.close()
        exited = messages.RankExited(
            rank=link.rank,
            pid=pid,
            exit_code=code,
            signal=number,
            host=self.hostname,
            last_lines=last_lines,
            last_collective=last_collective,
            oom_killed=oom_killed,
            cause=cause,
        )
        self._looker.ended(exited)
        stopping = self._when_empty is not None
        if not stopping:
            self._report(exited)
        link.running = None
        link.queue.clear()
        for tally in [tally for tally in self._tallies.values() if link.rank in tally.waiting]:
            self._settle(tally, link.rank, self._lost(link))
            self._close_if_done(tally)
        self._check_empty()

    def _hear_the_rest(self) -> None:
        """Reports of a dead rank that still lie in the sockets come before the news of its death. Those of others come
        in turn with them, and go on coming: as many rounds are taken as a rank has sent messages at most."""
        for socket in (self._work, self._service):
            for _ in range(_LAST_MESSAGES * len(self._links)):
                if not socket.poll(0):
                    break
                frames = socket.recv_multipart()
                try:
                    self._hear(socket, frames)
                except Exception:  # the death must be told all the same
                    log.exception("a report from %r could not be handled", frames[0][:16])

    def _read_pipes(self, link: Link) -> str:
        """What lies in the rank's stdout and stderr, never read by it. What comes while this reads is left: a process
        that the rank has started may write without end."""
        rest = ""
        if link.child is None:
            return rest
        for fd, stream in ((link.child.out, "stdout"), (link.child.err, "stderr")):
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(fd, unread_bytes(fd))
            if data:
                text = messages.Text(stream=stream, text=data.decode("utf-8", "replace"))  # type: ignore[arg-type]
                call = link.running.call if link.running is not None else link.last_call
                self._take_output(link, call, (text,))
                rest += text.text
        return rest

    def _lost(self, link: Link) -> Outcome:
        error = messages.RankError(ename="RankLost", evalue=f"rank {link.rank} {link.dead}", traceback=())
        return Outcome(status="lost", error=error)

    # ---- calls

    def _open(self, command: Any, ranks: Ranks) -> Tally:
        tally = Tally(
            command.call,
            command,
            set(ranks),
            self._loop.clock.monotonic(),
            LineFolder(ranks, mergeable=self._mergeable),
        )
        self._tallies[command.call] = tally
        return tally

    def _end_part(self, call: str, rank: int, outcome: Outcome) -> None:
        tally = self._tallies.get(call)
        if tally is not None:
            self._settle(tally, rank, outcome)
            self._close_if_done(tally)

    def _settle(self, tally: Tally, rank: int, outcome: Outcome) -> None:
        if rank in tally.waiting:
            tally.waiting.discard(rank)
            tally.outcomes[rank] = outcome
            tally.folder.rank_done(rank)

    def _close_if_done(self, tally: Tally) -> None:
        if tally.waiting or self._tallies.get(tally.call) is not tally:
            return
        del self._tallies[tally.call]
        if tally.flush is not None:
            tally.flush.cancel()
        if isinstance(tally.command, messages.FormGroups):
            self._tell_beat()  # whoever hears that the mesh is ready can see its ranks at once
        small = len(tally.outcomes) <= 64
        self._report(
            messages.CallFinished(
                call=tally.call,  # type: ignore[arg-type]
                parts=fold_outcomes(tally.outcomes.items()),
                seconds=max(tally.seconds.values(), default=0.0),
                rank_seconds=tally.seconds if small else None,
                items=tuple(tally.folder.flush(self._loop.clock.monotonic(), final=True)),
            )
        )

    def _dispatch(self, link: Link) -> None:
        if link.running is None and link.queue and link.work_ready and link.dead is None:
            link.running = link.queue.popleft()
            link.last_call = link.running.call
            link.running_since = self._loop.clock.monotonic()
            self._to_work(link, link.running.body)
            self._tell_untold(link, link.running)

    # ---- helpers

    def _subject(self, link: Link) -> Subject:
        now, running = self._loop.clock.monotonic(), link.running
        tally = self._tallies.get(running.call) if running is not None else None
        return Subject(
            rank=link.rank,
            pid=None if link.child is None else link.child.pid,
            beat_age_s=None if link.beat_at is None else now - link.beat_at,
            dead=link.dead is not None,
            call=None if running is None else running.call,
            label=getattr(tally.command, "label", None) if tally is not None else None,
            is_cell=tally is not None and isinstance(tally.command, messages.RunCell),
            running_s=None if running is None else now - link.running_since,
            last_collective=link.child.last_words.read_note() if link.child is not None and link.dead is None else None,
        )

    def _mine(self, ranks: Ranks) -> Ranks:
        return tuple(rank for rank in ranks if rank in self._links)

    def _living(self, ranks: Ranks) -> list[Link]:
        return [link for rank in ranks if (link := self._links.get(rank)) is not None and link.dead is None]

    def _to_work(self, link: Link, body: bytes) -> None:
        self._work.send_multipart([b"r%d" % link.rank, codec.PROTOCOL, body])

    def _to_service(self, link: Link, body: bytes) -> None:
        if link.service_ready:
            self._service.send_multipart([b"r%d" % link.rank, codec.PROTOCOL, body])
        else:
            link.backlog.append(body)

    def _signal(self, link: Link, number: int) -> None:
        if link.child is not None and link.dead is None:
            link.killed = link.killed or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(link.child.pid, number)


def _tail(path: Path) -> str:
    """The end of a file that may be long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _failed(tally: Tally) -> str:
    """The first part that did not end well, with its error; "" if none did."""
    for rank, outcome in sorted(tally.outcomes.items()):
        if outcome.status != "ok" and (error := outcome.error) is not None:
            return f"rank {rank}: {error.ename}: {error.evalue}"
    return ""


def _is_meant(command: messages.Interrupt, waiting: str) -> bool:
    """Whether a Stop also takes back a call that waits: the one it names, or with no name those of who stops."""
    if command.target is not None:
        return command.target == waiting
    return command.client in (None, client_of(waiting))


def _stopped(command: messages.RunOps) -> Queued:
    """The same, for ranks that are not to run it."""
    told = msgspec.structs.replace(command, fetch=None, stopped=True)
    return Queued(command.call, codec.encode_body(told), stopped=True)


def unread_bytes(fd: int) -> int:
    """How much lies in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _by_call(links: list[Link]) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in links:
        if link.running is not None:
            found.setdefault(link.running.call, []).append(link)
    return found
