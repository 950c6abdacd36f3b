"""Whom ranks ask for what a user types, and what they hear when nobody is left to type."""

from __future__ import annotations

from collections.abc import Iterable

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import DebuggerStop
from tests.supervisor.test_state import World, messages_of

STOP = DebuggerStop(place="cell 1, line 2", text="")
ASKED = messages.InputRequest(call="c1", rank=2, prompt="?", password=False)
STOPPED = messages.InputRequest(call="c1", rank=1, prompt="", password=False, stop=STOP)


def debugged() -> World:
    """A world whose cell of client "one" has its debugger in the hands of client "two"."""
    world = World()
    world.run(allow_input=True)
    world.join("two", observer=True)
    (sent,) = world.say(messages.StopInDebugger("q1", (0, 1), "c1"), "two")
    assert isinstance(sent, s.SendToHosts)
    return world


def asked(steps: Iterable[s.Effect]) -> list[str | None]:
    """The clients that are asked."""
    return [
        step.client
        for step in steps
        if isinstance(step, s.SendToClient) and isinstance(step.message, messages.InputRequest)
    ]


def declined(steps: Iterable[s.Effect]) -> list[int]:
    """The ranks that hear that there is nobody to type."""
    return [reply.rank for reply in messages_of(steps, messages.InputReply) if reply.text is None]


def test_a_question_is_the_clients_whose_call_it_is_until_it_is_answered() -> None:
    world = World()
    world.run(allow_input=True)
    assert asked(world.host(ASKED)) == ["one"]
    assert world.state.ranks_awaiting_input() == (2,)
    world.say(messages.InputReply(target="c1", rank=2, text="x"))
    assert world.state.ranks_awaiting_input() == ()


def test_a_stop_goes_to_the_client_that_asked_for_it_and_input_to_that_of_the_call() -> None:
    world = debugged()
    assert asked(world.host(STOPPED)) == ["two"]
    assert asked(world.host(ASKED)) == ["one"]


def test_ranks_go_on_when_the_client_leaves_their_debugger() -> None:
    world = debugged()
    world.host(STOPPED)
    world.host(ASKED)
    steps = world.say(messages.LeaveDebugger((0, 1, 2, 3), "c1"), "two")
    assert declined(steps) == [1]
    assert len(messages_of(steps, messages.LeaveDebugger)) == 1
    assert world.state.ranks_awaiting_input() == (2,)
    assert asked(world.host(STOPPED)) == ["one"]


def test_ranks_go_on_when_the_client_that_debugs_them_disconnects() -> None:
    world = debugged()
    world.host(STOPPED)
    steps = world.state.client_disconnected("two", world.now)
    assert declined(steps) == [1]
    assert messages_of(steps, messages.LeaveDebugger) == [messages.LeaveDebugger((0, 1, 2, 3), "c1")]


def test_another_client_cannot_give_up_the_debugger() -> None:
    world = debugged()
    world.host(STOPPED)
    assert world.say(messages.LeaveDebugger((0, 1, 2, 3), "c1"), "one") == []
    assert world.state.ranks_awaiting_input() == (1,)


def test_the_client_that_debugs_a_call_hears_of_its_end() -> None:
    ended = [
        (step.client, step.message.target)
        for step in debugged().finish("c1")
        if isinstance(step, s.SendToClient) and isinstance(step.message, messages.DebuggedCallEnded)
    ]
    assert ended == [("two", "c1")]


def test_ranks_hear_when_the_first_prompt_opens_and_when_the_last_is_answered() -> None:
    world = World()
    world.run(allow_input=True)
    everybody = (0, 1, 2, 3)
    assert messages_of(world.host(ASKED), messages.PromptsOpen) == [messages.PromptsOpen(everybody, is_open=True)]
    assert messages_of(world.host(STOPPED), messages.PromptsOpen) == []
    assert messages_of(world.say(messages.InputReply("c1", 2, "x")), messages.PromptsOpen) == []
    answered = world.say(messages.InputReply("c1", 1, "c"))
    assert messages_of(answered, messages.PromptsOpen) == [messages.PromptsOpen(everybody, is_open=False)]


def test_a_prompt_is_closed_by_the_end_of_its_call_and_by_the_client_that_leaves() -> None:
    world = World()
    world.run(allow_input=True)
    world.host(STOPPED)
    closed = [messages.PromptsOpen((0, 1, 2, 3), is_open=False)]
    assert messages_of(world.finish("c1"), messages.PromptsOpen) == closed
    world = debugged()
    world.host(STOPPED)
    assert messages_of(world.state.client_disconnected("two", world.now), messages.PromptsOpen) == closed


def test_what_has_ended_cannot_be_stopped() -> None:
    world = World()
    world.run()
    world.finish("c1")
    (refused,) = messages_of(world.say(messages.StopInDebugger("q1", (0,), "c1")), messages.Refused)
    assert "has ended" in refused.text


def test_the_status_lists_what_runs() -> None:
    world = World()
    world.run()
    (reply,) = messages_of(world.say(messages.QueryStatus(call="q1")), messages.CommandReply)
    assert [(call.call, call.label, call.client) for call in reply.open_calls] == [("c1", "cell 1", "one")]
