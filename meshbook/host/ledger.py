"""What a host knows of its ranks and calls, and what follows from each event. Pure: no socket, process or clock.

Every event is a method that takes the time `now` (seconds, monotonic) and returns instructions, which the agent
(`host/agent.py`) carries out in order. A rank gets one main-thread command at a time: the ledger holds the queue, so an
interrupt goes to a process whose current command is known, and never hits the next cell.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable
from typing import Any

from meshbook.host.instructions import Instructions, KeepOutput, SendReport, SendService, SendWork, SetAlarm
from meshbook.host.logring import LogRing
from meshbook.host.open_calls import OpenCalls
from meshbook.host.pending_notices import PendingNotices
from meshbook.host.rank_record import HEARTBEAT_S, QueuedCommand, RankRecord
from meshbook.host.staged_commands import StagedCommands
from meshbook.host.stop_escalation import StopEscalation
from meshbook.ids import Ranks
from meshbook.wire import codec, messages
from meshbook.wire.messages import Outcome
from meshbook.wire.process_control import ACTORS_GRACE_S

# Seconds a query (completion, inspection) waits for ranks that keep the GIL.
_QUERY_TIMEOUT_S = 1.0
# Seconds that a rank which leaves the mesh has to end in order.
EXIT_GRACE_S = 1.0
# Seconds without a heartbeat (they arrive every second) before a rank counts as silent, and is not waited for if its
# actors are ending: on a busy machine heartbeats are seconds late, and `__cleanup__` is to be run there too ...
_SILENT_AFTER_S = 5.0
# ... and before its output is read for it.
_OVERDUE_AFTER_S = 2 * HEARTBEAT_S


class HostLedger:
    """The ranks of one host, their queues, and the calls that are open on them."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankRecord] = {}
        self.former_ranks: dict[int, RankRecord] = {}  # that have left the mesh
        self.calls = OpenCalls()
        self.stops = StopEscalation(self.ranks, self.calls)
        self.notices = PendingNotices(self.calls, self._fold)
        self.staged = StagedCommands(self.ranks, self.calls, self._dispatch_next)

    def local(self, ranks: Ranks) -> Ranks:
        return tuple(rank for rank in ranks if rank in self.ranks)

    def living(self, ranks: Iterable[int] | None = None) -> list[RankRecord]:
        """The ranks that have not ended, of these or of all."""
        records = self.ranks.values() if ranks is None else [self.ranks[rank] for rank in ranks if rank in self.ranks]
        return [record for record in records if record.exit_reason is None]

    @property
    def living_ranks(self) -> Ranks:
        return tuple(record.rank for record in self.living())

    # ---- commands

    def enqueue(
        self, command: Any, body: bytes, now: float, *, urgent: bool = False, ready: bool = True
    ) -> Instructions:
        """Open a call of the ranks' main threads; each rank runs it when it has run what is queued before it."""
        ranks = self.local(command.ranks)
        pending = self.calls.open(command, ranks, now)
        queued = QueuedCommand(command.call, body, is_ready=ready)
        todo: Instructions = []
        for record in map(self.ranks.__getitem__, ranks):
            if record.exit_reason is not None:
                pending.record(record.rank, record.lost_outcome())
                continue
            (record.queue.appendleft if urgent else record.queue.append)(queued)
            todo += self._dispatch_next(record, now)
        return todo + self.calls.finish_if_complete(pending, now)

    def query(self, command: Any, body: bytes, now: float) -> Instructions:
        """Open a call of the ranks' service threads, which ends without those that do not reply in time."""
        ranks = self.local(command.ranks)
        pending = self.calls.open(command, ranks, now)
        todo: Instructions = []
        for record in map(self.ranks.__getitem__, ranks):
            if record.exit_reason is None:
                todo += record.to_service(body)
                record.has_actors |= isinstance(command, messages.OpenActors)
            else:
                pending.record(record.rank, record.lost_outcome())
        todo += self.calls.finish_if_complete(pending, now)
        return [*todo, SetAlarm(_QUERY_TIMEOUT_S, lambda then: self.calls.skip_waiting(command.call, then))]

    def forward_to_services(self, ranks: Ranks, body: bytes) -> Instructions:
        return [instruction for record in self.living(ranks) for instruction in record.to_service(body)]

    def reply_to_input(self, command: messages.InputReply, body: bytes) -> Instructions:
        """Pass on what was typed, if the rank still runs the command that asked for it."""
        record = self.ranks.get(command.rank)
        if record is None or record.running is None or record.running.call != command.target:
            return []
        return [SendWork(record.rank, body)]

    def signal_ranks(self, ranks: Ranks, number: int) -> Instructions:
        return [instruction for record in self.living(ranks) for instruction in record.to_signal(number)]

    def end_ranks(self, ranks: Ranks) -> Instructions:
        """Ask preempted ranks to end; one that does not within ACTORS_GRACE_S is killed."""
        leaving = self.living(ranks)
        for record in leaving:
            record.is_preempted = True

        def kill(now: float) -> Instructions:
            late = [record for record in leaving if record.exit_reason is None]
            return [instruction for record in late for instruction in record.to_signal(signal.SIGKILL)]

        return [*self.request_exit(ranks, grace_s=ACTORS_GRACE_S), SetAlarm(ACTORS_GRACE_S, kill)]

    def start(self, command: messages.StartRanks) -> dict[int, int]:
        """Make the records of new processes; return how many processes each of these ranks had before, on any host."""
        incarnations = dict(zip(command.ranks, command.incarnations or itertools.repeat(0), strict=False))
        for rank, incarnation in incarnations.items():
            former = self.ranks.get(rank) or self.former_ranks.pop(rank, None)
            self.ranks[rank] = RankRecord(rank, incarnation, log=LogRing() if former is None else former.log)
        return incarnations

    def leave(self, command: messages.LeaveMesh, now: float) -> Instructions:
        """End ranks and forget them; the call ends with the last of their processes."""
        ranks = self.local(command.ranks)
        pending = self.calls.open(command, ranks, now)
        leaving = [self.ranks[rank] for rank in ranks]
        for record in leaving:
            record.is_leaving = True
            if record.exit_reason is not None:
                pending.record(record.rank, record.lost_outcome())
                self._forget(record)

        def kill(then: float, *, spare_actors: bool) -> Instructions:
            still = tuple(record.rank for record in leaving if self.ranks.get(record.rank) is record)
            return self.kill_all(then, still, spare_actors=spare_actors)

        return [
            *self.request_exit(ranks),
            *self.calls.finish_if_complete(pending, now),
            SetAlarm(EXIT_GRACE_S, lambda then: kill(then, spare_actors=True)),
            SetAlarm(EXIT_GRACE_S + ACTORS_GRACE_S, lambda then: kill(then, spare_actors=False)),
        ]

    def _forget(self, record: RankRecord) -> None:
        self.former_ranks[record.rank] = self.ranks.pop(record.rank)

    def request_exit(self, ranks: Ranks | None = None, *, grace_s: float = EXIT_GRACE_S) -> Instructions:
        """Ask these ranks, or all, to end, in `grace_s` beside what their actors take; queued commands are dropped."""
        body = codec.encode_body(messages.Exit(grace_s=grace_s))
        todo: Instructions = []
        for record in self.living(ranks):
            record.queue.clear()
            if record.running is None and record.work_ready:
                todo.append(SendWork(record.rank, body))
            else:
                todo += record.to_service(body)
        return todo

    def kill_all(self, now: float, ranks: Ranks | None = None, *, spare_actors: bool = False) -> Instructions:
        """Kill the ranks that have not ended, of these or of all.

        Args:
            spare_actors: not those whose actors end and that send heartbeats.
        """
        return [
            instruction
            for record in self.living(ranks)
            if not (spare_actors and record.has_actors and not record.is_heartbeat_older(_SILENT_AFTER_S, now))
            for instruction in record.to_signal(signal.SIGKILL)
        ]

    # ---- reports of ranks

    def socket_ready(self, rank: int, *, work: bool, device: str, now: float) -> Instructions:
        """A rank has shown the token on its work socket, or on its service socket."""
        record = self.ranks[rank]
        record.device = device
        if work:
            record.work_ready = True
        else:
            record.service_ready = True
        todo: Instructions = []
        if record.service_ready:
            backlog, record.service_backlog = record.service_backlog, []
            todo += [SendService(rank, body) for body in backlog]
        return todo + self._dispatch_next(record, now)

    def output_received(self, message: messages.RankOutput, now: float) -> Instructions:
        """Fold a rank's output in the order in which it was printed: its pieces come on two sockets."""
        record = self.ranks[message.rank]
        record.early_outputs[message.seq] = message
        todo: Instructions = []
        while (piece := record.early_outputs.pop(record.num_outputs + 1, None)) is not None:
            record.num_outputs += 1
            todo += self._fold(record, piece.call, piece.items, now)
        if record.pending_finish is not None and record.pending_finish.last_output_seq <= record.num_outputs:
            todo += self.finish_pending(record.rank, now)
        return todo

    def rank_finished(self, message: messages.RankFinished, now: float) -> Instructions:
        """A rank has run its command; the outcome counts when all output that was printed before it is here."""
        record = self.ranks[message.rank]
        if message.last_output_seq > record.num_outputs:
            record.pending_finish = message
            return []
        todo = _report_released(message)
        if message.items:
            todo += self._fold(record, message.call, message.items, now)
        if record.running is not None and record.running.call == message.call:
            record.running = None
        pending = self.calls.get(message.call)
        if pending is not None:
            pending.seconds[message.rank] = message.seconds
        todo += self.calls.finish_rank(message.call, message.rank, message.outcome, now)
        if message.outcome.status != "ok":
            todo += self.calls.failed_on(message.call)
        if message.outcome.status == "error" and (error := message.outcome.error) is not None:
            text = "\n".join(error.traceback) or f"{error.ename}: {error.evalue}"
            todo.append(KeepOutput(message.rank, "event", text))
        return todo + self._dispatch_next(record, now)

    def finish_pending(self, rank: int, now: float) -> Instructions:
        """Take the outcome that waited for output, which has arrived, or will not because the rank has ended."""
        record = self.ranks[rank]
        if record.pending_finish is None:
            return []
        finish, record.pending_finish = record.pending_finish, None
        todo: Instructions = []
        for seq in sorted(seq for seq in record.early_outputs if seq <= finish.last_output_seq):
            piece = record.early_outputs.pop(seq)  # what came before it is lost
            todo += self._fold(record, piece.call, piece.items, now)
        record.num_outputs = max(record.num_outputs, finish.last_output_seq)
        return todo + self.rank_finished(finish, now)

    def rank_replied(self, message: messages.RankReply, now: float) -> Instructions:
        return self.calls.finish_rank(message.call, message.rank, Outcome(status="ok", reply=message.content), now)

    def heartbeat_received(self, message: messages.RankHeartbeat, now: float) -> Instructions:
        record = self.ranks[message.rank]
        record.heartbeat, record.heartbeat_at = message, now
        return _report_released(message)

    def service_failed(self, message: messages.ServiceFailed, now: float) -> Instructions:
        """Report the error in the output of the running call, or of the next one; put the traceback into the log."""
        record = self.ranks[message.rank]
        record.log.append(message.traceback)
        text = (
            f"an error in Meshbook's own thread on this rank, {message.activity}: {message.error}. The rank goes on; "
        )
        return self.notices.add(record, messages.Notice(text + "the traceback is in %mesh logs"), now)

    def text_read(self, rank: int, text: messages.Text, now: float) -> Instructions:
        """Text was read from the rank's pipes, because it cannot send it: it belongs to the command that ran last."""
        record = self.ranks[rank]
        call = record.running.call if record.running is not None else record.last_call
        return self._fold(record, call, (text,), now)

    def rank_lost(self, rank: int, now: float) -> Instructions:
        """A rank has ended (`exit_reason` says how), and all that it has sent has been handled."""
        record = self.ranks[rank]
        record.running = None
        record.queue.clear()
        todo: Instructions = [KeepOutput(rank, "event", f"rank {rank} {record.exit_reason}")]
        for pending in self.calls.of_rank(rank):
            pending.record(rank, record.lost_outcome())
            todo += self.calls.finish_if_complete(pending, now)
        if record.is_leaving:
            self._forget(record)
        return todo

    # ---- what is reported

    def overdue_ranks(self, now: float) -> list[RankRecord]:
        """Ranks whose heartbeat is overdue: C code that keeps the GIL would block on a full pipe for ever."""
        return [record for record in self.living() if record.is_heartbeat_older(_OVERDUE_AFTER_S, now)]

    def rank_infos(self, hostname: str, now: float) -> tuple[messages.RankInfo, ...]:
        return tuple(self.rank_info(record, hostname, now) for record in self.ranks.values())

    def rank_info(self, record: RankRecord, hostname: str, now: float) -> messages.RankInfo:
        state, running, beat = "idle" if record.running is None else "busy", record.running, record.heartbeat
        if record.exit_reason is not None:
            state = "dead"
        elif not record.work_ready:
            state = "starting"
        elif record.is_heartbeat_older(_SILENT_AFTER_S, now):
            state = "silent"
        return messages.RankInfo(
            rank=record.rank,
            state=state,  # type: ignore[arg-type]
            host=hostname,
            pid=record.pid,
            device=record.device,
            call=None if running is None else running.call,  # type: ignore[arg-type]
            cell=self.label_of_running(record),
            line=beat.line if beat is not None and running is not None and beat.call == running.call else None,
            beat_age_s=record.heartbeat_age_s(now),
            rss_bytes=beat.rss_bytes if beat is not None else None,
            peak_rss_bytes=beat.peak_rss_bytes if beat is not None else None,
            exit=record.exit_reason,
            incarnation=record.incarnation,
        )

    def label_of_running(self, record: RankRecord) -> str | None:
        pending = None if record.running is None else self.calls.get(record.running.call)
        return None if pending is None else getattr(pending.command, "label", None)

    # ---- helpers

    def _dispatch_next(self, record: RankRecord, now: float) -> Instructions:
        is_free = record.running is None and record.work_ready and record.exit_reason is None
        if not is_free or not record.queue or not record.queue[0].is_ready:
            return []
        record.running = record.queue.popleft()
        record.last_call = record.running.call
        record.running_since = now
        return [SendWork(record.rank, record.running.body), *self.notices.show(record, record.running, now)]

    def _fold(
        self, record: RankRecord, call: str | None, items: tuple[messages.OutputItem, ...], now: float
    ) -> Instructions:
        todo: Instructions = []
        for item in items:
            if isinstance(item, messages.Text):
                record.log.append(item.text)
                todo.append(KeepOutput(record.rank, item.stream, item.text))
            elif isinstance(item, messages.Notice):
                todo.append(KeepOutput(record.rank, "event", item.text))
        if call is None:
            return todo
        return todo + self.calls.feed(call, record.rank, items, (living.rank for living in self.living()), now)


def _report_released(message: messages.RankFinished | messages.RankHeartbeat) -> Instructions:
    if not message.released_segments:
        return []
    return [SendReport(messages.SegmentsReleased(rank=message.rank, segments=message.released_segments))]
