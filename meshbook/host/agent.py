"""A host's agent: its ranks, the calls they work on, and the two sockets that reach them.

Commands enter through `handle`, folded reports leave through `report`; the supervisor may run in the same process (the
local engine) or behind a socket (`host/main.py`), which makes no difference here. A rank gets one main-thread command
at a time: the host holds the queue, so that an interrupt is a signal to a process whose current command is known, and
never hits the next cell.
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
from meshbook.host import procfs
from meshbook.host.cores import cgroup_quota, num_cores, threads_per_rank
from meshbook.host.logring import LogRing, last_lines_of
from meshbook.host.rlimits import user_fd_limit
from meshbook.host.snapshots import SnapshotCollector, SnapshotTarget
from meshbook.host.starter import ForkStarter, FreshStarter, RankProcess, Starter
from meshbook.ids import Ranks, client_of_call, name_ranks
from meshbook.wire import codec, keys, messages, spawn
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.messages import Outcome, RankDisplay
from meshbook.wire.process_control import ACTORS_GRACE_S
from meshbook.wire.rate_limited_log import RateLimitedLog
from meshbook.wire.stop_timing import ABORT_AFTER_S, KILL_AFTER_S, SIGINT_REPEATS_S, STUCK_AFTER_S

log = logging.getLogger("meshbook.host")

# Seconds a query (completion, inspection) waits for ranks that keep the GIL.
_QUERY_TIMEOUT_S = 1.0
# Seconds without a heartbeat (they arrive every second) before a rank counts as silent.
_SILENT_AFTER_S = 5.0
# Seconds that an open call must have lasted before its progress is reported.
_PROGRESS_AFTER_S = 0.5
# ... after a rank's part failed, before the supervisor is notified that the others continue: mostly they fail alike.
_PROGRESS_AFTER_FAILURE_S = 0.2
_HEARTBEAT_S = 1.0
_FLUSH_INTERVAL_S = 0.05
# Messages of one rank that may be in a socket when it exits: it sends output at most 33 times a second.
_MAX_LAST_MESSAGES = 256
_TAIL_BYTES = 8 << 10  # of a log: enough to contain its last line
# Characters that one flush may output; the rest waits, and is truncated with a notice when it grows too large. Twenty
# times a second this is about what a front end can take (1 MB/s).
_MAX_FLUSH_CHARS = 32 << 10


@dataclass
class QueuedCommand:
    """A main-thread command that waits for a rank, encoded."""

    call: str
    body: bytes
    is_cancelled: bool = False  # the call has ended; the rank is only notified that it was not run


@dataclass
class RankHandle:
    """The host's state of one rank."""

    rank: int
    process: RankProcess | None = None
    device: str = "cpu"
    work_ready: bool = False
    service_ready: bool = False
    exit_reason: str | None = None  # how it ended
    is_killed_by_us: bool = False  # by SIGKILL
    has_actors: bool = False
    queue: deque[QueuedCommand] = field(default_factory=deque)
    service_backlog: list[bytes] = field(default_factory=list)  # for the service thread, until it is ready
    running: QueuedCommand | None = None
    num_outputs: int = 0  # pieces of output received in order
    early_outputs: dict[int, messages.RankOutput] = field(default_factory=dict)  # received out of order
    pending_finish: messages.RankFinished | None = None  # waits for output that is still in transit
    log: LogRing = field(default_factory=LogRing)
    pending_notices: list[messages.Notice] = field(default_factory=list)  # shown in the output of the next call
    heartbeat: messages.RankHeartbeat | None = None
    heartbeat_at: float | None = None
    last_call: str | None = None
    running_since: float = 0.0


@dataclass
class PendingCall:
    """An open call: the ranks that still run it, and the outcomes of the others."""

    call: str
    command: Any
    waiting_ranks: set[int]
    opened_at: float
    folder: LineFolder
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    flush_timer: Timer | None = None
    num_reported_done: int = 0
    is_report_scheduled: bool = False  # a timer will report its progress


@dataclass
class OrphanOutput:
    """Output that belongs to no open call, until it has been flushed."""

    call: str
    ranks: Ranks
    folder: LineFolder
    flush_timer: Timer | None = None


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
        """Create the agent and bind its sockets.

        Args:
            folder: where the sockets are created; mode 0700.
            report: called with every report, from the loop.
            mergeable: other hosts' output will be folded with ours.
        """
        self._mergeable = mergeable
        self._loop, self._folder, self._token = loop, folder, token
        self._host, self._report = host, report
        self.hostname = sockets.gethostname()
        self._ranks: dict[int, RankHandle] = {}
        self._by_pid: dict[int, RankHandle] = {}
        # peers of our sockets that have shown the token
        self._authenticated: set[tuple[zmq.Socket[bytes], bytes]] = set()
        self._rejections = RateLimitedLog(log)
        self._calls: dict[str, PendingCall] = {}
        self._orphan_outputs: dict[str, OrphanOutput] = {}
        self._starter: Starter | None = None
        self._spec: messages.MeshSpec | None = None
        self._fork_unsafe_notice: messages.Notice | None = None  # why ranks are not forked
        self._on_all_exited: Callable[[], None] | None = None
        self._work, self._work_address = self._bind(context, "work")
        self._service, self._service_address = self._bind(context, "service")
        loop.watch_socket(self._work, lambda frames: self._on_message(self._work, frames))
        loop.watch_socket(self._service, lambda frames: self._on_message(self._service, frames))
        self._snapshots = SnapshotCollector(
            loop, self.hostname, lambda rank, body: self._send_to_service(self._ranks[rank], body), report
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.RankSnapshotReply: self._snapshots.reply_received,
            messages.RankReady: self._rank_ready,
            messages.RankExiting: self._rank_exiting,
            messages.RankOutput: self._output_received,
            messages.RankFinished: self._rank_finished,
            messages.RankReply: self._rank_replied,
            messages.RankInputRequest: self._input_requested,
            messages.RankHeartbeat: self._heartbeat_received,
            messages.ServiceFailed: self._service_failed,
        }
        self._heartbeat_timer = loop.call_later(_HEARTBEAT_S, self._tick)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        keys.configure_socket(socket, max_message_bytes=codec.MAX_MESSAGE_BYTES)
        address = f"ipc://{self._folder}/h{self._host}-{name}.sock"
        socket.bind(address)
        return socket, address

    # ---- commands from the supervisor

    def warm_up(self, *, with_torch: bool = True, branch_from: str | None = None) -> None:
        """Start the fork server before ranks are requested, so that its imports are done by then."""
        if self._starter is None:
            self._starter = self._make_fork_starter(with_torch=with_torch, branch_from=branch_from)

    def handle(self, command: messages.HostCommand, body: bytes) -> None:
        """Carry out a command. `body` is its encoding, which is forwarded to ranks unchanged."""
        match command:
            case messages.StartRanks():
                self._start_ranks(command)
            case messages.FormGroups():
                self._enqueue(command, body, urgent=True)
            case (
                messages.Complete()
                | messages.Inspect()
                | messages.PreviewNames()
                | messages.OpenActors()
                | messages.QueryPositions()
            ):
                self._query(command, body)
            case messages.Release():
                for handle in self._living_handles(command.ranks):
                    self._send_to_service(handle, body)
            case messages.Interrupt():
                self._interrupt(command)
            case (
                messages.AbortCollectives()
                | messages.HoldCollectives()
                | messages.ResumeCollectives()
                | messages.RanksLeft()
            ):
                for handle in self._living_handles(command.ranks):
                    self._send_to_service(handle, body)
            case messages.EndCall():
                pending_call = self._calls.get(command.call)
                if pending_call is not None:
                    self._skip_waiting_ranks(pending_call)
            case messages.InputReply(rank=rank, target=target):
                input_handle = self._ranks.get(rank)
                if (
                    input_handle is not None
                    and input_handle.running is not None
                    and input_handle.running.call == target
                ):
                    self._send_to_work(input_handle, body)
            case messages.KillRanks():
                for handle in self._living_handles(command.ranks):
                    self._send_signal(handle, command.signal)
            case messages.QueryLogs():
                log_handle = self._ranks.get(command.rank)
                text = log_handle.log.tail(command.limit_bytes) if log_handle is not None else ""
                self._report(messages.CommandReply(call=command.call, text=text))
            case messages.TakeSnapshots():
                subjects = [self._snapshot_target(self._ranks[rank]) for rank in self._local_ranks(command.ranks)]
                self._snapshots.collect(command, body, subjects)
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
                self._make_fork_starter(with_torch=spec.torch)
                if spec.start_method == "fork"
                else FreshStarter(self._loop, self._process_exited)
            )
        starter = self._starter
        try:
            threads = spec.threads_per_rank or threads_per_rank(len(command.ranks), num_cores(), cgroup_quota())
            for local_rank, rank in enumerate(command.ranks):
                link = self._ranks[rank] = RankHandle(rank, heartbeat_at=None)
                config = spawn.RankConfig(
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
                    max_files=user_fd_limit(),
                )
                starter.start_rank(config, lambda child, link=link: self._rank_started(link, child))  # type: ignore[misc]
        except OSError as error:
            self._start_failed(str(error))

    def _make_fork_starter(self, *, with_torch: bool, branch_from: str | None = None) -> ForkStarter:
        return ForkStarter(
            self._loop,
            self._process_exited,
            on_server_exit=self._fork_server_exited,
            on_failure=self._start_failed,
            on_fork_unsafe=self._fork_server_unsafe,
            with_torch=with_torch,
            listen_path=f"{self._folder}/h{self._host}-fork.sock",
            branch_from=branch_from,
        )

    def _fork_server_exited(self, reason: str) -> None:
        """Handle the exit of the fork server and with it of all its children, which no other event reports."""
        last_lines = last_lines_of(_read_tail(self._folder / "supervisor.log"), 1)
        self._start_failed(": ".join([f"the fork server {reason}", *last_lines]))
        for handle in [handle for handle in self._ranks.values() if handle.exit_reason is None]:
            if handle.process is not None:
                cause = f"ended with the fork server that it was forked from, which {reason}"
                self._process_exited(handle.process.pid, signal.SIGKILL, cause)

    def _start_failed(self, reason: str) -> None:
        """Report a failed start; mark the ranks without a process as exited."""
        self._report(messages.HostFailed(host=self._host, reason=reason))
        for handle in self._ranks.values():
            if handle.process is None and handle.exit_reason is None:
                handle.exit_reason = "was never started"
        self._check_all_exited()

    def _fork_server_unsafe(self, reason: str, retries: list[Callable[[Starter], None]]) -> None:
        """Start ranks in fresh interpreters instead of forking them."""
        text = f"ranks are not forked but started in fresh interpreters, which is slower: {reason}"
        log.warning("%s", text)
        starter = self._starter = FreshStarter(self._loop, self._process_exited)
        self._fork_unsafe_notice = messages.Notice(text)
        try:
            for retry in retries:
                retry(starter)
        except OSError as error:
            self._start_failed(str(error))

    def _rank_started(self, handle: RankHandle, child: RankProcess) -> None:
        if handle.exit_reason is not None:  # another rank could not be started, so the mesh failed to start
            os.kill(child.pid, signal.SIGKILL)
            child.close()
            return
        handle.process = child
        if self._fork_unsafe_notice is not None:
            handle.pending_notices.append(self._fork_unsafe_notice)
        self._snapshots.rank_started(handle.rank)
        self._by_pid[child.pid] = handle

    def _enqueue(self, command: Any, body: bytes, *, urgent: bool = False) -> None:
        ranks = self._local_ranks(command.ranks)
        pending_call = self._open_call(command, ranks)
        queued = QueuedCommand(command.call, body)
        for rank in ranks:
            handle = self._ranks[rank]
            if handle.exit_reason is not None:
                self._record_outcome(pending_call, rank, self._lost_outcome(handle))
                continue
            if urgent:
                handle.queue.appendleft(queued)
            else:
                handle.queue.append(queued)
            self._dispatch_next(handle)
        self._finish_if_complete(pending_call)

    def _query(self, command: Any, body: bytes) -> None:
        ranks = self._local_ranks(command.ranks)
        pending_call = self._open_call(command, ranks)
        for rank in ranks:
            handle = self._ranks[rank]
            if handle.exit_reason is None:
                self._send_to_service(handle, body)
                handle.has_actors |= isinstance(command, messages.OpenActors)
            else:
                self._record_outcome(pending_call, rank, self._lost_outcome(handle))
        self._finish_if_complete(pending_call)
        self._loop.call_later(_QUERY_TIMEOUT_S, lambda: self._skip_waiting_ranks(pending_call))

    def _skip_waiting_ranks(self, pending_call: PendingCall) -> None:
        """Record "skipped" for the ranks that have not finished a call.

        Used for a query that a rank has not replied to (it keeps the GIL, or is stopped), and for a call that ends
        without them.
        """
        for rank in sorted(pending_call.waiting_ranks):
            self._record_outcome(pending_call, rank, Outcome(status="skipped"))
        self._finish_if_complete(pending_call)

    def _interrupt(self, command: messages.Interrupt) -> None:
        signalled: list[tuple[RankHandle, QueuedCommand]] = []
        continued: list[RankHandle] = []
        cancelled: dict[str, QueuedCommand] = {}
        for handle in self._living_handles(command.ranks):
            for queued in [one for one in handle.queue if _is_target(command, one.call) and not one.is_cancelled]:
                pending_call = self._calls.get(queued.call)
                if pending_call is not None and isinstance(pending_call.command, messages.RunOps):
                    # Other ranks may have changed tensors by it: this one must be notified that it has not.
                    cancelled[queued.call] = cancelled.get(queued.call) or _cancelled(pending_call.command)
                    handle.queue[handle.queue.index(queued)] = cancelled[queued.call]
                else:
                    handle.queue.remove(queued)
                self._finish_rank(queued.call, handle.rank, Outcome(status="interrupted"))
            if handle.running is not None and command.target in (None, handle.running.call):
                # By its id, which also works before the rank has read the command from its socket; and by a signal,
                # which needs no service thread that is able to run.
                interrupt = messages.Interrupt(ranks=(handle.rank,), target=handle.running.call)  # type: ignore[arg-type]
                self._send_to_service(handle, codec.encode_body(interrupt))
                self._send_signal(handle, signal.SIGINT)
                signalled.append((handle, handle.running))
                if self._continue_if_stopped(handle):
                    continued.append(handle)

        def still() -> list[RankHandle]:
            return [handle for handle, queued in signalled if handle.running is queued and handle.exit_reason is None]

        def again() -> None:
            for handle in still():
                self._send_signal(handle, signal.SIGINT)
                self._continue_if_stopped(handle)

        self._report_continued(continued)
        # Ranks ignore a signal that follows soon after one that worked for the same Stop
        # (`stop_timing.SIGINT_DEBOUNCE_S`).
        for delay_s in SIGINT_REPEATS_S:
            self._loop.call_later(delay_s, again)
        if command.hard:
            self._abort_collectives(still())
            self._loop.call_later(KILL_AFTER_S, lambda: self._kill_unresponsive(still()))
        else:
            self._loop.call_later(ABORT_AFTER_S, lambda: self._abort_collectives(still()))
            self._loop.call_later(STUCK_AFTER_S, lambda: self._report_stuck(still()))

    def _abort_collectives(self, handles: list[RankHandle]) -> None:
        for handle in handles:
            unblock = messages.AbortCollectives(ranks=(handle.rank,), reason="interrupted", interrupt=True)
            self._send_to_service(handle, codec.encode_body(unblock))

    def _continue_if_stopped(self, handle: RankHandle) -> bool:
        """Continue a rank that is stopped (SIGSTOP), which no other signal reaches; return whether it was stopped.

        Call it after SIGINT, so that the rank finds the SIGINT first.
        """
        if handle.process is None or handle.exit_reason is not None or procfs.process_state(handle.process.pid) != "T":
            return False
        self._send_signal(handle, signal.SIGCONT)
        return True

    def _report_continued(self, handles: list[RankHandle]) -> None:
        for call, group in _group_by_call(handles).items():
            ranks = tuple(handle.rank for handle in group)
            was = "was" if len(ranks) == 1 else "were"
            self._report_notice(
                call, ranks, f"{name_ranks(ranks)} {was} stopped (SIGSTOP), and let go on (SIGCONT) by Stop"
            )

    def _report_stuck(self, handles: list[RankHandle]) -> None:
        for call, group in _group_by_call(handles).items():
            by_reason: dict[str, list[int]] = {}
            for handle in group:
                by_reason.setdefault(self._describe_stuck(handle), []).append(handle.rank)
            ranks = tuple(handle.rank for handle in group)
            where = "; ".join(f"{name_ranks(found)} {reason}" for reason, found in by_reason.items())
            self._report(messages.RanksStuck(call=call, ranks=ranks, reason=where))  # type: ignore[arg-type]

    def _describe_stuck(self, handle: RankHandle) -> str:
        """Return why a rank does not return from a Stop, as seen from outside, as the end of a sentence."""
        pid = handle.process.pid if handle.process is not None else 0
        line = None if handle.heartbeat is None else handle.heartbeat.line
        at = "" if line is None else f", at line {line} of the cell"
        match procfs.process_state(pid):
            case "t":
                return f"(pid {pid}) is held by a debugger"
            case "D":
                return f"(pid {pid}) waits in the system, for a disk or a driver, where no signal reaches it"
            case "T":
                return f"(pid {pid}) stops itself (SIGSTOP) again and again{at}"
        now = self._loop.clock.monotonic()
        if handle.heartbeat_at is not None and now - handle.heartbeat_at > 1.5 * _HEARTBEAT_S:
            return f"(pid {pid}) is in C code that keeps the GIL{at}"
        return f"(pid {pid}) is in C code, or in code that catches KeyboardInterrupt{at}"

    def _kill_unresponsive(self, handles: list[RankHandle]) -> None:
        for call, group in _group_by_call(handles).items():
            ranks = tuple(handle.rank for handle in group)
            was = "was" if len(ranks) == 1 else "were"
            text = f"second Stop: {name_ranks(ranks)} did not come back within {KILL_AFTER_S:.0f} s and {was} killed"
            self._report_notice(call, ranks, text)
            for handle in group:
                self._send_signal(handle, signal.SIGKILL)

    def _report_notice(self, call: str, ranks: Ranks, text: str) -> None:
        item = RankDisplay(ranks=ranks, item=messages.Notice(text))
        self._report(messages.CallOutput(call=call, items=(item,)))  # type: ignore[arg-type]

    def stop(self, grace_s: float, on_stopped: Callable[[], None]) -> None:
        """End every rank, in order if it listens, by SIGKILL after `grace_s` seconds; then call `on_stopped`.

        A rank whose actors are ending, and that still sends heartbeats, has ACTORS_GRACE_S more.
        """
        self._on_all_exited = on_stopped
        body = codec.encode_body(messages.Exit())
        for handle in self._living_handles(tuple(self._ranks)):
            handle.queue.clear()
            if handle.running is None and handle.work_ready:
                self._send_to_work(handle, body)
            else:
                self._send_to_service(handle, body)
        self._loop.call_later(grace_s, lambda: self._kill_all(spare_actors=True))
        self._loop.call_later(grace_s + ACTORS_GRACE_S, self._kill_all)
        self._check_all_exited()

    def _kill_all(self, *, spare_actors: bool = False) -> None:
        for handle in self._living_handles(tuple(self._ranks)):
            if not (spare_actors and handle.has_actors and not self._is_silent(handle)):
                self._send_signal(handle, signal.SIGKILL)

    def _check_all_exited(self) -> None:
        if self._on_all_exited is not None and all(handle.exit_reason is not None for handle in self._ranks.values()):
            callback, self._on_all_exited = self._on_all_exited, None
            for orphan in list(self._orphan_outputs.values()):
                self._flush_orphan(orphan, last=True)
            if self._starter is not None:
                self._starter.close()
                self._starter = None
            callback()

    def close(self) -> None:
        """Close the sockets. Call after `stop`."""
        self._heartbeat_timer.cancel()
        self._snapshots.close()
        for socket in (self._work, self._service):
            self._loop.unwatch(socket)
            socket.close()

    # ---- reports from ranks

    def _on_message(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        peer = frames[0]
        is_authenticated = (socket, peer) in self._authenticated
        try:
            message = (codec.rank_reports if is_authenticated else codec.rank_hellos).decode(frames[1:])
        except (ProtocolError, VersionMismatch) as error:
            self._rejections.warning("a message from %r was refused: %s", peer[:16], error)
            return
        handle = self._ranks.get(message.rank)
        if handle is None or peer != b"r%d" % message.rank:
            self._rejections.warning("a report from %r speaks for rank %s, and was refused", peer[:16], message.rank)
            return
        if isinstance(message, messages.RankReady):
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                self._rejections.warning(
                    "a peer without the mesh's token says it is rank %s, and was refused", message.rank
                )
                return
            self._authenticated.add((socket, peer))
            if socket is self._work:
                handle.work_ready = True
            else:
                handle.service_ready = True
        self._handlers[type(message)](message)

    def _rank_ready(self, message: messages.RankReady) -> None:
        handle = self._ranks[message.rank]
        handle.device = message.device
        if handle.service_ready and handle.service_backlog:
            backlog, handle.service_backlog = handle.service_backlog, []
            for body in backlog:
                self._send_to_service(handle, body)
        if handle.work_ready:
            self._dispatch_next(handle)

    def _rank_exiting(self, message: messages.RankExiting) -> None:
        self._send_to_service(self._ranks[message.rank], codec.encode_body(messages.Exit()))

    def _output_received(self, message: messages.RankOutput) -> None:
        handle = self._ranks[message.rank]
        handle.early_outputs[message.seq] = message
        while (piece := handle.early_outputs.pop(handle.num_outputs + 1, None)) is not None:
            handle.num_outputs += 1
            self._fold_output(handle, piece.call, piece.items)
        if handle.pending_finish is not None and handle.pending_finish.last_output_seq <= handle.num_outputs:
            finish, handle.pending_finish = handle.pending_finish, None
            self._rank_finished(finish)

    def _fold_output(self, handle: RankHandle, call: str | None, items: tuple[messages.OutputItem, ...]) -> None:
        for item in items:
            if isinstance(item, messages.Text):
                handle.log.append(item.text)
        if call is None:
            return
        pending_call = self._calls.get(call)
        now = self._loop.clock.monotonic()
        if pending_call is None:  # printed by an actor, or by a thread of a cell that has ended
            orphan = self._orphan_outputs.get(call)
            if orphan is None or handle.rank not in orphan.ranks:
                ranks = tuple(
                    rank for rank, other in self._ranks.items() if other.exit_reason is None or rank == handle.rank
                )
                orphan = self._orphan_outputs[call] = OrphanOutput(
                    call, ranks, LineFolder(ranks, mergeable=self._mergeable)
                )
            orphan.folder.feed(handle.rank, items, now)
            if orphan.flush_timer is None:
                orphan.flush_timer = self._loop.call_later(_FLUSH_INTERVAL_S, lambda: self._flush_orphan(orphan))
            return
        pending_call.folder.feed(handle.rank, items, now)
        if pending_call.flush_timer is None:
            pending_call.flush_timer = self._loop.call_later(_FLUSH_INTERVAL_S, lambda: self._flush_call(pending_call))

    def _flush_orphan(self, orphan: OrphanOutput, *, last: bool = False) -> None:
        """Flush output that belongs to no open call.

        It waits for equal lines of other ranks as in a cell, unless `last`.
        """
        now = self._loop.clock.monotonic()
        items = list(orphan.folder.flush(now, max_chars=_MAX_FLUSH_CHARS))
        deadline = orphan.folder.next_deadline() if not last else None
        if deadline is None:
            items += orphan.folder.flush(now, final=True)
            if self._orphan_outputs.get(orphan.call) is orphan:
                del self._orphan_outputs[orphan.call]
        else:
            orphan.flush_timer = self._loop.call_later(
                max(_FLUSH_INTERVAL_S, deadline - now), lambda: self._flush_orphan(orphan)
            )
        if items:
            self._report(messages.CallOutput(call=orphan.call, items=tuple(items)))  # type: ignore[arg-type]

    def _flush_call(self, pending_call: PendingCall) -> None:
        if pending_call.call not in self._calls:
            return
        now = self._loop.clock.monotonic()
        items = tuple(pending_call.folder.flush(now, max_chars=_MAX_FLUSH_CHARS))
        if items:
            self._report(messages.CallOutput(call=pending_call.call, items=items))  # type: ignore[arg-type]
        deadline = pending_call.folder.next_deadline()
        pending_call.flush_timer = None
        if deadline is not None:
            pending_call.flush_timer = self._loop.call_later(
                max(_FLUSH_INTERVAL_S, deadline - now), lambda: self._flush_call(pending_call)
            )

    def _rank_finished(self, message: messages.RankFinished) -> None:
        handle = self._ranks[message.rank]
        if message.last_output_seq > handle.num_outputs:
            handle.pending_finish = message
            return
        if message.released_segments:
            self._report(messages.SegmentsReleased(rank=message.rank, segments=message.released_segments))
        if message.items:
            self._fold_output(handle, message.call, message.items)
        if handle.running is not None and handle.running.call == message.call:
            handle.running = None
        pending_call = self._calls.get(message.call)
        if pending_call is not None:
            pending_call.seconds[message.rank] = message.seconds
        self._finish_rank(message.call, message.rank, message.outcome)
        if pending_call is not None and message.outcome.status != "ok" and not pending_call.is_report_scheduled:
            pending_call.is_report_scheduled = True
            self._loop.call_later(_PROGRESS_AFTER_FAILURE_S, lambda: self._report_progress(pending_call))
        self._dispatch_next(handle)

    def _rank_replied(self, message: messages.RankReply) -> None:
        self._finish_rank(message.call, message.rank, Outcome(status="ok", reply=message.content))

    def _input_requested(self, message: messages.RankInputRequest) -> None:
        pending_call = self._calls.get(message.call)
        if pending_call is not None:  # earlier output must be displayed before the prompt
            self._flush_call_now(pending_call)
        self._report(
            messages.InputRequest(
                call=message.call, rank=message.rank, prompt=message.prompt, password=message.password
            )
        )

    def _flush_call_now(self, pending_call: PendingCall) -> None:
        items = tuple(pending_call.folder.flush(self._loop.clock.monotonic(), max_age_s=0.0))
        if items:
            self._report(messages.CallOutput(call=pending_call.call, items=items))  # type: ignore[arg-type]

    def _heartbeat_received(self, message: messages.RankHeartbeat) -> None:
        handle = self._ranks[message.rank]
        handle.heartbeat, handle.heartbeat_at = message, self._loop.clock.monotonic()
        if message.metrics is not None:
            self._snapshots.add_metrics(message.metrics)
        if message.released_segments:
            self._report(messages.SegmentsReleased(rank=message.rank, segments=message.released_segments))

    def _service_failed(self, message: messages.ServiceFailed) -> None:
        """Report the error in the output of the running call, or of the next one; log the traceback."""
        handle = self._ranks[message.rank]
        log.error("rank %d, %s: %s\n%s", message.rank, message.activity, message.error, message.traceback)
        handle.log.append(message.traceback)
        handle.pending_notices.append(
            messages.Notice(
                f"an error in Meshbook's own thread on this rank, {message.activity}: {message.error}. The rank goes "
                "on; the traceback is in %mesh logs"
            )
        )
        if handle.running is not None:
            self._fold_pending_notices(handle, handle.running)

    def _fold_pending_notices(self, handle: RankHandle, queued: QueuedCommand) -> None:
        pending_call = self._calls.get(queued.call)
        if (
            handle.pending_notices
            and pending_call is not None
            and not isinstance(pending_call.command, messages.FormGroups)
        ):
            notices, handle.pending_notices = tuple(handle.pending_notices), []
            self._fold_output(handle, queued.call, notices)

    def _tick(self) -> None:
        self._heartbeat_timer = self._loop.call_later(_HEARTBEAT_S, self._tick)
        if not self._ranks:
            return
        for handle in self._ranks.values():
            self._drain_if_silent(handle)
        self._report_heartbeat()
        now = self._loop.clock.monotonic()
        for pending_call in list(self._calls.values()):  # a copy: a report may start a query, and so a call, at once
            if now - pending_call.opened_at > _PROGRESS_AFTER_S:
                self._report_progress(pending_call)

    def _report_progress(self, pending_call: PendingCall) -> None:
        """Report which ranks have finished, if that has changed."""
        pending_call.is_report_scheduled = False
        done = len(pending_call.outcomes)
        if done != pending_call.num_reported_done and self._calls.get(pending_call.call) is pending_call:
            pending_call.num_reported_done = done
            failure = _describe_failure(pending_call) if isinstance(pending_call.command, messages.FormGroups) else ""
            done_ranks = tuple(sorted(pending_call.outcomes))
            progress = messages.CallProgressed(pending_call.call, done_ranks, failure)  # type: ignore[arg-type]
            self._report(progress)

    def _report_heartbeat(self) -> None:
        ranks = tuple(self._rank_info(handle) for handle in self._ranks.values())
        self._report(messages.HostHeartbeat(host=self._host, ranks=ranks, metrics=self._snapshots.drain_metrics()))

    def _drain_if_silent(self, handle: RankHandle) -> None:
        """Read the output of a silent rank: C code that keeps the GIL would block on a full pipe for ever."""
        if handle.process is not None and handle.exit_reason is None and self._is_silent(handle):
            self._read_pipes(handle)

    def _is_silent(self, handle: RankHandle) -> bool:
        return handle.heartbeat_at is not None and self._loop.clock.monotonic() - handle.heartbeat_at > 2 * _HEARTBEAT_S

    def _rank_info(self, handle: RankHandle) -> messages.RankInfo:
        now = self._loop.clock.monotonic()
        age = None if handle.heartbeat_at is None else now - handle.heartbeat_at
        state = "idle" if handle.running is None else "busy"
        if handle.exit_reason is not None:
            state = "dead"
        elif not handle.work_ready:
            state = "starting"
        elif age is not None and age > _SILENT_AFTER_S:
            state = "silent"
        pending_call = self._calls.get(handle.running.call) if handle.running is not None else None
        beat = handle.heartbeat
        return messages.RankInfo(
            rank=handle.rank,
            state=state,  # type: ignore[arg-type]
            host=self.hostname,
            pid=handle.process.pid if handle.process is not None else None,
            device=handle.device,
            call=handle.running.call if handle.running is not None else None,  # type: ignore[arg-type]
            cell=getattr(pending_call.command, "label", None) if pending_call is not None else None,
            line=beat.line
            if beat is not None and handle.running is not None and beat.call == handle.running.call
            else None,
            beat_age_s=age,
            rss_bytes=beat.rss_bytes if beat is not None else None,
            peak_rss_bytes=beat.peak_rss_bytes if beat is not None else None,
            exit=handle.exit_reason,
        )

    # ---- exit of a rank

    def _process_exited(self, pid: int, status: int, cause: str | None = None) -> None:
        """Handle the exit of a rank's process.

        Args:
            status: as returned by waitpid.
            cause: what ended it, if known; then `status` has no meaning.
        """
        handle = self._by_pid.pop(pid, None)
        if handle is None or handle.process is None:
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if cause is not None:
            number = code = None
        handle.exit_reason = cause or describe_exit(number, code)
        oom_killed = number == signal.SIGKILL and not handle.is_killed_by_us and self._snapshots.has_recent_oom_kill()
        if oom_killed:
            handle.exit_reason += " because the host ran out of memory"
        self._drain_sockets()
        if handle.pending_finish is not None:  # it finished, and died before its last output arrived
            finish, handle.pending_finish = handle.pending_finish, None
            handle.num_outputs = finish.last_output_seq
            self._rank_finished(finish)
        unread_output = self._read_pipes(handle)
        last_lines = last_lines_of(handle.process.crash_log.read() + unread_output)
        last_collective = handle.process.crash_log.read_note()
        handle.process.close()
        exited = messages.RankExited(
            rank=handle.rank,
            pid=pid,
            exit_code=code,
            signal=number,
            host=self.hostname,
            last_lines=last_lines,
            last_collective=last_collective,
            oom_killed=oom_killed,
            cause=cause,
        )
        self._snapshots.rank_exited(exited)
        stopping = self._on_all_exited is not None
        if not stopping:
            self._report(exited)
        handle.running = None
        handle.queue.clear()
        for pending_call in [
            pending_call for pending_call in self._calls.values() if handle.rank in pending_call.waiting_ranks
        ]:
            self._record_outcome(pending_call, handle.rank, self._lost_outcome(handle))
            self._finish_if_complete(pending_call)
        self._check_all_exited()

    def _drain_sockets(self) -> None:
        """Handle the reports of a dead rank that are still in the sockets, before its exit is reported.

        Messages of other ranks are interleaved with them and keep arriving: the number of rounds is bounded by the most
        messages that each rank can have sent.
        """
        for socket in (self._work, self._service):
            for _ in range(_MAX_LAST_MESSAGES * len(self._ranks)):
                if not socket.poll(0):
                    break
                frames = socket.recv_multipart()
                try:
                    self._on_message(socket, frames)
                except Exception:  # the exit must be reported in any case
                    log.exception("a report from %r could not be handled", frames[0][:16])

    def _read_pipes(self, handle: RankHandle) -> str:
        """Return the unread content of the rank's stdout and stderr.

        Output that arrives during the read is ignored: a child process of the rank may write without end.
        """
        unread_output = ""
        if handle.process is None:
            return unread_output
        for fd, stream in ((handle.process.out, "stdout"), (handle.process.err, "stderr")):
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(fd, num_unread_bytes(fd))
            if data:
                text = messages.Text(stream=stream, text=data.decode("utf-8", "replace"))  # type: ignore[arg-type]
                call = handle.running.call if handle.running is not None else handle.last_call
                self._fold_output(handle, call, (text,))
                unread_output += text.text
        return unread_output

    def _lost_outcome(self, handle: RankHandle) -> Outcome:
        error = messages.RankError(ename="RankLost", evalue=f"rank {handle.rank} {handle.exit_reason}", traceback=())
        return Outcome(status="lost", error=error)

    # ---- calls

    def _open_call(self, command: Any, ranks: Ranks) -> PendingCall:
        pending_call = PendingCall(
            command.call,
            command,
            set(ranks),
            self._loop.clock.monotonic(),
            LineFolder(ranks, mergeable=self._mergeable),
        )
        self._calls[command.call] = pending_call
        return pending_call

    def _finish_rank(self, call: str, rank: int, outcome: Outcome) -> None:
        pending_call = self._calls.get(call)
        if pending_call is not None:
            self._record_outcome(pending_call, rank, outcome)
            self._finish_if_complete(pending_call)

    def _record_outcome(self, pending_call: PendingCall, rank: int, outcome: Outcome) -> None:
        if rank in pending_call.waiting_ranks:
            pending_call.waiting_ranks.discard(rank)
            pending_call.outcomes[rank] = outcome
            pending_call.folder.rank_done(rank)

    def _finish_if_complete(self, pending_call: PendingCall) -> None:
        if pending_call.waiting_ranks or self._calls.get(pending_call.call) is not pending_call:
            return
        del self._calls[pending_call.call]
        if pending_call.flush_timer is not None:
            pending_call.flush_timer.cancel()
        if isinstance(pending_call.command, messages.FormGroups):
            self._report_heartbeat()  # the ranks must be visible as soon as the mesh is reported ready
        small = len(pending_call.outcomes) <= 64
        self._report(
            messages.CallFinished(
                call=pending_call.call,  # type: ignore[arg-type]
                outcomes=fold_outcomes(pending_call.outcomes.items()),
                seconds=max(pending_call.seconds.values(), default=0.0),
                rank_seconds=pending_call.seconds if small else None,
                items=tuple(pending_call.folder.flush(self._loop.clock.monotonic(), final=True)),
            )
        )

    def _dispatch_next(self, handle: RankHandle) -> None:
        if handle.running is None and handle.queue and handle.work_ready and handle.exit_reason is None:
            handle.running = handle.queue.popleft()
            handle.last_call = handle.running.call
            handle.running_since = self._loop.clock.monotonic()
            self._send_to_work(handle, handle.running.body)
            self._fold_pending_notices(handle, handle.running)

    # ---- helpers

    def _snapshot_target(self, handle: RankHandle) -> SnapshotTarget:
        now, running = self._loop.clock.monotonic(), handle.running
        pending_call = self._calls.get(running.call) if running is not None else None
        return SnapshotTarget(
            rank=handle.rank,
            pid=None if handle.process is None else handle.process.pid,
            beat_age_s=None if handle.heartbeat_at is None else now - handle.heartbeat_at,
            is_dead=handle.exit_reason is not None,
            call=None if running is None else running.call,
            label=getattr(pending_call.command, "label", None) if pending_call is not None else None,
            is_cell=pending_call is not None and isinstance(pending_call.command, messages.RunCell),
            running_s=None if running is None else now - handle.running_since,
            last_collective=handle.process.crash_log.read_note()
            if handle.process is not None and handle.exit_reason is None
            else None,
        )

    def _local_ranks(self, ranks: Ranks) -> Ranks:
        return tuple(rank for rank in ranks if rank in self._ranks)

    def _living_handles(self, ranks: Ranks) -> list[RankHandle]:
        return [
            handle for rank in ranks if (handle := self._ranks.get(rank)) is not None and handle.exit_reason is None
        ]

    def _send_to_work(self, handle: RankHandle, body: bytes) -> None:
        self._work.send_multipart([b"r%d" % handle.rank, codec.PROTOCOL, body])

    def _send_to_service(self, handle: RankHandle, body: bytes) -> None:
        if handle.service_ready:
            self._service.send_multipart([b"r%d" % handle.rank, codec.PROTOCOL, body])
        else:
            handle.service_backlog.append(body)

    def _send_signal(self, handle: RankHandle, number: int) -> None:
        if handle.process is not None and handle.exit_reason is None:
            handle.is_killed_by_us = handle.is_killed_by_us or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.process.pid, number)


def _read_tail(path: Path) -> str:
    """Return the end of a file that may be long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _describe_failure(pending_call: PendingCall) -> str:
    """Return the error of the lowest rank that failed; "" if none did."""
    for rank, outcome in sorted(pending_call.outcomes.items()):
        if outcome.status != "ok" and (error := outcome.error) is not None:
            return f"rank {rank}: {error.ename}: {error.evalue}"
    return ""


def _is_target(command: messages.Interrupt, call: str) -> bool:
    """Whether a Stop also cancels a queued call: the named one, or without a target those of the client that stops."""
    if command.target is not None:
        return command.target == call
    return command.client in (None, client_of_call(call))


def _cancelled(command: messages.RunOps) -> QueuedCommand:
    """Return the command for ranks that must not run it."""
    cancelled_command = msgspec.structs.replace(command, fetch=None, is_cancelled=True)
    return QueuedCommand(command.call, codec.encode_body(cancelled_command), is_cancelled=True)


def num_unread_bytes(fd: int) -> int:
    """Return the number of bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _group_by_call(handles: list[RankHandle]) -> dict[str, list[RankHandle]]:
    found: dict[str, list[RankHandle]] = {}
    for handle in handles:
        if handle.running is not None:
            found.setdefault(handle.running.call, []).append(handle)
    return found
