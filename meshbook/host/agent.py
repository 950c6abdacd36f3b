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
from meshbook.host.arriving_values import ArrivingValues
from meshbook.host.launcher import RankLauncher, kill_unwanted
from meshbook.host.ledger import HostLedger
from meshbook.host.log_keeper import LogKeeper
from meshbook.host.logring import last_lines_of
from meshbook.host.rank_processes import RankProcesses
from meshbook.host.rank_record import HEARTBEAT_S, RankRecord
from meshbook.host.rank_sockets import RankSockets
from meshbook.host.snapshots import SnapshotCollector, SnapshotTarget
from meshbook.host.starter import RankProcess
from meshbook.ids import Ranks
from meshbook.wire import codec, messages
from meshbook.wire.loop import Loop
from meshbook.wire.process_control import ACTORS_GRACE_S, kill_process_group
from meshbook.wire.process_watch import ProcessWatch
from meshbook.wire.remote_start import HostPlace

log = logging.getLogger("meshbook.host")

# Seconds between two looks whether a rank without a fork server has ended, if the system has no pidfd.
_EXIT_POLL_S = 0.2
# Seconds after a takeover within which fork servers report how ranks have ended.
_EXIT_REPORTS_S = 0.5

# Commands for the service threads of living ranks, which nobody waits for.
_FORWARDED = (
    messages.Release,
    messages.AbortCollectives,
    messages.HoldCollectives,
    messages.ResumeCollectives,
    messages.RanksLeft,
    messages.ExitsChecked,
    messages.WriteCheckpoint,
    messages.WriteCheckpointMetadata,
    messages.DropCheckpoint,
    messages.SetPreemptionPoint,
    messages.LeaveDebugger,
    messages.PromptsOpen,
    messages.RelayBytes,
)
# Reports of ranks that are the supervisor's business.
_PASSED_ON = (
    messages.CheckpointWritten,
    messages.TransportFailed,
    messages.ActorsOpened,
    messages.BytesRelayed,
)
# Commands that service threads answer.
_QUERIES = (
    messages.Complete,
    messages.Inspect,
    messages.PreviewNames,
    messages.OpenActors,
    messages.QuerySentinel,
    messages.QueryPositions,
    messages.QueryPreemptionPoint,
    messages.StopInDebugger,
    messages.OpenDebugPort,
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
        place: HostPlace | None = None,
    ) -> None:
        """Create the agent and bind its sockets.

        Args:
            folder: where the sockets are created; mode 0700.
            report: called with every report, from the loop.
            mergeable: what a search of logs finds will be folded with other hosts'.
            place: in a mesh of several machines; None: it is on one.
        """
        self._loop, self._host, self._report = loop, host, report
        self.hostname, self.ledger = sockets.gethostname(), HostLedger()
        self._todo: deque[do.Instruction] = deque()
        self._is_carrying_out, self._processes = False, RankProcesses(loop)
        self._on_all_exited: Callable[[], None] | None = None
        self._sockets = RankSockets(loop, context, folder, host, token, self.ledger.ranks, self._on_report)
        self.launcher = RankLauncher(loop, folder, host, token, self._sockets.addresses, self, place=place)
        self._orphans = ProcessWatch(loop, self._orphan_exited, poll_s=_EXIT_POLL_S)  # ranks without a fork server
        self.values = ArrivingValues(loop, self.ledger, report)
        self._logs = LogKeeper(loop, folder, host, report, mergeable=mergeable)
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
            case _ if isinstance(command, self.values.COMMANDS):
                self._carry_out(self.values.handle(command, now))
            case messages.StartRanks():
                for rank, incarnation in (incarnations := ledger.start(command)).items():
                    self._sockets.expect(rank, incarnation)
                self._logs.set_limit(command.spec.log_bytes)
                self.launcher.start(command, incarnations)
            case messages.PrepareSpares():
                self.launcher.prepare_spares(command)
                self._report_heartbeat()
            case messages.LeaveMesh():
                self._carry_out(ledger.leave(command, now))
            case messages.TakeSnapshots():
                self._snapshots.collect(command, body, _snapshot_targets(ledger, self._processes, command.ranks, now))
            case _ if isinstance(command, self._logs.COMMANDS):
                self._logs.handle(command, ledger.ranks)
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
            case messages.CheckExits(ranks=ranks):
                self._carry_out(ledger.calls.await_exits(command, ledger.local(ranks), self._processes.ending(), now))
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
        kill_others = do.SetAlarm(grace_s, lambda now: self.ledger.kill_all(now, spare_actors=True))
        kill_all = do.SetAlarm(grace_s + ACTORS_GRACE_S, self.ledger.kill_all)
        self._carry_out([*self.ledger.request_exit(grace_s=grace_s), kill_others, kill_all])
        self._check_all_exited()

    def _check_all_exited(self) -> None:
        if self._on_all_exited is not None and not self.ledger.living():
            callback, self._on_all_exited = self._on_all_exited, None
            self._carry_out(self.ledger.calls.flush_orphans(self._loop.clock.monotonic()))
            self.launcher.close()
            callback()

    def take_over(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Go on in a process that was forked from the agent's, which has ended."""
        self._sockets.reopen(context)
        for part in (self._logs, self._snapshots, self.values, self.launcher):
            part.take_over()
        self._loop.call_later(_EXIT_REPORTS_S, self._find_exits, logged=False)

    def _find_exits(self) -> None:
        """Report ranks whose exits were reported to the process that has ended, or that nobody will report."""
        self._loop.diverge()
        with_zombies = not self.launcher.reports_zombies
        self._processes.find_ended(lambda pid: self.process_exited(pid, None), with_zombies=with_zombies)

    def notify(self, notice: messages.Notice) -> None:
        """Show a notice of the mesh once: in the running calls, else in the next one."""
        self._carry_out(self.ledger.notices.add_once(self.ledger.living(), notice, self._loop.clock.monotonic()))

    def close(self) -> None:
        """Close the sockets. Call after `stop`."""
        self._heartbeat_timer.cancel()
        for part in (self._snapshots, self._sockets, self.values, self._logs):
            part.close()

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
                self.values.take_note(report)
                self._report(report)
            case do.KeepOutput():
                self._logs.keep(instruction)
            case do.SetAlarm(after_s, action):
                self._loop.call_later(after_s, lambda: self._carry_out(action(self._loop.clock.monotonic())))
            case do.SignalRank(rank, number):
                self._processes.signal(rank, number)
            case do.ContinueStopped(ranks, report):
                self._carry_out(report(self._processes.continue_stopped(ranks)))
            case do.InspectProcesses(ranks, report):
                self._carry_out(report(self._processes.look(ranks)))
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
            case messages.RankReady(rank=rank, pid=pid) if ledger.ranks[rank].exit_reason is not None:
                self._processes.kill(pid)  # the fork server was killed before it reported it
            case messages.RankReady():
                self._carry_out(ledger.socket_ready(message.rank, work=is_work, device=message.device, now=now))
            case messages.RankReply():
                self._carry_out(ledger.rank_replied(message, now))
            case messages.RankHeartbeat():
                self._carry_out(ledger.heartbeat_received(message, now))
                self.launcher.spares.learn(message.modules)
                self._snapshots.add_metrics(message.metrics)
            case messages.RankInputRequest(call=call, rank=rank, prompt=prompt, password=password, stop=stop):
                self._carry_out(ledger.calls.prompt(messages.InputRequest(call, rank, prompt, password, stop), now))
            case messages.RankSnapshotReply():
                self._snapshots.reply_received(message)
            case _ if isinstance(message, _PASSED_ON):
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
        ranks, metrics = self.ledger.rank_infos(self.hostname, now), self._snapshots.drain_metrics()
        self._report(messages.HostHeartbeat(self._host, ranks, metrics, self.launcher.spares.infos()))

    # ---- processes: what the launcher reports

    def process_started(self, rank: int, process: RankProcess) -> None:
        record = self.ledger.ranks[rank]
        if record.exit_reason is not None:  # another rank could not be started, so the mesh failed to start
            kill_unwanted(process)
            return
        self._processes.add(rank, process)
        self._carry_out(record.started(process.pid))
        record.pending_notices += self.launcher.notices
        self._snapshots.rank_started(rank)

    def start_failed(self, reason: str) -> None:
        """Report a failed start, and the ranks without a process as exited."""
        self._report(messages.HostFailed(host=self._host, reason=reason))
        for record in [record for record in self.ledger.living() if record.pid is None]:
            record.exit_reason = f"could not be started: {reason}"
            self._rank_lost(_never_started(record, self.hostname))

    def fork_server_terminating(self) -> None:
        self._report(messages.TerminationRequested(self.ledger.living_ranks))

    def fork_server_exited(self, reason: str) -> None:
        """Watch the ranks that were forked from it, whose exits it reports no more."""
        text = f"the fork server {reason}; its ranks go on, and the next rank that starts gets a new one"
        for record in self.ledger.living():
            if record.pid is not None:
                record.pending_notices.append(messages.Notice(text))
                self._orphans.watch(record.pid, record.pid)

    def _orphan_exited(self, pid: int) -> None:
        self._orphans.forget(pid)
        kill_process_group(pid)
        self.process_exited(pid, None)

    def process_exited(self, pid: int, status: int | None) -> None:
        """Handle the exit of a rank's process; `status` as returned by waitpid, None: not known."""
        if (found := self._processes.pop(pid)) is None:
            return
        self._rank_lost(self._describe_exit(self.ledger.ranks[found[0]], found[1], status))

    def _rank_lost(self, exited: messages.RankExited) -> None:
        lost = self.ledger.rank_lost(exited.rank, self._loop.clock.monotonic())
        if self._on_all_exited is None:  # not being stopped; a heal that waits for this starts a process in its place
            self._report(exited)
        self._carry_out(lost)
        self._check_all_exited()

    def _describe_exit(self, record: RankRecord, process: RankProcess, status: int | None) -> messages.RankExited:
        """Handle all that a rank has sent before its exit, and return the report of how it ended."""
        cause, number, code = _interpret_status(record, status)
        may_be_oom = (number == signal.SIGKILL or status is None) and not record.is_killed_by_us
        oom_killed = may_be_oom and self._snapshots.has_recent_oom_kill()
        why = " because the host ran out of memory" if oom_killed else ""
        record.exit_reason = f"{cause or describe_exit(number, code)}{why}"
        self._sockets.drain(len(self.ledger.ranks))
        self._sockets.forget(record.rank)
        self._carry_out(self.ledger.finish_pending(record.rank, self._loop.clock.monotonic()))
        unread_output = self._read_pipes(record.rank, process)
        exited = messages.RankExited(
            rank=record.rank,
            pid=process.pid,
            exit_code=code,
            signal=number,
            host=self.hostname,
            last_lines=last_lines_of(process.crash_log.read() + unread_output),
            last_collective=process.crash_log.read_note(),
            oom_killed=oom_killed,
            cause=cause,
            is_killed_by_us=record.is_killed_by_us,
        )
        process.close()
        self.values.remove_rank(record.rank)
        self._snapshots.rank_exited(exited)
        return exited

    def _read_pipes(self, rank: int, process: RankProcess) -> str:
        """Fold the unread output of a rank; return it."""
        texts = self._processes.read_pipes(process)
        for text in texts:
            self._carry_out(self.ledger.text_read(rank, text, self._loop.clock.monotonic()))
        return "".join(text.text for text in texts)


def _interpret_status(record: RankRecord, status: int | None) -> tuple[str | None, int | None, int | None]:
    """Return how a process has ended: a phrase, or the number of a signal, or an exit code."""
    if record.is_preempted:
        return "left (SIGTERM)", None, None
    if status is not None:
        return (None, os.WTERMSIG(status), None) if os.WIFSIGNALED(status) else (None, None, os.WEXITSTATUS(status))
    if record.is_killed_by_us:
        return None, int(signal.SIGKILL), None
    return "ended; its exit status was lost with the fork server", None, None


def _snapshot_targets(ledger: HostLedger, processes: RankProcesses, ranks: Ranks, now: float) -> list[SnapshotTarget]:
    return [
        _snapshot_target(ledger, ledger.ranks[rank], processes.last_collective(rank), now)
        for rank in ledger.local(ranks)
    ]


def _snapshot_target(ledger: HostLedger, record: RankRecord, last_collective: str | None, now: float) -> SnapshotTarget:
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
        last_collective=last_collective,
    )


def _never_started(record: RankRecord, hostname: str) -> messages.RankExited:
    return messages.RankExited(
        rank=record.rank,
        pid=0,
        exit_code=None,
        signal=None,
        host=hostname,
        last_lines=(),
        last_collective=None,
        cause=record.exit_reason,
    )
