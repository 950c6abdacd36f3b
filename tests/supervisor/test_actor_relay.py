"""What processes with actors on two machines say to each other by way of the supervisor: where it goes, who hears of
an end."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import RelayedBytes
from tests.supervisor.test_state import World, messages_of, steps_of


@pytest.fixture
def world() -> World:
    """Ranks 0-1 on host 0, 2-3 on host 1; ranks 0 and 3 and the client have actors."""
    world = World(num_hosts=2)
    world.finish("form-1", host=1, reply={"backend": "gloo"})
    world.host(messages.ActorsOpened("r0", pid=9, rank=0))
    world.host(messages.ActorsOpened("r3", pid=9, rank=3), host=1)
    world.say(messages.ActorsOpened("me", pid=2))
    return world


def piece(source: str, target: str, **content: Any) -> RelayedBytes:
    return RelayedBytes(source, target, f"{source}.1", **{"data": b"x", **content})


def pieces_to_clients(effects: list[s.Effect]) -> list[tuple[str | None, RelayedBytes]]:
    return [
        (one.client, one.message.piece)
        for one in steps_of(effects, s.SendToClient)
        if isinstance(one.message, messages.BytesRelayed)
    ]


def test_a_piece_for_a_rank_goes_to_its_host_and_names_it(world: World) -> None:
    (sent,) = steps_of(world.say(messages.RelayBytes(piece("me", "r3"))), s.SendToHosts)
    assert (sent.hosts, sent.message) == ((1,), messages.RelayBytes(piece("me", "r3"), ranks=(3,)))
    (sent,) = steps_of(world.host(messages.BytesRelayed(piece("r0", "r3"), rank=0)), s.SendToHosts)
    assert (sent.hosts, sent.message) == ((1,), messages.RelayBytes(piece("r0", "r3"), ranks=(3,)))


def test_a_piece_for_a_client_goes_to_that_client(world: World) -> None:
    world.join("two")
    found = pieces_to_clients(world.host(messages.BytesRelayed(piece("r3", "me"), rank=3), host=1))
    assert found == [("one", piece("r3", "me"))]


def test_nobody_speaks_for_another_process(world: World) -> None:
    world.join("two")
    assert world.say(messages.RelayBytes(piece("me", "r3")), client="two") == []
    assert world.say(messages.RelayBytes(piece("r0", "r3"))) == []
    assert world.host(messages.BytesRelayed(piece("r3", "me"), rank=0)) == []


def test_a_piece_for_a_process_that_is_not_here_is_answered_with_an_end(world: World) -> None:
    ((client, end),) = pieces_to_clients(world.say(messages.RelayBytes(piece("me", "elsewhere"))))
    assert (client, end.source, end.target, end.stream) == ("one", "elsewhere", "me", "")
    assert end.ended == "is on another machine, and is neither a rank of this mesh nor a client of it"


def test_those_that_have_spoken_with_a_rank_hear_once_how_it_has_ended(world: World) -> None:
    world.say(messages.RelayBytes(piece("me", "r3")))
    world.host(messages.BytesRelayed(piece("r3", "r0"), rank=3), host=1)
    effects = world.kill(3)
    assert [(one.source, one.ended) for _, one in pieces_to_clients(effects)] == [("r3", "was killed by SIGKILL")]
    (sent,) = messages_of(effects, messages.RelayBytes)
    assert (sent.ranks, sent.piece.source, sent.piece.ended) == ((0,), "r3", "was killed by SIGKILL")
    assert pieces_to_clients(world.kill(3)) == []


def test_who_speaks_to_a_rank_that_has_just_ended_hears_how_it_has(world: World) -> None:
    world.kill(3)  # the first piece for it was on its way
    ((_, end),) = pieces_to_clients(world.say(messages.RelayBytes(piece("me", "r3"))))
    assert end.ended == "was killed by SIGKILL"


def test_a_lost_host_ends_its_processes_with_its_own_words(world: World) -> None:
    world.say(messages.RelayBytes(piece("me", "r3")))
    heartbeat = messages.RankInfo(rank=3, state="idle", host="box", pid=9)
    world.host(messages.HostHeartbeat(1, (heartbeat,)), host=1)
    ((_, end),) = pieces_to_clients(world.state.host_exited(1, "does not answer", world.now))
    assert end.ended == "ended with its host, which does not answer"


def test_ranks_hear_of_a_client_that_leaves_unless_its_process_is_attached_again(world: World) -> None:
    world.say(messages.RelayBytes(piece("me", "r0")))
    world.join("again")
    world.say(messages.ActorsOpened("me", pid=2), client="again")
    assert messages_of(world.state.client_disconnected("one", world.now), messages.RelayBytes) == []
    (sent,) = messages_of(world.state.client_disconnected("again", world.now), messages.RelayBytes)
    assert (sent.ranks, sent.piece.source, sent.piece.ended) == ((0,), "me", "has left the mesh, or has ended")


def test_a_new_process_of_a_rank_is_another_one(world: World) -> None:
    world.kill(3)
    world.host(messages.ActorsOpened("r3b", pid=10, rank=3), host=1)
    ((_, end),) = pieces_to_clients(world.say(messages.RelayBytes(piece("me", "r3"))))
    assert end.ended == "was killed by SIGKILL"
    assert messages_of(world.say(messages.RelayBytes(piece("me", "r3b"))), messages.RelayBytes)[0].ranks == (3,)
