"""A host's agent: it carries out what the host's ledger decides, and tells the ledger what happens.

Commands enter through `handle`, folded reports leave through `report`; the supervisor may run in the same process (the
local engine) or behind a socket (`host/main.py`), which makes no difference here. The agent has the sockets that reach
the ranks (`rank_sockets`), their processes (`launcher`, `rank_processes`), the timers and the snapshots; the ledger
(`host/ledger.py`) decides.
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from meshbook.errors import describe_exit
from meshbook.host import instructions as do
from meshbook.host.launcher import RankLauncher, kill_unwanted
from meshbook.host.ledger import HostLedger
from meshbook.host.logring import last_lines_of
from meshbook.host.rank_processes import RankProcesses, read_pipes
from meshbook.host.rank_record import HEARTBEAT_S, RankRecord
from meshbook.host.rank_sockets import RankSockets
from meshbook.host.snapshots import SnapshotCollector, SnapshotTarget
from meshbook.host.starter import RankProcess
from meshbook.wire import codec, messages
from meshbook.wire.loop import Loop
from meshbook.wire.process_control import ACTORS_GRACE_S

log = logging.getLogger("meshbook.host")

# Commands for the service threads of living ranks, which nobody waits for.
_FORWARDED = (
    messages.Release,
    messages.AbortCollectives,
    messages.HoldCollectives,
    messages.ResumeCollectives,
    messages.RanksLeft,
    messages.WriteCheckpointMetadata,
    messages.DropCheckpoint,
    messages.SetPreemptionPoint,
)
# Commands that service threads answer.
_QUERIES = (
    messages.Complete,
    messages.Inspect,
    messages.PreviewNames,
    messages.OpenActors,
    messages.QueryPositions,
    messages.QueryPreemptionPoint,
)


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
        self._loop, self._host, self._report = loop, host, report
        self.hostname = sockets.gethostname()
        self.ledger = HostLedger(mergeable=mergeable)
        self._todo: deque[do.Instruction] = deque()
        self._is_carrying_out = False
        self._processes = RankProcesses()
        self._on_all_exited: Callable[[], None] | None = None
        self._sockets = RankSockets(loop, context, folder, host, token, self.ledger.ranks, self._on_report)
        self.launcher = RankLauncher(loop, folder, host, token, self._sockets.addresses, self)
        self._snapshots = SnapshotCollector(
            loop, self.hostname, lambda rank, body: self._carry_out(self.ledger.ranks[rank].to_service(body)), report
        )
        self._heartbeat_timer = loop.call_later(HEARTBEAT_S, self._tick)

    # ---- commands from the supervisor

    def warm_up(self, *, with_torch: bool = True, branch_from: str | None = None) -> None:
        """Start the fork server before ranks are requested, so that its imports are done by then."""
        self.launcher.warm_up(with_torch=with_torch, branch_from=branch_from)

    def handle(self, command: messages.HostCommand, body: bytes) -> None:
        """Carry out a command. `body` is its encoding, which is forwarded to ranks unchanged."""
        ledger, now = self.ledger, self._loop.clock.monotonic()
        match command:
            case messages.StartRanks():
                for rank in command.ranks:
                    self._sockets.expect(rank, ledger.start(rank).incarnation)
                self.launcher.start(command, {rank: ledger.ranks[rank].incarnation for rank in command.ranks})
            case messages.LeaveMesh():
                self._carry_out(ledger.leave(command, now))
            case messages.TakeSnapshots():
                targets = [
                    _snapshot_target(ledger, ledger.ranks[rank], self._processes.get(rank), now)
                    for rank in ledger.local(command.ranks)
                ]
                self._snapshots.collect(command, body, targets)
            case messages.QueryLogs():
                record = ledger.ranks.get(command.rank)
                text = record.log.tail(command.limit_bytes) if record is not None else ""
                self._report(messages.CommandReply(call=command.call, text=text))
            case messages.Exit():
                self.stop(command.grace_s, lambda: None)
            case messages.Interrupt():
                self._carry_out(ledger.stops.interrupt(command, now))
            case messages.EndRanks():
                self._carry_out(ledger.end_ranks(command.ranks))
            case messages.EndCall():
                self._carry_out(ledger.calls.skip_waiting(command.call, now))
            case messages.InputReply():
                self._carry_out(ledger.reply_to_input(command, body))
            case messages.KillRanks():
                self._carry_out(ledger.signal_ranks(command.ranks, command.signal))
            case _ if isinstance(command, _FORWARDED):
                self._carry_out(ledger.forward_to_services(command.ranks, body))
            case _ if isinstance(command, _QUERIES):
                self._carry_out(ledger.query(command, body, now))
            case _:
                urgent = isinstance(command, messages.FormGroups)
                self._carry_out(ledger.enqueue(command, body, now, urgent=urgent))

    def stop(self, grace_s: float, on_stopped: Callable[[], None]) -> None:
        """End every rank, in order if it listens, by SIGKILL after `grace_s` seconds; then call `on_stopped`.

        A rank whose actors are ending, and that still sends heartbeats, has ACTORS_GRACE_S more.
        """
        self._on_all_exited = on_stopped
        spare = do.SetAlarm(grace_s, lambda now: self.ledger.kill_all(now, spare_actors=True))
        self._carry_out(
            [*self.ledger.request_exit(), spare, do.SetAlarm(grace_s + ACTORS_GRACE_S, self.ledger.kill_all)]
        )
        self._check_all_exited()

    def _check_all_exited(self) -> None:
        if self._on_all_exited is not None and not self.ledger.living():
            callback, self._on_all_exited = self._on_all_exited, None
            self._carry_out(self.ledger.calls.flush_orphans(self._loop.clock.monotonic()))
            self.launcher.close()
            callback()

    def close(self) -> None:
        """Close the sockets. Call after `stop`."""
        self._heartbeat_timer.cancel()
        self._snapshots.close()
        self._sockets.close()

    # ---- instructions

    def _carry_out(self, todo: do.Instructions) -> None:
        """Carry out instructions, after those that are being carried out.

        A report may have the supervisor, in this process, send a command at once: what follows from it comes last.
        """
        self._todo += todo
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            while self._todo:
                self._carry_out_one(self._todo.popleft())
        finally:
            self._is_carrying_out = False
            if self._todo:  # one has failed, which the loop reports; the others are carried out all the same
                self._loop.call_later(0.0, lambda: self._carry_out([]))

    def _carry_out_one(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.SendWork(rank, body):
                self._sockets.send_work(rank, body)
            case do.SendService(rank, body):
                self._sockets.send_service(rank, body)
            case do.SendReport(report):
                self._report(report)
            case do.SetAlarm(after_s, action):
                self._loop.call_later(after_s, lambda: self._carry_out(action(self._loop.clock.monotonic())))
            case do.SignalRank(rank, number):
                self._processes.signal(rank, number)
            case do.ContinueStopped(ranks, report):
                continued = tuple(rank for rank in ranks if self._processes.state(rank) == "T")
                for rank in continued:
                    self._processes.signal(rank, signal.SIGCONT)
                self._carry_out(report(continued))
            case do.InspectStuck(ranks):
                states = {rank: self._processes.state(rank) for rank in ranks}
                self._carry_out(self.ledger.stops.stuck(states, self._loop.clock.monotonic()))
            case do.SendHeartbeat():
                self._report_heartbeat()

    # ---- reports from ranks

    def _on_report(self, message: Any, is_work: bool) -> None:
        """Pass on a report of a rank that has shown the token."""
        ledger, now = self.ledger, self._loop.clock.monotonic()
        match message:
            case messages.RankFinished():
                self._carry_out(ledger.rank_finished(message, now))
            case messages.RankOutput():
                self._carry_out(ledger.output_received(message, now))
            case messages.RankReady():
                self._carry_out(ledger.socket_ready(message.rank, work=is_work, device=message.device, now=now))
            case messages.RankReply():
                self._carry_out(ledger.rank_replied(message, now))
            case messages.RankHeartbeat():
                self._carry_out(ledger.heartbeat_received(message, now))
                if message.metrics is not None:
                    self._snapshots.add_metrics(message.metrics)
            case messages.RankInputRequest(call=call, rank=rank, prompt=prompt, password=password):
                request = messages.InputRequest(call=call, rank=rank, prompt=prompt, password=password)
                self._carry_out([*ledger.calls.flush_before_prompt(call, now), do.SendReport(request)])
            case messages.RankSnapshotReply():
                self._snapshots.reply_received(message)
            case messages.CheckpointWritten():
                self._report(message)
            case messages.RankTerminating(rank=rank):
                self._report(messages.TerminationRequested((rank,)))
            case messages.RankExiting():
                self._carry_out(ledger.ranks[message.rank].to_service(codec.encode_body(messages.Exit())))
            case messages.ServiceFailed():
                log.error("rank %d, %s: %s\n%s", message.rank, message.activity, message.error, message.traceback)
                self._carry_out(ledger.service_failed(message, now))

    def _tick(self) -> None:
        self._heartbeat_timer = self._loop.call_later(HEARTBEAT_S, self._tick)
        if not self.ledger.ranks:
            return
        now = self._loop.clock.monotonic()
        for record in self.ledger.overdue_ranks(now):
            if (process := self._processes.get(record.rank)) is not None:
                self._read_pipes(record.rank, process)
        self._report_heartbeat()
        self._carry_out(self.ledger.calls.report_progress(now))

    def _report_heartbeat(self) -> None:
        now = self._loop.clock.monotonic()
        ranks = tuple(self.ledger.rank_info(record, self.hostname, now) for record in self.ledger.ranks.values())
        self._report(messages.HostHeartbeat(host=self._host, ranks=ranks, metrics=self._snapshots.drain_metrics()))

    # ---- processes: what the launcher reports

    def process_started(self, rank: int, process: RankProcess) -> None:
        record = self.ledger.ranks[rank]
        if record.exit_reason is not None:  # another rank could not be started, so the mesh failed to start
            kill_unwanted(process)
            return
        record.pid = process.pid
        self._processes.add(rank, process)
        if self.launcher.fork_unsafe_notice is not None:
            record.pending_notices.append(self.launcher.fork_unsafe_notice)
        self._snapshots.rank_started(rank)

    def start_failed(self, reason: str) -> None:
        """Report a failed start, and the ranks without a process as exited."""
        self._report(messages.HostFailed(host=self._host, reason=reason))
        for record in self.ledger.living():
            if record.pid is None:
                record.exit_reason = f"could not be started: {reason}"
                exited = messages.RankExited(
                    rank=record.rank,
                    pid=0,
                    exit_code=None,
                    signal=None,
                    host=self.hostname,
                    last_lines=(),
                    last_collective=None,
                    cause=record.exit_reason,
                )
                self._report(exited)
                self._carry_out(self.ledger.rank_lost(record.rank, self._loop.clock.monotonic()))
        self._check_all_exited()

    def fork_server_terminating(self) -> None:
        self._report(messages.TerminationRequested(self.ledger.living_ranks))

    def fork_server_exited(self, cause: str) -> None:
        # all exits before any conclusion: a call that ends with the first of them must not call the others alive
        self._conclude_exits([self._take_exit(pid, signal.SIGKILL, cause) for pid in self._processes.kill_groups()])

    def process_exited(self, pid: int, status: int) -> None:
        """Handle the exit of a rank's process; `status` as returned by waitpid."""
        self._conclude_exits([self._take_exit(pid, status)])

    def _take_exit(self, pid: int, status: int, cause: str | None = None) -> messages.RankExited | None:
        """Return the report of how a rank's process has ended; None if it is no rank's.

        Args:
            cause: what ended it, if known; then `status` has no meaning.
        """
        found = self._processes.pop(pid)
        if found is None:
            return None
        record, process = self.ledger.ranks[found[0]], found[1]
        if record.is_preempted and cause is None:
            cause = "left (SIGTERM)"
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) and cause is None else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) and cause is None else None
        oom_killed = number == signal.SIGKILL and not record.is_killed_by_us and self._snapshots.has_recent_oom_kill()
        record.exit_reason = cause or describe_exit(number, code)
        if oom_killed:
            record.exit_reason += " because the host ran out of memory"
        self._sockets.drain(len(self.ledger.ranks))
        self._sockets.forget(record.rank)
        now = self._loop.clock.monotonic()
        self._carry_out(self.ledger.finish_pending(record.rank, now))  # it ended before its last output arrived
        unread_output = self._read_pipes(record.rank, process)
        exited = messages.RankExited(
            rank=record.rank,
            pid=pid,
            exit_code=code,
            signal=number,
            host=self.hostname,
            last_lines=last_lines_of(process.crash_log.read() + unread_output),
            last_collective=process.crash_log.read_note(),
            oom_killed=oom_killed,
            cause=cause,
        )
        process.close()
        self._snapshots.rank_exited(exited)
        return exited

    def _conclude_exits(self, found: list[messages.RankExited | None]) -> None:
        """Report exits of the same moment, and have the calls go on without these ranks."""
        exits = tuple(exited for exited in found if exited is not None)
        if exits and self._on_all_exited is None:  # not being stopped
            self._report(messages.RanksExited(exits) if len(exits) > 1 else exits[0])
        for exited in exits:
            self._carry_out(self.ledger.rank_lost(exited.rank, self._loop.clock.monotonic()))
            self._check_all_exited()

    def _read_pipes(self, rank: int, process: RankProcess) -> str:
        """Fold the unread output of a rank; return it."""
        texts = read_pipes(process)
        for text in texts:
            self._carry_out(self.ledger.text_read(rank, text, self._loop.clock.monotonic()))
        return "".join(text.text for text in texts)


def _snapshot_target(ledger: HostLedger, record: RankRecord, process: RankProcess | None, now: float) -> SnapshotTarget:
    running = record.running
    pending = ledger.calls.get(None if running is None else running.call)
    return SnapshotTarget(
        rank=record.rank,
        pid=record.pid,
        beat_age_s=record.heartbeat_age_s(now),
        is_dead=record.exit_reason is not None,
        call=None if running is None else running.call,
        label=ledger.label_of_running(record),
        is_cell=pending is not None and isinstance(pending.command, messages.RunCell),
        running_s=None if running is None else now - record.running_since,
        last_collective=None if process is None else process.crash_log.read_note(),
    )
