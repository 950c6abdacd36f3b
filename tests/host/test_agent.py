"""The host's own rules, with no rank started: who is heard at its sockets, and what a Stop takes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from meshbook.host.agent import HostAgent, RankHandle
from meshbook.wire import codec, messages
from meshbook.wire.loop import Loop


class Bench:
    """An agent that knows of two ranks, and a context to knock at its doors."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.context, self.reports = Loop(), zmq.Context[zmq.Socket[bytes]](), list[Any]()
        self.agent = HostAgent(self.loop, self.context, folder, "token", 0, self.reports.append)
        self.links = [RankHandle(rank) for rank in range(2)]
        self.agent._ranks = dict(enumerate(self.links))
        self.folder = folder

    def knock(self, identity: bytes, *words: Any) -> None:
        with self.context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(f"ipc://{self.folder}/h0-work.sock")
            for word in words:
                socket.send_multipart(codec.encode(word))
            for _ in range(100):
                self.loop.run_once(max_wait_s=0.002)
            socket.close(linger=0)

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
    heard = []
    monkeypatch.setitem(bench.agent._handlers, messages.RankFinished, heard.append)
    bench.knock(b"r0", ready("wrong"), FINISHED)
    assert (bench.links[0].work_ready, bench.links[0].device, heard) == (False, "cpu", [])


def test_who_has_the_token_is_heard_at_the_door_it_was_shown_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    monkeypatch.setitem(bench.agent._handlers, messages.RankFinished, heard.append)
    bench.knock(b"r0", ready("token"), FINISHED)
    assert (bench.links[0].work_ready, bench.links[0].service_ready, heard) == (True, False, [FINISHED])


def test_a_rank_speaks_for_itself_alone(bench: Bench) -> None:
    bench.knock(b"r1", ready("token"))
    assert not any(link.work_ready for link in bench.links)


def test_a_stop_without_a_name_takes_back_what_waits_of_its_own_client_only(bench: Bench) -> None:
    for call in ("a-1", "b-1", "a-2"):
        command = messages.RunCell(call=call, ranks=(0, 1), source="x")  # type: ignore[arg-type]
        bench.agent.handle(command, codec.encode_body(command))
    stop = messages.Interrupt(ranks=(0, 1), client="a")
    bench.agent.handle(stop, codec.encode_body(stop))
    assert [queued.call for queued in bench.links[0].queue] == ["b-1"]
    assert [report.call for report in bench.reports if isinstance(report, messages.CallFinished)] == ["a-1", "a-2"]


def test_what_is_told_of_progress_may_begin_a_question_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("a-1", "a-2"):
        command = messages.RunCell(call=call, ranks=(0, 1), source="x")  # type: ignore[arg-type]
        bench.agent.handle(command, codec.encode_body(command))
        bench.agent._calls[call].opened_at = 0.0
        bench.agent._calls[call].outcomes[0] = messages.Outcome(status="ok")
    told = []

    def ask(report: Any) -> None:
        if isinstance(report, messages.CallProgressed):
            told.append(report.call)
            question = messages.QueryPositions(call=f"left-{len(told)}", ranks=(0,), about_call=report.call)  # type: ignore[arg-type]
            bench.agent.handle(question, codec.encode_body(question))

    monkeypatch.setattr(bench.agent, "_report", ask)
    bench.agent._tick()
    assert told == ["a-1", "a-2"]


def test_a_rank_hears_of_operations_that_a_stop_has_taken_back(bench: Bench) -> None:
    for call in ("a-1", "a-2"):
        command = messages.RunOps(call=call, ranks=(0, 1), engine="a|", first_op=1, ops=b"\x90")  # type: ignore[arg-type]
        bench.agent.handle(command, codec.encode_body(command))
    stop = messages.Interrupt(ranks=(0,), target="a-1")  # type: ignore[arg-type]
    for _ in range(2):
        bench.agent.handle(stop, codec.encode_body(stop))
    assert [(queued.call, queued.is_cancelled) for queued in bench.links[0].queue] == [("a-1", True), ("a-2", False)]
    told = msgspec.msgpack.decode(bench.links[0].queue[0].body)
    assert (told["call"], told["is_cancelled"]) == ("a-1", True)
    assert not any(queued.is_cancelled for queued in bench.links[1].queue)
