"""Open calls: whose parts have ended, what follows the last of them, and output on its way. Hosts are lists."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from meshbook.ids import CallId
from meshbook.supervisor.call_output import CallOutputStream, LateOutput
from meshbook.supervisor.call_table import ActiveCall, CallTable, Parts
from meshbook.supervisor.effects import Effect, SendToClient, SendToHosts, SetTimer
from meshbook.supervisor.monitoring import Monitoring
from meshbook.supervisor.rank_table import RankTable
from meshbook.wire import messages
from meshbook.wire.messages import FoldedItem, Line, Outcome, OutcomeGroup, RankExited, RankInfo

RANKS = (0, 1, 2, 3)
C1 = CallId("c1")


def part(status: str, *ranks: int) -> OutcomeGroup:
    return OutcomeGroup(ranks, Outcome(status=status))  # type: ignore[arg-type]


def lost(rank: int) -> RankExited:
    return RankExited(rank=rank, pid=9, exit_code=1, signal=None, host="box", last_lines=(), last_collective=None)


def line(text: str, *ranks: int) -> Line:
    return Line(ranks=ranks, stream="stdout", text=text)


class Unwatched(Monitoring):
    """Monitoring that sees what it is told of, and no mesh."""

    def __init__(self) -> None:
        self.printed: list[FoldedItem] = []
        self.finished: list[int] = []

    def call_printed(self, call: str, items: Iterable[FoldedItem], now: float) -> None:
        self.printed += items

    def ranks_finished(self, call: str, ranks: Iterable[int]) -> None:
        self.finished += ranks


class Table:
    """A table with one call, on two hosts of two ranks each."""

    def __init__(self, num_hosts: int = 2) -> None:
        ranks = RankTable()
        ranks.assign(len(RANKS), num_hosts)
        self.ranks, self.monitoring = ranks, Unwatched()
        self.calls = CallTable(ranks, self.monitoring)
        self.ended: list[Parts] = []
        self.call = self.calls.open("c1", RANKS, 0.0, self.end, client="one", label="cell 1")

    def end(self, call: ActiveCall, parts: Parts, now: float) -> list[Effect]:
        self.ended.append(parts)
        return [SendToClient(call.client, messages.CallOutput(call=call.id, items=call.output.finish(now)))]

    def finish(self, host: int, *parts: OutcomeGroup, items: tuple[FoldedItem, ...] = ()) -> list[Effect]:
        report = messages.CallFinished(call=C1, outcomes=parts, seconds=1.0, items=items)
        return self.calls.part_received(host, report, 1.0)


@pytest.fixture
def table() -> Table:
    return Table()


def test_a_call_ends_with_the_last_of_its_hosts_and_only_once(table: Table) -> None:
    table.finish(0, part("ok", 0), part("error", 1))
    assert (table.ended, table.call.remaining_ranks(), table.monitoring.finished) == ([], (2, 3), [0, 1])
    table.finish(1, part("ok", 2, 3))
    assert table.ended == [(part("ok", 0, 2, 3), part("error", 1))]
    assert "c1" not in table.calls
    assert table.finish(1, part("ok", 2, 3)) == []


def test_a_lost_host_ends_its_part(table: Table) -> None:
    table.finish(0, part("ok", 0, 1))
    table.calls.host_lost(1, "was killed", 1.0)
    ((done, gone),) = table.ended
    assert (done, gone.ranks, gone.outcome.status) == (part("ok", 0, 1), (2, 3), "lost")
    assert gone.outcome.error is not None
    assert gone.outcome.error.evalue == "ranks 2-3: the host was killed"


def test_a_call_that_nobody_waits_for_any_longer_tells_who_is_lost_and_who_was_skipped(table: Table) -> None:
    table.finish(0, part("ok", 0), part("lost", 1))
    table.call.lost += [lost(1), lost(3)]
    (end, concluded) = table.calls.timer_fired("abandon", "c1", 2.0)
    assert isinstance(end, SendToHosts)
    assert end.hosts == (1,)
    assert isinstance(concluded, SetTimer)
    table.calls.timer_fired(*concluded.name.split(), 3.0)  # type: ignore[call-arg]
    assert table.ended == [(part("ok", 0), part("lost", 1), part("lost", 3), part("skipped", 2))]


def test_output_that_was_held_back_is_not_lost_when_its_call_is_given_up(table: Table) -> None:
    report = messages.CallOutput(call=C1, items=(line("saved", 0, 1),))
    held = table.calls.output_received(0, report, 0.0)  # the other host may print the same
    assert [effect for effect in held if isinstance(effect, SendToClient)] == []
    (sent,) = table.calls.timer_fired("concluded", "c1", 0.01)
    assert isinstance(sent, SendToClient)
    assert isinstance(sent.message, messages.CallOutput)
    assert [item.text for item in sent.message.items if isinstance(item, Line)] == ["saved"]


def test_a_host_that_was_done_before_any_printed_is_not_waited_for(table: Table) -> None:
    table.finish(0, part("ok", 0, 1))
    report = messages.CallOutput(call=C1, items=(line("epoch 1", 2, 3),))
    (sent,) = table.calls.output_received(1, report, 2.0)
    assert isinstance(sent, SendToClient)
    assert isinstance(sent.message, messages.CallOutput)
    assert sent.message.items == (line("epoch 1", 2, 3),)


def test_a_call_whose_ranks_end_with_the_mesh_is_not_reported() -> None:
    table = Table(num_hosts=1)
    table.calls.is_stopping = True
    (said,) = table.finish(0, part("lost", *RANKS), items=(line("bye", 0),))
    assert isinstance(said, SendToClient)
    assert isinstance(said.message, messages.CallOutput)
    assert table.ended == []


def test_a_stop_of_all_ranks_that_still_run_it_stops_a_call() -> None:
    call = Table().call
    call.done_ranks.add(3)
    call.stop((0, 1), 2.0)
    assert (call.is_stopped, call.stopping_ranks) == (False, {0, 1})
    call.stop((0, 1, 2, 7), 3.0)
    assert (call.is_stopped, call.stopping_ranks, call.stop_deadline) == (True, {0, 1, 2}, 3.0)


def test_a_stop_that_lets_queued_calls_begin_stops_no_call() -> None:
    call = Table().call
    call.stop(RANKS, 2.0, ends_queued=False)
    assert (call.is_stopped, call.stopping_ranks) == (False, set(RANKS))


@pytest.mark.parametrize(("reported_at", "state"), [(0.2, "busy"), (0.7, "idle")])
def test_a_rank_is_busy_with_a_call_that_its_host_may_not_have_heard_of(reported_at: float, state: str) -> None:
    table = Table()
    table.ranks.heartbeat([RankInfo(rank=0, state="idle", host="box")], reported_at, is_starting=False)
    info = table.calls.rank_infos()[0]
    assert (info.state, info.cell) == (state, "cell 1" if state == "busy" else None)


# ---- output


def test_output_of_one_host_is_sent_as_it_comes_and_its_last_with_the_end() -> None:
    sent: list[FoldedItem] = []
    stream = CallOutputStream("c1", "one", None, lambda call, items, now: sent.extend(items))
    (first,) = stream.add(0, (line("a", 0),), 0.0)
    assert isinstance(first, SendToClient)
    stream.host_done(0, (line("b", 0),), 1.0)
    notice = messages.RankDisplay(ranks=(0,), item=messages.Notice("c"))
    assert stream.finish(1.0, notice) == (line("b", 0), notice)
    assert sent == [line("a", 0), line("b", 0), notice]
    assert stream.finish(1.0) == ()


def test_one_timer_at_a_time_brings_what_the_rate_did_not_admit() -> None:
    stream = CallOutputStream("c1", "one", None, lambda call, items, now: None)
    flood = tuple(line("x" * 1000, 0) for _ in range(4000))
    (timer,) = [effect for effect in stream.add(0, flood, 0.0) if isinstance(effect, SetTimer)]
    assert not [effect for effect in stream.add(0, flood, 0.0) if isinstance(effect, SetTimer)]
    (reported,) = stream.timer_fired(timer.delay_s)
    assert isinstance(reported, SendToClient)


def test_late_output_goes_to_everybody() -> None:
    (sent,) = LateOutput().add("c0", (line("late", 0),), 0.0)
    assert isinstance(sent, SendToClient)
    assert (sent.client, LateOutput().timer_fired(1.0)) == (None, [])
