"""Ranks ask whether somebody has ended: events in, steps out."""

from __future__ import annotations

from collections.abc import Iterable

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from tests.supervisor.test_state import World, messages_of


def ask(world: World, rank: int, number: int = 1) -> list[s.Effect]:
    return world.host(messages.TransportFailed(rank=rank, number=number))


def answer(world: World, steps: Iterable[s.Effect], host: int = 0) -> list[s.Effect]:
    """A host has reported the exits that it was asked for."""
    (check,) = messages_of(steps, messages.CheckExits)
    return world.host(messages.CallFinished(call=check.call, outcomes=(), seconds=0.0), host)


def answered(steps: Iterable[s.Effect]) -> list[tuple[tuple[int, ...], int]]:
    return [(one.ranks, one.number) for one in messages_of(steps, messages.ExitsChecked)]


def test_a_rank_is_answered_when_all_hosts_have_looked_at_their_processes() -> None:
    world = World(num_hosts=2)
    asked = ask(world, 0, number=7)
    assert messages_of(asked, messages.CheckExits)[0].ranks == (0, 1, 2, 3)
    assert answered(answer(world, asked, host=0)) == []
    assert answered(answer(world, asked, host=1)) == [((0,), 7)]


def test_a_host_that_is_lost_is_not_waited_for_and_its_ranks_exits_come_before_the_answer() -> None:
    world = World(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1)
    asked = ask(world, 0)
    answer(world, asked, host=0)
    sent = [type(step.message) for step in world.state.host_exited(1, "was killed", 0.0) if hasattr(step, "message")]
    assert sent.index(messages.AbortCollectives) < sent.index(messages.ExitsChecked)


def test_who_asks_while_hosts_look_is_answered_by_their_next_look_together_with_others() -> None:
    world = World()
    first = ask(world, 0)
    assert ask(world, 1) == []
    assert ask(world, 2) == []
    then = answer(world, first)
    assert answered(then) == [((0,), 1)]
    assert answered(answer(world, then)) == [((1,), 1), ((2,), 1)]
