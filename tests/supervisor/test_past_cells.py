"""Who receives a cell whose client is gone, and what is said of cells that have ended. Events in, effects out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from meshbook.ids import CallId
from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import CallFinished, CallOutput, CommandReply, InputRequest, Line, Refused
from tests.supervisor.test_state import World, messages_of

RANKS = (0, 1, 2, 3)
C1 = CallId("c1")


def printed(world: World, *texts: str, call: CallId = C1) -> list[s.Effect]:
    lines = tuple(Line(RANKS, "stdout", text) for text in texts)
    return world.host(CallOutput(call=call, items=lines))


def unattended(world: World, client: str) -> CommandReply:
    return messages_of(world.say(messages.QueryUnattended(call=CallId("u")), client), CommandReply)[0]


def output(world: World, number: int, client: str = "one") -> list[str]:
    reply = messages_of(world.say(messages.QueryOutput(call=CallId("o"), number=number), client), CommandReply)[0]
    return [item.text for item in reply.kept[-1].items if isinstance(item, Line)]


def received(effects: Iterable[s.Effect], client: str) -> list[str]:
    """The lines that a client is sent, and "end" for the end of the call."""
    found: list[str] = []
    for effect in effects:
        if isinstance(effect, s.SendToClient) and effect.client in (client, None):
            items = effect.message.items if isinstance(effect.message, CallOutput | CallFinished) else ()
            found += [item.text for item in items if isinstance(item, Line)]
            found += ["end"] * isinstance(effect.message, CallFinished)
    return found


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def busy(world: World) -> World:
    """Whose ranks all run cell 7."""
    world.run(execution_count=7)
    return world


def test_a_client_that_follows_gets_what_was_printed_meanwhile_what_follows_and_the_end(busy: World) -> None:
    printed(busy, "seen")
    busy.now = 20.0
    busy.state.client_disconnected("one", busy.now)
    printed(busy, "meanwhile")
    busy.join("two")
    (running,) = unattended(busy, "two").open_calls
    assert (running.number, running.orphaned, running.client) == (7, True, "one")
    assert received(busy.say(messages.FollowCall(call=C1), "two"), "two") == ["meanwhile"]
    assert received(printed(busy, "live"), "two") == ["live"]
    assert received(busy.finish("c1"), "two") == ["end"]
    assert output(busy, 7, "two") == ["seen", "meanwhile", "live"]  # each once, although some were sent twice
    assert unattended(busy, "two").history == ()


def test_a_cell_whose_client_is_attached_cannot_be_taken_from_it(busy: World) -> None:
    busy.join("two")
    assert not unattended(busy, "two").open_calls[0].orphaned
    (refused,) = messages_of(busy.say(messages.FollowCall(call=C1), "two"), Refused)
    assert refused.text == "cell 1 is another client's, which is attached"
    assert received(printed(busy, "live"), "one") == ["live"]
    assert output(busy, 7, "two") == ["live"]  # but what it printed can be read


def test_a_cell_that_ends_before_it_is_followed_is_sent_with_its_end(busy: World) -> None:
    busy.state.client_disconnected("one", busy.now)
    busy.join("two")
    printed(busy, "alone")
    busy.finish("c1")
    assert received(busy.say(messages.FollowCall(call=C1), "two"), "two") == ["alone", "end"]
    assert unattended(busy, "two").history == ()
    (refused,) = messages_of(busy.say(messages.FollowCall(call=CallId("c9")), "two"), Refused)
    assert refused.text == "the cell has ended, and its output is not kept"


def test_a_cell_that_ended_alone_is_reported_until_it_is_acknowledged_and_no_user_hears_of_attended_ones() -> None:
    world = World()
    world.run("c0", execution_count=6)
    world.finish("c0")
    world.run(execution_count=7)
    world.state.client_disconnected("one", world.now)
    world.finish("c1", status="error")
    world.join("two")
    (entry,) = unattended(world, "two").history
    assert (entry.number, entry.status, entry.seconds, entry.num_lines) == (7, "error", 0.1, 0)
    world.join("three")
    world.say(messages.AcknowledgeCells(calls=(entry.call,)), "three")
    assert unattended(world, "two").history == ()


def test_a_follower_is_asked_for_the_input_of_its_cell(busy: World) -> None:
    busy.state.client_disconnected("one", busy.now)
    busy.join("two")
    busy.say(messages.FollowCall(call=C1), "two")
    asked = busy.host(InputRequest(call=C1, rank=0, prompt="?", password=False))
    assert [effect.client for effect in asked if isinstance(effect, s.SendToClient)] == ["two"]


def test_of_a_cell_that_was_never_there_the_refusal_names_those_that_are(world: World) -> None:
    for number in (1, 2, 3, 7):
        world.run(f"c{number}", execution_count=number)
        world.finish(f"c{number}")
    (refused,) = messages_of(world.say(messages.QueryOutput(call=CallId("o"), number=99)), Refused)
    assert refused.error == "UsageError"
    assert refused.text == "no output of a cell 99 is kept; it is of cells: 1-3,7"


def test_of_a_silent_cell_and_of_a_function_nothing_is_kept(world: World) -> None:
    world.run(execution_count=7, silent=True)
    printed(world, "silent")
    world.finish("c1")
    (refused,) = messages_of(world.say(messages.QueryOutput(call=CallId("o"), number=7)), Refused)
    assert refused.text.endswith("it is of cells: none")


def test_what_a_thread_prints_after_its_cell_is_kept_with_it(busy: World) -> None:
    busy.finish("c1")
    busy.state.client_disconnected("one", busy.now)
    printed(busy, "late")
    busy.join("two")
    assert output(busy, 7, "two") == ["late"]


def test_what_an_agent_does_beside_cells_is_in_the_history_with_its_name_and_what_a_person_does_is_not() -> None:
    world = World()
    hello = messages.Hello(token="", client="two", kind="mcp:claude", pid=2, channel="receive")
    world.state.client_joined(hello, world.now)
    world.run(execution_count=7)
    world.now = 3.0
    for client in ("one", "two"):
        world.say(messages.Interrupt(ranks=(0, 1)), client)
    world.say(messages.KillRanks(call=CallId("k"), ranks=(3,)), "two")
    world.say(messages.HealMesh(call=CallId("h")), "two")
    world.say(messages.QueryStatus(call=CallId("s")), "two")
    world.say(messages.RunCell(call=CallId("c2"), ranks=RANKS, source="y", execution_count=1), "two")
    (reply,) = messages_of(world.say(messages.QueryHistory(call=CallId("q"))), CommandReply)
    assert [(entry.by, entry.source, entry.ranks) for entry in reply.history] == [
        ("script", "x = 1", RANKS),
        ("mcp:claude", "%mesh interrupt 0-1", (0, 1)),
        ("mcp:claude", "%mesh kill 3", (3,)),
        ("mcp:claude", "%mesh heal", ()),
        ("mcp:claude", "y", RANKS),
    ]
    assert reply.history[1].started_at == 1003.0


def test_new_output_of_a_cell_that_is_not_kept_is_refused(world: World) -> None:
    (refused,) = messages_of(world.say(messages.QueryNewOutput(CallId("n"), target=CallId("c9"))), Refused)
    assert (refused.error, refused.text) == ("MeshNameError", "no cell c9 is kept; output is kept of cells: none")
