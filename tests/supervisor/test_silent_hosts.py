"""What clients hear of a host that does not answer and is not lost yet."""

from __future__ import annotations

from typing import Literal

import pytest

from meshbook.wire import messages
from meshbook.wire.stop_timing import HOLD_COMMANDS_S
from tests.supervisor.test_state import World, messages_of


class Silence:
    """Seconds of silence by host, in place of connections."""

    def __init__(self) -> None:
        self.seconds = {1: 4.0}

    def values_go(self, host: int) -> Literal["", "directly", "as messages"]:
        return "as messages"

    def latency_s(self, host: int) -> float | None:
        return None

    def silent_s(self, host: int) -> float:
        return self.seconds.get(host, 0.0)


@pytest.fixture
def world() -> World:
    """A cell that has ended on host 0, and runs on host 1 (ranks 2 and 3), which is silent."""
    world = World(num_hosts=2)
    world.finish("form-1", ranks=(2, 3), host=1)
    world.state.machines.watch = Silence()
    world.run()
    world.finish("c1", ranks=(0, 1), host=0)
    return world


def notices(effects: list[object]) -> list[str]:
    return [
        shown.item.text
        for output in messages_of(effects, messages.CallOutput)  # type: ignore[arg-type]
        for shown in output.items
        if isinstance(shown, messages.RankDisplay) and isinstance(shown.item, messages.Notice)
    ]


def test_the_cell_that_waits_for_a_silent_host_says_so_and_that_it_answers_again(world: World) -> None:
    (text,) = notices(world.state.host_fell_silent(1, 3.6, 15.0, 4.0))
    assert text.startswith("host 1 has not answered for 4 s")
    assert text.endswith("ranks 2-3 count as lost if it does not within 15 s")
    (text,) = notices(world.state.host_answered(1, 6.1, 7.0))
    assert text == "host 1 answers again, after 6 s; nothing is lost"
    assert not notices(world.state.host_fell_silent(0, 3.6, 15.0, 4.0))  # nothing waits for it


def test_a_stop_does_not_wait_for_a_silent_host(world: World) -> None:
    world.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1"))
    (stuck,) = messages_of(world.state.timer_fired("release c1", HOLD_COMMANDS_S), messages.RanksStuck)
    assert (stuck.call, stuck.ranks) == ("c1", (2, 3))
    assert stuck.reason == "host 1 has not answered for 4 s"


def test_a_host_that_falls_silent_after_a_stop_is_named_to_who_pressed_it(world: World) -> None:
    world.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1"))
    effects = world.state.host_fell_silent(1, 3.6, 15.0, 4.0)
    assert [stuck.ranks for stuck in messages_of(effects, messages.RanksStuck)] == [(2, 3)]


def test_a_stop_waits_for_a_host_that_answers(world: World) -> None:
    world.state.machines.watch.seconds.clear()  # type: ignore[union-attr]
    world.say(messages.Interrupt(ranks=(0, 1, 2, 3), target="c1"))
    assert not messages_of(world.state.timer_fired("release c1", HOLD_COMMANDS_S), messages.RanksStuck)
