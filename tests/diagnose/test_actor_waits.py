"""Who has called whom: circles of actors that wait for each other, from snapshots made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook.diagnose.findings import as_text, explain
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, ActiveEndpoint, Frame, PendingEndpointCall, RankSnapshot
from tests.diagnose import factories

FUTURES = Frame("/env/lib/python3.11/site-packages/meshbook/actors/runtime/futures.py", 140, "get")


def awaits(name: str, endpoint: str, rank: int, call: int = 1, **more: Any) -> PendingEndpointCall:
    more.setdefault("since_s", 12.0)
    return PendingEndpointCall(f"{name}-id", name, endpoint, f"node {rank}", call, **more)


def runs(name: str, endpoint: str, rank: int, *answers: PendingEndpointCall, **more: Any) -> ActiveEndpoint:
    return ActiveEndpoint(f"{name}-id", name, f"node {rank}", endpoint, pending_calls=answers, **more)


def rank(number: int, *endpoints: ActiveEndpoint, **more: Any) -> RankSnapshot:
    """It runs no cell; each of these endpoints is at a line of its own, in `get()` if it awaits something."""
    stacks = tuple(
        factories.thread(
            f"{ACTOR_THREAD_PREFIX}{seen.name}",
            *factories.frames_at(
                10 * number + place, *([FUTURES] if seen.pending_calls else []), function=seen.endpoint
            ),
            state="S" if seen.pending_calls else "R",
        )
        for place, seen in enumerate(endpoints, 1)
        if not seen.is_async
    )
    settings: dict[str, Any] = {"call": None, "cell": None, "file": None, "running_s": None, "stacks": stacks}
    return factories.running_rank(number, endpoints=endpoints, **(settings | more))


@pytest.mark.usefixtures("starts_processes")
def test_two_actors_that_call_each_other_are_told_with_the_whole_chain_and_its_lines() -> None:
    (found,) = explain(
        [
            rank(0, runs("asker", "ask", 0, awaits("answerer", "answer", 1))),
            rank(1, runs("answerer", "answer", 1, awaits("asker", "ping", 0))),
        ]
    )
    assert (found.kind, found.ranks, found.sure) == ("actor-deadlock", (0, 1), True)
    text = as_text([found])
    assert "Actors asker (rank 0) and answerer (rank 1) wait for each other: asker.ask (" in text
    assert "line 1 in ask) → answerer.answer (" in text
    assert "line 11 in answer) → asker.ping, for which asker has no time while it is in ask" in text
    assert "rank 1: answerer, in answer at" in text
    assert "waits for asker.ping on rank 0" in text
    assert "kill" not in text
    assert "interrupt(actors), interrupts the endpoint; the actor lives" in text


def test_a_ring_of_three_names_those_who_wait_behind_it() -> None:
    (found,) = explain(
        [
            rank(0, runs("a", "go", 0, awaits("b", "go", 1))),
            rank(1, runs("b", "go", 1, awaits("c", "go", 2))),
            rank(2, runs("c", "go", 2, awaits("a", "done", 0))),
            rank(3, runs("outside", "ask", 3, awaits("b", "go", 1, call=7))),
        ]
    )
    assert (found.ranks, found.others) == ((0, 1, 2), (3,))
    assert "Actors a (rank 0), b (rank 1) and c (rank 2) wait for each other" in found.title
    assert any("outside, in ask" in line for line in found.evidence)


def test_actors_of_one_rank_and_an_actor_that_calls_itself_are_circles_too() -> None:
    (one_rank,) = explain(
        [rank(0, runs("a", "go", 0, awaits("b", "go", 0)), runs("b", "go", 0, awaits("a", "done", 0)))]
    )
    assert (one_rank.kind, one_rank.ranks) == ("actor-deadlock", (0,))
    (itself,) = explain([rank(0, runs("a", "go", 0, awaits("a", "done", 0)))])
    assert "Actors of a (rank 0) wait for themselves: a.go (" in itself.title


def test_one_of_several_actors_that_are_called_at_once_closes_the_circle() -> None:
    (found,) = explain(
        [
            rank(0, runs("a", "go", 0, awaits("b", "go", 1), awaits("b", "go", 2))),
            rank(1, runs("b", "go", 1)),
            rank(2, runs("b", "go", 2, awaits("a", "done", 0))),
        ]
    )
    assert found.ranks == (0, 2)


def test_a_mesh_that_calls_the_same_actor_of_another_rank_is_no_circle() -> None:
    found = explain([rank(0, runs("a", "go", 0, awaits("a", "go", 1))), rank(1, runs("a", "go", 1))])
    assert "actor-deadlock" not in {one.kind for one in found}


def test_an_async_actor_takes_the_call_back_so_only_the_endpoint_that_was_called_counts() -> None:
    """asker.ask awaits answerer.answer, which awaits asker.ping: that runs, beside `ask`."""
    ask = runs("asker", "ask", 0, awaits("answerer", "answer", 1), is_async=True, caller="cell", call=1)
    ping = runs("asker", "ping", 0, is_async=True, caller="node 1", call=5)
    answer = runs("answerer", "answer", 1, awaits("asker", "ping", 0, call=5))
    found = explain([rank(0, ask, ping), rank(1, answer)])
    assert "actor-deadlock" not in {one.kind for one in found}
    # ... and if that one awaits who waits for it, it is one.
    ping = runs(
        "asker", "ping", 0, awaits("answerer", "more", 1, call=9), is_async=True, caller="node 1", call=5,
        frames=factories.frames_at(33, function="ping"),
    )  # fmt: skip
    (found_now,) = explain([rank(0, ask, ping), rank(1, answer)])
    assert found_now.kind == "actor-deadlock"
    assert "asker.ping (" in found_now.title
    assert "line 33 in ping" in found_now.title


def test_what_was_called_a_moment_ago_needs_a_second_look() -> None:
    looks = [
        rank(0, runs("a", "go", 0, awaits("b", "go", 1, since_s=0.1))),
        rank(1, runs("b", "go", 1, awaits("a", "done", 0, since_s=0.1))),
    ]
    assert [one.sure for one in explain(looks)] == [False]
    assert [one.sure for one in explain(looks, earlier=looks)] == [True]


def test_an_endpoint_that_waits_for_one_that_works_is_not_blamed() -> None:
    busy = factories.thread(
        f"{ACTOR_THREAD_PREFIX}worker", *factories.frames_at(7, function="work"), is_active=True, state="R"
    )
    found = explain(
        [
            rank(0, runs("asker", "ask", 0, awaits("worker", "work", 1))),
            rank(1, runs("worker", "work", 1), stacks=(busy,)),
        ]
    )
    assert {one.kind for one in found} == {"slow"}
    assert 0 not in found[0].ranks


def test_an_answer_from_outside_the_mesh_is_told_as_what_the_rank_waits_for() -> None:
    (found,) = explain([rank(0, runs("asker", "ask", 0, awaits("stranger", "answer", 9)))])
    assert found.kind == "waits-for-actor"
    assert any("waits for stranger.answer" in line for line in found.evidence)
