"""Commands that wait in a host's queues until their values have arrived on every machine. Pure."""

from __future__ import annotations

from typing import Any

from meshbook.host.arriving_values import ArrivingValues
from meshbook.host.instructions import Instructions, SendReport, SendWork
from meshbook.host.ledger import HostLedger
from meshbook.wire import codec, messages
from meshbook.wire.loop import Loop
from meshbook.wire.messages import Payload, SharedBuffer

HERE, THERE = SharedBuffer(9, 4, 4096, 70_000, "b.1"), SharedBuffer(7, 3, 4096, 70_000, "a.1")


def two_ranks() -> HostLedger:
    ledger = HostLedger()
    ledger.start(messages.StartRanks(messages.MeshSpec(axes={"rank": 2}), (0, 1), world_size=2, host_ranks=(0, 1)))  # type: ignore[arg-type]
    for rank in (0, 1):
        ledger.socket_ready(rank, work=True, device="cpu", now=0.0)
    return ledger


def push(call: str = "push") -> messages.SetNames:
    return messages.SetNames(call=call, ranks=(0, 1), names=("x",), payload=Payload(b"", (THERE,)))  # type: ignore[arg-type]


def stage(ledger: HostLedger, command: Any) -> Instructions:
    return ledger.enqueue(command, codec.encode_body(command), 1.0, ready=False)


def sent(todo: Instructions) -> list[tuple[int, str]]:
    return [(one.rank, codec.rank_commands.decode_body(one.body).call) for one in todo if isinstance(one, SendWork)]  # type: ignore[union-attr]


def finished(todo: Instructions) -> list[messages.CallFinished]:
    reports = [one.report for one in todo if isinstance(one, SendReport)]
    return [report for report in reports if isinstance(report, messages.CallFinished)]


def test_a_command_waits_for_its_values_and_the_next_one_waits_behind_it() -> None:
    ledger = two_ranks()
    cell = messages.RunCell(call="cell", ranks=(0, 1), source="x")  # type: ignore[arg-type]
    assert sent(stage(ledger, push())) == []
    assert sent(ledger.enqueue(cell, codec.encode_body(cell), 1.0)) == []
    todo, without = ledger.staged.begin(push(), {THERE: HERE}, 2.0)
    assert sent(todo) == [(0, "push"), (1, "push")]
    assert without == ()
    assert isinstance(todo[0], SendWork)
    assert codec.rank_commands.decode_body(todo[0].body).payload.buffers == (HERE,)  # type: ignore[union-attr]


def test_a_command_whose_values_do_not_come_runs_on_no_rank() -> None:
    ledger = two_ranks()
    stage(ledger, push())
    todo = ledger.staged.fail(push(), "n2 has no memory", 2.0)
    assert sent(todo) == []
    (call,) = finished(todo)
    (part,) = call.outcomes
    assert part.ranks == (0, 1)
    assert part.outcome.error is not None
    assert part.outcome.error.evalue.endswith("so the call was run on none: n2 has no memory")


def test_a_stop_takes_back_a_command_that_waits_for_its_values() -> None:
    ledger = two_ranks()
    stage(ledger, push())
    (call,) = finished(ledger.stops.interrupt(messages.Interrupt(ranks=(0, 1), target="push"), 2.0))  # type: ignore[arg-type]
    assert call.outcomes[0].outcome.status == "interrupted"
    todo, without = ledger.staged.begin(push(), {THERE: HERE}, 3.0)
    assert sent(todo) == []
    assert without == (0, 1)  # they will not release the copies


def test_values_that_were_on_their_way_to_a_host_agent_that_was_killed_do_not_come_and_it_is_said() -> None:
    reports: list[messages.HostReport] = []
    values = ArrivingValues(Loop(), two_ranks(), reports.append)
    values.handle(messages.StagedCommand(body=codec.encode_body(push()), fetch=True), 1.0)
    values.take_over()
    why = "its machine's host agent was killed while it was on its way; send it again"
    assert reports[-1] == messages.ValuesArrived(call="push", error=why)  # type: ignore[arg-type]
    values.close()
