"""The host's ledger: events in, instructions out. Queues, outcomes, Stop's timetable and deaths, without a process."""

from __future__ import annotations

import heapq
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshbook.host import instructions as do
from meshbook.host.ledger import HostLedger
from meshbook.host.open_calls import PROGRESS_AFTER_FAILURE_S, PROGRESS_AFTER_S
from meshbook.host.rank_record import RankRecord
from meshbook.host.run_times import RunTimes, ThreadTimes
from meshbook.wire import codec, messages
from meshbook.wire.messages import Outcome
from meshbook.wire.stop_timing import (
    ABORT_AFTER_S,
    KILL_AFTER_S,
    KILL_STARVED_AFTER_S,
    SIGINT_REPEATS_S,
    STOP_SIGNAL,
    STUCK_AFTER_S,
)


class Host:
    """A ledger, and an agent that notes what it would do, on a clock that the test turns."""

    def __init__(self, size: int = 2, *, ready: bool = True) -> None:
        self.ledger, self.now = HostLedger(), 100.0
        self.done: list[tuple[float, do.Instruction]] = []
        self.alarms: list[tuple[float, int, Callable[[float], do.Instructions]]] = []
        self.stopped_processes = set[int]()  # what /proc would say
        self.starved = set[int]()
        self.states: dict[int, str | None] = {}
        for rank in range(size):
            self.ledger.ranks[rank] = RankRecord(rank, pid=1000 + rank)
            if ready:
                self.ready(rank)

    def ready(self, rank: int) -> None:
        for work in (False, True):
            self.carry_out(self.ledger.socket_ready(rank, work=work, device="cpu", now=self.now))

    def carry_out(self, todo: do.Instructions) -> None:
        for instruction in todo:
            self.done.append((self.now, instruction))
            match instruction:
                case do.SetAlarm(after_s, action):
                    heapq.heappush(self.alarms, (self.now + after_s, len(self.done), action))
                case do.ContinueStopped(ranks, report):
                    continued = tuple(rank for rank in ranks if rank in self.stopped_processes)
                    self.stopped_processes -= {*continued}
                    self.carry_out(report(continued))
                case do.InspectProcesses(ranks, report):
                    self.carry_out(report({rank: self.look(rank) for rank in ranks}))

    def look(self, rank: int) -> do.ProcessLook:
        """What /proc would say: a process gets all processor time that it wants, or none if it is starved."""
        times = ThreadTimes(is_runnable=rank in self.starved, ticks=0, ran_ns=0, waited_ns=0, num_slices=1)
        return do.ProcessLook(self.states.get(rank, "S"), RunTimes(self.now, {1000 + rank: times}))

    def wait(self, seconds: float) -> None:
        """Let time pass; alarms come when they are due."""
        end = self.now + seconds
        while self.alarms and self.alarms[0][0] <= end:
            self.now, _, action = heapq.heappop(self.alarms)
            self.carry_out(action(self.now))
        self.now = end

    # ---- what the supervisor and ranks send

    def send(self, command: Any) -> None:
        body = codec.encode_body(command)
        if isinstance(command, messages.Interrupt):
            self.carry_out(self.ledger.stops.interrupt(command, self.now))
        elif isinstance(command, messages.Complete):
            self.carry_out(self.ledger.query(command, body, self.now))
        else:
            urgent = isinstance(command, messages.FormGroups)
            self.carry_out(self.ledger.enqueue(command, body, self.now, urgent=urgent))

    def cell(self, call: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.send(messages.RunCell(call=call, ranks=ranks, source=call))  # type: ignore[arg-type]

    def operations(self, call: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.send(messages.RunOps(call=call, ranks=ranks, engine="a|", first_op=1, ops=b"\x90"))  # type: ignore[arg-type]

    def stop(self, target: str | None = None, *, hard: bool = False, client: str | None = None) -> None:
        self.send(messages.Interrupt(ranks=tuple(self.ledger.ranks), target=target, hard=hard, client=client))  # type: ignore[arg-type]

    def finish(self, rank: int, call: str, status: str = "ok", last_output_seq: int = 0) -> None:
        error = None if status == "ok" else messages.RankError(ename="ValueError", evalue="no", traceback=())
        outcome = Outcome(status=status, error=error)  # type: ignore[arg-type]
        report = messages.RankFinished(
            rank=rank,
            call=call,  # type: ignore[arg-type]
            outcome=outcome,
            seconds=0.5,
            last_output_seq=last_output_seq,
        )
        self.carry_out(self.ledger.rank_finished(report, self.now))

    def output(self, rank: int, seq: int, text: str, call: str | None = "c") -> None:
        items = (messages.Text("stdout", text),)
        message = messages.RankOutput(rank=rank, seq=seq, call=call, items=items)  # type: ignore[arg-type]
        self.carry_out(self.ledger.output_received(message, self.now))

    def die(self, rank: int, reason: str = "was killed by SIGKILL") -> None:
        self.ledger.ranks[rank].exit_reason = reason
        self.carry_out(self.ledger.finish_pending(rank, self.now))
        self.carry_out(self.ledger.rank_lost(rank, self.now))

    # ---- what was done

    def sent(self, rank: int) -> list[str]:
        """The calls that a rank's main thread was sent, in order."""
        bodies = [one.body for _, one in self.done if isinstance(one, do.SendWork) and one.rank == rank]
        return [msgspec.msgpack.decode(body)["call"] for body in bodies]

    def to_service(self, rank: int, kind: str) -> list[float]:
        """When a rank's service thread was sent a message of this kind, since the clock's start."""
        return [
            round(at - 100.0, 3)
            for at, one in self.done
            if isinstance(one, do.SendService) and one.rank == rank and msgspec.msgpack.decode(one.body)["type"] == kind
        ]

    def signals(self, rank: int, number: int) -> list[float]:
        """When a rank was sent a signal, since the clock's start."""
        wanted = do.SignalRank(rank, number)
        return [round(at - 100.0, 3) for at, one in self.done if one == wanted]

    def reports(self, kind: type) -> list[Any]:
        return [one.report for _, one in self.done if isinstance(one, do.SendReport) and isinstance(one.report, kind)]

    def outcomes(self, call: str) -> dict[int, str]:
        (finished,) = [report for report in self.reports(messages.CallFinished) if report.call == call]
        return {rank: group.outcome.status for group in finished.outcomes for rank in group.ranks}

    def notices(self) -> list[str]:
        shown = [
            item.item for report in self.reports(messages.CallOutput) for item in report.items if hasattr(item, "item")
        ]
        return [item.text for item in shown if isinstance(item, messages.Notice)]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def busy(host: Host) -> Host:
    """Whose two ranks run call c."""
    host.cell("c")
    return host


@pytest.fixture
def alone() -> Host:
    """Whose one rank runs call c."""
    host = Host(1)
    host.cell("c", (0,))
    return host


def heartbeat(line: int | None = None) -> messages.RankHeartbeat:
    return messages.RankHeartbeat(rank=0, call=None, line=line, rss_bytes=0, peak_rss_bytes=0)


# ---- queues


def test_a_rank_gets_one_command_at_a_time_in_the_order_in_which_they_came(host: Host) -> None:
    for call in ("c-1", "c-2", "c-3"):
        host.cell(call)
    assert host.sent(0) == ["c-1"]
    host.finish(0, "c-1")
    assert (host.sent(0), host.sent(1)) == (["c-1", "c-2"], ["c-1"])


def test_groups_are_formed_before_what_is_queued_and_after_what_runs(host: Host) -> None:
    host.cell("c-1")
    host.cell("c-2")
    host.send(messages.FormGroups(call="g-1", ranks=(0, 1), generation=2, store_address="ipc://x"))  # type: ignore[arg-type]
    host.finish(0, "c-1")
    host.finish(0, "g-1")
    assert host.sent(0) == ["c-1", "g-1", "c-2"]


def test_ranks_must_be_visible_before_the_mesh_is_reported_ready(host: Host) -> None:
    host.send(messages.FormGroups(call="g-1", ranks=(0, 1), generation=2, store_address="ipc://x"))  # type: ignore[arg-type]
    for rank in range(2):
        host.finish(rank, "g-1")
    kinds = [type(one) for _, one in host.done]
    assert kinds.index(do.SendHeartbeat) < kinds.index(do.SendReport)


def test_what_was_sent_to_a_rank_before_it_was_ready_is_sent_when_it_is() -> None:
    host = Host(1, ready=False)
    host.cell("c-1", (0,))
    host.send(messages.Complete(call="q-1", ranks=(0,), code="x", cursor=1))  # type: ignore[arg-type]
    assert host.done == [(100.0, one) for _, one in host.done if isinstance(one, do.SetAlarm)]
    host.ready(0)
    assert (host.sent(0), len(host.to_service(0, "Complete"))) == (["c-1"], 1)


def test_a_call_on_a_dead_rank_is_lost_there_and_says_how_the_rank_ended(host: Host) -> None:
    host.die(1, "exited with code 3")
    host.cell("c-1")
    host.finish(0, "c-1")
    assert host.outcomes("c-1") == {0: "ok", 1: "lost"}
    (finished,) = host.reports(messages.CallFinished)
    assert "rank 1 exited with code 3" in {
        group.outcome.error.evalue for group in finished.outcomes if group.outcome.error
    }


def test_a_query_ends_without_the_ranks_that_do_not_reply(host: Host) -> None:
    host.send(messages.Complete(call="q-1", ranks=(0, 1), code="x", cursor=1))  # type: ignore[arg-type]
    host.carry_out(host.ledger.rank_replied(messages.RankReply(rank=0, call="q-1", content=b""), host.now))  # type: ignore[arg-type]
    host.wait(0.9)
    assert not host.reports(messages.CallFinished)
    host.wait(0.2)
    assert host.outcomes("q-1") == {0: "ok", 1: "skipped"}


def test_what_was_typed_reaches_only_the_command_that_asked(host: Host) -> None:
    host.cell("c-1")
    reply = messages.InputReply(rank=0, target="c-1", text="yes")  # type: ignore[call-arg,arg-type]
    assert host.ledger.reply_to_input(reply, b"yes") == [do.SendWork(0, b"yes")]
    host.finish(0, "c-1")
    assert host.ledger.reply_to_input(reply, b"yes") == []


# ---- output


def test_output_that_overtook_other_output_waits_for_it(alone: Host) -> None:
    alone.output(0, 2, "second\n")
    alone.output(0, 1, "first\n")
    alone.finish(0, "c", last_output_seq=2)
    (finished,) = alone.reports(messages.CallFinished)
    assert [item.text for item in finished.items] == ["first", "second"]


def test_an_outcome_waits_for_the_output_that_was_printed_before_it(alone: Host) -> None:
    alone.cell("d", (0,))
    alone.finish(0, "c", last_output_seq=1)
    assert (alone.reports(messages.CallFinished), alone.sent(0)) == ([], ["c"])
    alone.output(0, 1, "late\n")
    assert (alone.outcomes("c"), alone.sent(0)) == ({0: "ok"}, ["c", "d"])


def test_what_is_kept_for_searches_is_what_ranks_print_what_they_left_out_their_errors_and_ends(alone: Host) -> None:
    left_out = messages.RankOutput(rank=0, seq=2, call="c", items=(messages.Notice("9 lines left out here"),))  # type: ignore[arg-type]
    alone.carry_out(alone.ledger.output_received(left_out, alone.now))
    alone.output(0, 1, "first\n")
    alone.finish(0, "c", status="error", last_output_seq=2)
    alone.die(0)
    kept = [(one.kind, one.text) for _, one in alone.done if isinstance(one, do.KeepOutput)]
    assert kept == [
        ("stdout", "first\n"),
        ("event", "9 lines left out here"),
        ("event", "ValueError: no"),
        ("event", "rank 0 was killed by SIGKILL"),
    ]


def test_an_outcome_whose_output_died_with_its_rank_counts(busy: Host) -> None:
    busy.finish(0, "c", last_output_seq=1)
    busy.die(0)
    busy.finish(1, "c")
    assert busy.outcomes("c") == {0: "ok", 1: "ok"}


def test_what_is_printed_when_no_cell_runs_is_reported_under_the_cell_that_it_came_from(alone: Host) -> None:
    alone.finish(0, "c")
    alone.output(0, 1, "from a thread\n")
    alone.wait(5.0)
    (output,) = alone.reports(messages.CallOutput)
    assert (output.call, [item.text for item in output.items]) == ("c", ["from a thread"])


# ---- progress


def test_progress_is_reported_once_a_call_has_lasted_and_only_when_it_has_changed(busy: Host) -> None:
    busy.finish(0, "c")
    busy.carry_out(busy.ledger.calls.report_progress(busy.now))
    assert busy.reports(messages.CallProgressed) == []
    busy.wait(PROGRESS_AFTER_S + 0.1)
    for _ in range(2):
        busy.carry_out(busy.ledger.calls.report_progress(busy.now))
    assert [report.done for report in busy.reports(messages.CallProgressed)] == [(0,)]


def test_that_one_rank_has_failed_is_reported_soon_unless_all_have(busy: Host) -> None:
    busy.finish(0, "c", "error")
    busy.wait(PROGRESS_AFTER_FAILURE_S + 0.01)
    assert [report.done for report in busy.reports(messages.CallProgressed)] == [(0,)]
    alike = Host()
    alike.cell("c")
    for rank in range(2):
        alike.finish(rank, "c", "error")
    alike.wait(PROGRESS_AFTER_FAILURE_S + 0.01)
    assert alike.reports(messages.CallProgressed) == []


@pytest.mark.parametrize("kind", [messages.ShareState, messages.MoveShards, messages.RunCell])
def test_why_a_rank_has_failed_is_reported_of_what_ranks_can_only_do_together(host: Host, kind: Any) -> None:
    options: dict[Any, dict[str, Any]] = {
        messages.ShareState: {"new_ranks": (1,)},
        messages.MoveShards: {"step": "move", "axes": {"dp": 2}, "world_size": 2, "new_ranks": (1,)},
        messages.RunCell: {"source": "c"},
    }
    host.send(kind(call="c", ranks=(0, 1), **options[kind]))
    host.finish(0, "c", "error")
    host.wait(PROGRESS_AFTER_FAILURE_S + 0.01)
    (report,) = host.reports(messages.CallProgressed)
    assert report.failure == ("" if kind is messages.RunCell else "rank 0: ValueError: no")


# ---- Stop


def test_a_rank_that_is_not_ready_is_not_signalled_for_it_has_no_handler_yet() -> None:
    host = Host(1, ready=False)
    host.cell("c", (0,))
    host.stop("c")
    host.wait(10.0)
    assert host.signals(0, STOP_SIGNAL) == []


def test_the_timetable_of_a_first_stop(alone: Host) -> None:
    alone.stop("c")
    alone.wait(10.0)
    assert alone.signals(0, STOP_SIGNAL) == [0.0, *SIGINT_REPEATS_S]
    assert alone.to_service(0, "Interrupt") == [0.0]
    assert alone.to_service(0, "AbortCollectives") == [ABORT_AFTER_S]
    assert alone.signals(0, signal.SIGKILL) == []
    at = [at - 100.0 for at, one in alone.done if isinstance(one, do.SendReport)]
    assert at == [STUCK_AFTER_S]
    (stuck,) = alone.reports(messages.RanksStuck)
    assert (stuck.call, stuck.ranks) == ("c", (0,))
    assert "rank 0 (pid 1000) is in C code, or in code that catches KeyboardInterrupt" in stuck.reason


def test_a_repeated_signal_that_is_late_is_not_sent_and_the_call_is_named_instead() -> None:
    # The host stands still for a second: the rank would take the signal for that of another press.
    host = Host(1)
    host.cell("c", (0,))
    host.stop("c")
    host.wait(0.1)
    _, _, repeat = heapq.heappop(host.alarms)
    host.now += 1.0
    host.carry_out(repeat(host.now))
    assert host.signals(0, STOP_SIGNAL) == [0.0, 0.05]
    assert host.to_service(0, "Interrupt") == [0.0, 1.1]


def test_the_timetable_of_a_second_stop(alone: Host) -> None:
    alone.stop("c", hard=True)
    alone.wait(10.0)
    assert alone.signals(0, STOP_SIGNAL) == [0.0, *SIGINT_REPEATS_S]
    assert alone.to_service(0, "AbortCollectives") == [0.0]
    assert alone.signals(0, signal.SIGKILL) == [KILL_AFTER_S]
    assert alone.notices() == [f"second Stop: rank 0 did not come back within {KILL_AFTER_S:g} s and was killed"]
    assert alone.ledger.ranks[0].is_killed_by_us


@pytest.mark.parametrize("returns_at", [0.1, 0.25, ABORT_AFTER_S + 0.05])
def test_a_rank_that_has_returned_is_left_alone(returns_at: float) -> None:
    host = Host(1)
    host.cell("c", (0,))
    host.cell("d", (0,))
    host.stop("c")
    host.wait(returns_at)
    host.finish(0, "c", "interrupted")
    host.wait(10.0)
    assert host.sent(0) == ["c", "d"]
    assert host.signals(0, STOP_SIGNAL) == [0.0, *(at for at in SIGINT_REPEATS_S if at < returns_at)]
    assert bool(host.to_service(0, "AbortCollectives")) == (returns_at > ABORT_AFTER_S)
    assert host.reports(messages.RanksStuck) == []


def test_a_second_stop_does_not_kill_the_cell_after_the_one_it_was_meant_for(alone: Host) -> None:
    alone.cell("d", (0,))
    alone.stop("c")
    alone.wait(0.5)
    alone.stop("c", hard=True)
    alone.wait(KILL_AFTER_S - 0.1)
    alone.finish(0, "c", "interrupted")
    alone.wait(10.0)
    assert alone.signals(0, signal.SIGKILL) == []


def test_a_stop_for_a_call_that_has_ended_signals_nobody(alone: Host) -> None:
    alone.finish(0, "c")
    alone.cell("d", (0,))
    alone.stop("c")
    alone.wait(10.0)
    assert alone.signals(0, STOP_SIGNAL) == []


def test_a_stop_takes_back_the_call_where_it_is_still_queued(host: Host) -> None:
    host.cell("c", (0,))
    host.cell("d", (0, 1))
    host.stop("d")
    host.finish(1, "d", "interrupted")
    assert host.outcomes("d") == {0: "interrupted", 1: "interrupted"}
    host.finish(0, "c")
    assert (host.sent(0), host.signals(0, STOP_SIGNAL), host.signals(1, STOP_SIGNAL)) == (["c"], [], [0.0])


def test_a_stop_without_a_name_takes_back_what_waits_of_its_own_client_only() -> None:
    host = Host(ready=False)
    for call in ("a-1", "b-1", "a-2"):
        host.cell(call)
    host.stop(client="a")
    assert [queued.call for queued in host.ledger.ranks[0].queue] == ["b-1"]
    assert [report.call for report in host.reports(messages.CallFinished)] == ["a-1", "a-2"]


def test_a_rank_is_sent_the_operations_that_a_stop_has_taken_back_as_cancelled() -> None:
    host = Host(ready=False)
    for call in ("a-1", "a-2"):
        host.operations(call)
    for _ in range(2):
        host.send(messages.Interrupt(ranks=(0,), target="a-1"))  # type: ignore[arg-type]
    queue = host.ledger.ranks[0].queue
    assert [(queued.call, queued.is_cancelled) for queued in queue] == [("a-1", True), ("a-2", False)]
    sent = msgspec.msgpack.decode(queue[0].body)
    assert (sent["call"], sent["is_cancelled"]) == ("a-1", True)
    assert not any(queued.is_cancelled for queued in host.ledger.ranks[1].queue)


def test_a_stopped_process_is_let_go_on_and_the_cell_says_so(busy: Host) -> None:
    busy.stopped_processes = {1}
    busy.stop("c")
    assert busy.notices() == ["rank 1 was stopped (SIGSTOP), and let go on (SIGCONT) by Stop"]
    busy.stopped_processes = {1}
    busy.wait(10.0)
    assert len(busy.notices()) == 1


def test_a_process_that_is_stopped_a_moment_after_the_press_is_reported_too(busy: Host) -> None:
    busy.stop("c")
    assert busy.notices() == []
    busy.stopped_processes = {1}
    busy.wait(1.0)
    assert busy.notices() == ["rank 1 was stopped (SIGSTOP), and let go on (SIGCONT) by Stop"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("t", "is held by a debugger"),
        ("D", "waits in the system"),
        ("T", "stops itself (SIGSTOP) again and again, at line 3 of the cell"),
        ("R", "is in C code, or in code that catches KeyboardInterrupt, at line 3 of the cell"),
        (None, "is in C code, or in code that catches KeyboardInterrupt, at line 3 of the cell"),
    ],
)
def test_why_a_rank_does_not_return_is_said_as_the_system_sees_it(alone: Host, state: str | None, reason: str) -> None:
    beat = heartbeat(line=3)
    alone.carry_out(alone.ledger.heartbeat_received(beat, alone.now))
    alone.states[0] = state
    alone.stop("c")
    alone.wait(STUCK_AFTER_S - 1.0)
    alone.carry_out(alone.ledger.heartbeat_received(beat, alone.now))
    alone.wait(1.0)
    assert reason in alone.reports(messages.RanksStuck)[0].reason
    alone.states[0] = "R"
    alone.wait(2.0)
    alone.stop("c")
    alone.wait(STUCK_AFTER_S)
    assert "is in C code that keeps the GIL" in alone.reports(messages.RanksStuck)[1].reason


def test_a_rank_that_gets_no_processor_is_not_said_to_be_stuck_in_c_code(busy: Host) -> None:
    busy.starved = {1}
    busy.stop("c")
    busy.wait(STUCK_AFTER_S)
    reason = busy.reports(messages.RanksStuck)[0].reason
    assert "rank 0 (pid 1000) is in C code" in reason
    assert f"rank 1 (pid 1001) has waited for a processor for {STUCK_AFTER_S:.1f} of {STUCK_AFTER_S:.1f} s" in reason


def test_a_second_stop_lets_a_rank_that_gets_no_processor_come_back(busy: Host) -> None:
    busy.starved = {1}
    busy.stop("c", hard=True)
    busy.wait(KILL_AFTER_S + 0.3)
    assert busy.signals(0, signal.SIGKILL) == [KILL_AFTER_S]
    busy.finish(1, "c", "interrupted")
    busy.wait(10.0)
    assert busy.signals(1, signal.SIGKILL) == []


def test_a_second_stop_kills_a_rank_that_never_gets_a_processor(alone: Host) -> None:
    alone.starved = {0}
    alone.stop("c", hard=True)
    alone.wait(10.0)
    assert alone.signals(0, signal.SIGKILL) == [KILL_STARVED_AFTER_S]
    assert alone.notices() == [
        f"second Stop: rank 0 did not come back within {KILL_STARVED_AFTER_S:g} s and was killed"
    ]


# ---- deaths


def test_a_rank_that_dies_loses_what_it_ran_and_what_waited_for_it(busy: Host) -> None:
    busy.cell("d")
    busy.die(0)
    for call in ("c", "d"):
        busy.finish(1, call)
        assert busy.outcomes(call) == {0: "lost", 1: "ok"}
    assert busy.sent(0) == ["c"]


def check_exits(host: Host, *ending: int) -> None:
    command = messages.CheckExits(call="exits", ranks=(0, 1))  # type: ignore[arg-type]
    host.carry_out(host.ledger.calls.await_exits(command, (0, 1), ending, host.now))


def test_a_look_for_exits_ends_at_once_if_all_processes_run(host: Host) -> None:
    check_exits(host)
    assert host.outcomes("exits") == {0: "ok", 1: "ok"}


def test_a_look_for_exits_waits_until_a_process_that_is_ending_has_been_reported(host: Host) -> None:
    check_exits(host, 0)
    assert not host.reports(messages.CallFinished)
    host.die(0)
    assert host.outcomes("exits") == {0: "lost", 1: "ok"}


def test_a_look_for_exits_does_not_wait_for_ever_for_a_process_that_does_not_end(host: Host) -> None:
    check_exits(host, 0)
    host.wait(60.0)
    assert host.outcomes("exits") == {0: "skipped", 1: "ok"}


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.5, 1.9])
def test_a_rank_that_dies_while_it_is_stopped_gets_no_more_signals(busy: Host, after_s: float) -> None:
    busy.stop("c")
    busy.wait(after_s)
    busy.die(0)
    num_signals = len(busy.signals(0, STOP_SIGNAL))
    busy.wait(10.0)
    assert len(busy.signals(0, STOP_SIGNAL)) == num_signals
    assert [report.ranks for report in busy.reports(messages.RanksStuck)] == [(1,)]
    busy.finish(1, "c", "interrupted")
    assert busy.outcomes("c") == {0: "lost", 1: "interrupted"}


def test_ranks_with_actors_that_end_and_send_heartbeats_are_spared_once(host: Host) -> None:
    host.ledger.ranks[0].has_actors = True
    host.carry_out(host.ledger.heartbeat_received(heartbeat(), host.now))
    host.wait(4.0)  # heartbeats are late on a busy machine
    host.carry_out(host.ledger.kill_all(host.now, spare_actors=True))
    assert (host.signals(0, signal.SIGKILL), host.signals(1, signal.SIGKILL)) == ([], [4.0])
    host.carry_out(host.ledger.kill_all(host.now))
    assert host.signals(0, signal.SIGKILL) == [4.0]


# ---- any order of events


class AnyOrder(RuleBasedStateMachine):
    """Random commands, outcomes, Stops, deaths and waits on three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.num_calls, self.dead = Host(3), 0, set[int]()

    @rule(ranks=st.sets(st.integers(0, 2), min_size=1), operations=st.booleans())
    def command(self, ranks: set[int], operations: bool) -> None:
        self.num_calls += 1
        send = self.host.operations if operations else self.host.cell
        send(f"a-{self.num_calls}", tuple(sorted(ranks)))

    @rule(rank=st.integers(0, 2), status=st.sampled_from(["ok", "error", "interrupted"]))
    def finish(self, rank: int, status: str) -> None:
        running = self.host.ledger.ranks[rank].running
        if running is not None:
            self.host.finish(rank, running.call, status)

    @precondition(lambda self: self.num_calls > 0)
    @rule(data=st.data(), hard=st.booleans())
    def stop(self, data: st.DataObject, hard: bool) -> None:
        target = data.draw(st.sampled_from([None, *(f"a-{number + 1}" for number in range(self.num_calls))]))
        self.host.stop(target, hard=hard, client="a")

    @rule(rank=st.integers(0, 2))
    def die(self, rank: int) -> None:
        if rank not in self.dead:
            self.dead.add(rank)
            self.host.die(rank)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        before = len(self.host.done)
        dead = set(self.dead)
        self.host.wait(seconds)
        touched = {one.rank for _, one in self.host.done[before:] if hasattr(one, "rank")}
        assert not touched & dead, "a dead rank was sent something"

    @invariant()
    def a_rank_runs_what_it_was_sent_last(self) -> None:
        for rank, record in self.host.ledger.ranks.items():
            if record.running is not None:
                assert self.host.sent(rank)[-1] == record.running.call

    @invariant()
    def nothing_is_sent_twice_or_finished_twice(self) -> None:
        for rank in range(3):
            assert set(Counter(self.host.sent(rank)).values()) <= {1}
        finished = Counter(report.call for report in self.host.reports(messages.CallFinished))
        assert set(finished.values()) <= {1}

    def teardown(self) -> None:
        """When all that runs has ended, every call has been finished, and has one outcome for each of its ranks."""
        for _ in range(4 * self.num_calls + 1):
            for rank, record in self.host.ledger.ranks.items():
                if record.running is not None:
                    self.host.finish(rank, record.running.call)
        assert {report.call for report in self.host.reports(messages.CallFinished)} == {
            f"a-{number + 1}" for number in range(self.num_calls)
        }


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestAnyOrder = AnyOrder.TestCase
