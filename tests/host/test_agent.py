"""The host's sockets, with no rank started: whose messages are handled, and reports that bring commands at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from meshbook.host.agent import HostAgent
from meshbook.host.instructions import SignalRank
from meshbook.host.rank_record import RankRecord
from meshbook.wire import codec, messages
from meshbook.wire.linked_sockets import LinkedDealer
from meshbook.wire.loop import Loop


class Bench:
    """An agent that knows of two ranks, and a context to knock at its doors."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.context, self.reports = Loop(), zmq.Context[zmq.Socket[bytes]](), list[Any]()
        self.agent = HostAgent(self.loop, self.context, folder, "token", 0, self.reports.append)
        self.ranks = [RankRecord(rank) for rank in range(2)]
        self.agent.ledger.ranks.update(enumerate(self.ranks))
        for rank in range(2):
            self.agent._sockets.expect(rank, incarnation=0)
        self.folder = folder

    def knock(self, identity: bytes, *words: Any) -> None:
        """Send words to the door for work, and return when the host has dealt with all of them."""
        sockets, num_heard = self.agent._sockets, 0
        deal_with = type(sockets)._on_message

        def count(*message: Any) -> None:
            nonlocal num_heard
            deal_with(sockets, *message)
            num_heard += 1

        sockets._on_message = count  # type: ignore[method-assign]
        dealer = LinkedDealer(self.context, f"ipc://{self.folder}/h0-work.sock", identity)
        dealer.introduce(codec.encode_body(words[0]))
        for word in words[1:]:
            dealer.send(codec.encode_body(word))
        deadline = time.monotonic() + 60
        while num_heard < len(words):
            assert time.monotonic() < deadline, f"the host has heard {num_heard} of {len(words)} messages"
            self.loop.run_once(max_wait_s=0.02)
        dealer.close()

    def close(self) -> None:
        self.agent.close()
        self.context.destroy(linger=0)


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("h"))
    yield bench
    bench.close()


def ready(token: str) -> messages.RankReady:
    return messages.RankReady(rank=0, pid=1, device="cuda:9", token=token)


FINISHED = messages.RankFinished(rank=0, call="c-1", outcome=messages.Outcome(status="ok"), seconds=0.0)  # type: ignore[arg-type]


def test_who_has_a_ranks_identity_and_not_the_token_is_not_heard(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    handled = []
    monkeypatch.setattr(bench.agent.ledger, "rank_finished", lambda message, now: handled.append(message) or [])
    bench.knock(b"r0", ready("wrong"), FINISHED)
    assert (bench.ranks[0].work_ready, bench.ranks[0].device, handled) == (False, "cpu", [])


def test_who_has_the_token_is_heard_at_the_door_it_was_shown_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    handled = []
    monkeypatch.setattr(bench.agent.ledger, "rank_finished", lambda message, now: handled.append(message) or [])
    bench.knock(b"r0", ready("token"), FINISHED)
    assert (bench.ranks[0].work_ready, bench.ranks[0].service_ready, handled) == (True, False, [FINISHED])


def test_a_rank_speaks_for_itself_alone(bench: Bench) -> None:
    bench.knock(b"r1", ready("token"))
    assert not any(link.work_ready for link in bench.ranks)


def test_what_is_told_of_progress_may_begin_a_question_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("a-1", "a-2"):
        command = messages.RunCell(call=call, ranks=(0, 1), source="x")  # type: ignore[arg-type]
        bench.agent.handle(command, codec.encode_body(command))
        pending = bench.agent.ledger.calls.get(call)
        assert pending is not None
        pending.opened_at = 0.0
        pending.outcomes[0] = messages.Outcome(status="ok")
    reported = []

    def ask(report: Any) -> None:
        if isinstance(report, messages.CallProgressed):
            reported.append(report.call)
            question = messages.QueryPositions(call=f"left-{len(reported)}", ranks=(0,), about_call=report.call)  # type: ignore[arg-type]
            bench.agent.handle(question, codec.encode_body(question))

    monkeypatch.setattr(bench.agent, "_report", ask)
    bench.agent._tick()
    assert reported == ["a-1", "a-2"]


def test_a_call_that_is_not_waited_for_any_longer_ends_with_what_its_ranks_have_come_to(bench: Bench) -> None:
    for command in (messages.RunCell(call="a-1", ranks=(0, 1), source="x"), messages.EndCall(call="a-1")):  # type: ignore[arg-type]
        bench.agent.handle(command, codec.encode_body(command))
        if (pending := bench.agent.ledger.calls.get("a-1")) is not None:
            pending.record(0, messages.Outcome(status="ok"))
    (finished,) = [report for report in bench.reports if isinstance(report, messages.CallFinished)]
    assert {part.ranks: part.outcome.status for part in finished.outcomes} == {(0,): "ok", (1,): "skipped"}


def test_a_rank_that_is_killed_before_its_process_has_started_ends_as_soon_as_that_has(bench: Bench) -> None:
    kill = messages.KillRanks(call="k-1", ranks=(0,))  # type: ignore[arg-type]
    bench.agent.handle(kill, codec.encode_body(kill))
    assert bench.ranks[0].started(pid=77) == [SignalRank(0, signal.SIGKILL)]
    assert bench.ranks[1].started(pid=78) == []
    interrupt = RankRecord(2)
    interrupt.to_signal(signal.SIGUSR2)
    assert interrupt.started(pid=79) == []
