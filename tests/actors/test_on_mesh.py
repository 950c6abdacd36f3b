"""Actors on the ranks of a notebook's mesh: beside cells, with the cells' objects, and what is seen of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshbook
from meshbook.actor import Actor, ActorError, ValueMesh, current_rank, endpoint, pull
from meshbook.actors import proc_backends
from meshbook.actors import procs as meshes
from meshbook.actors.deadlock_watch import DeadlockWatch
from meshbook.actors.mesh_references import MeshReferences
from meshbook.actors.procs import ProcMesh, this_host
from meshbook.actors.runtime.transport import local_transport
from meshbook.actors.state import ActorState
from meshbook.controller.background_output import background_output_of
from meshbook.errors import TransferError
from tests.actors.example_actors import Counter, open_gate, send_sigint_when
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with meshbook.create_mesh({"dp": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def counters(mesh: Any) -> Any:
    return mesh.spawn("counters", Counter, 1)


def test_actors_answer_while_a_cell_runs_and_share_the_rank_with_it(mesh: Any, counters: Any) -> None:
    running = mesh.run("import os, threading; gate = threading.Event(); gate.wait(20); os.getpid()", wait=False)
    assert list(counters.add.call(2).get(WAIT_S).values()) == [3, 3]
    counters._apply(_open_gate).get(WAIT_S)
    pids = [found[3] for found in counters.where.call().get(WAIT_S).values()]
    assert [running.result(WAIT_S).values[rank] for rank in (0, 1)] == pids


def _open_gate(actor: Any) -> None:
    import gc

    def gates() -> list[threading.Event]:
        namespaces = [thing for thing in gc.get_objects() if isinstance(thing, dict) and "rank" in thing]
        return [one["gate"] for one in namespaces if isinstance(one.get("gate"), threading.Event)]

    when(gates, "the cell's gate")
    gates()[0].set()


def test_a_handle_among_the_arguments_arrives_as_the_ranks_own_object(mesh: Any, counters: Any) -> None:
    mesh.run("import torch; mine = torch.ones(3) * rank")
    found = counters.echo.call(mesh["mine"]).get(WAIT_S)
    assert [answer[0][0].tolist() for answer in found.values()] == [[0.0] * 3, [1.0] * 3]


class Holder(Actor):
    """Holds tensors in the places in which models do."""

    def __init__(self, start: torch.Tensor) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        self.w = torch.full((3,), float(current_rank().rank)) + start
        self.ragged = torch.zeros(1 + current_rank().rank)

    @endpoint
    def add(self, number: torch.Tensor) -> list[float]:
        self.w += number
        return self.w.tolist()  # type: ignore[no-any-return]

    @endpoint
    def note(self, number: torch.Tensor) -> None:
        self.w += number


def test_an_actors_tensor_reads_as_a_remote_tensor_of_the_same_storage(mesh: Any) -> None:
    with mesh.activate():
        start = torch.ones(3)
    holders = mesh.spawn("holders", Holder, start)
    del start
    w = holders.state.w
    assert type(w).__name__ == "RemoteTensor"
    assert (w.local(0).tolist(), w.local(1).tolist()) == ([1.0] * 3, [2.0] * 3)
    assert (2 * w).sum().local(1).item() == 12.0
    with torch.no_grad():
        w.mul_(10)  # in the actors' own memory
    assert w.local(0).tolist() == [10.0] * 3  # operations run on the main thread, endpoints elsewhere: wait for them
    assert list(holders.add.call(torch.ones(3)).get(WAIT_S).values()) == [[11.0] * 3, [21.0] * 3]
    assert w.local(1).tolist() == [21.0] * 3
    weight = holders.state.model[0].weight
    assert (tuple(weight.shape), weight.requires_grad) == ((1, 2), True)
    assert [found.shape for found in pull(weight).values()] == [(1, 2), (1, 2)]
    assert isinstance(holders.state.ragged, ActorState)  # differs between ranks, so it is no one tensor
    holders.state.w = ValueMesh(w._meshbook_state._meshbook_mesh._axes, [torch.zeros(3), torch.ones(3)])
    assert holders.state.w.local(1).tolist() == [1.0] * 3
    holders.stop().get(WAIT_S)


def test_a_remote_tensor_among_the_arguments_is_the_ranks_own_and_lives_until_it_has_arrived(mesh: Any) -> None:
    with mesh.activate():
        one = torch.ones(3)
    holders = mesh.spawn("holders", Holder, one)
    blocked = holders._apply(_wait_for_gate)
    for number in range(5):
        holders.note.broadcast(one * number)  # nobody holds these here
    two = holders.add.call(one * 2)
    one.full_tensor()  # frees of earlier tensors have reached the ranks
    holders._apply_concurrently(open_gate).get(WAIT_S)
    blocked.get(WAIT_S)
    assert list(two.get(WAIT_S).values()) == [[13.0] * 3, [14.0] * 3]
    there = mesh.slice(dp=0).spawn("there", Holder, one)
    light = this_host().spawn_procs().spawn("elsewhere", Counter)
    with pytest.raises(TransferError, match=r"lies on the mesh .* not on .*; bring it over"):
        light.echo.call(one)
    assert there.add.call(one).get(WAIT_S).item() == [2.0] * 3
    for actors in (there, holders):
        actors.stop().get(WAIT_S)
    meshes.shutdown_context().get(WAIT_S)


def test_actors_beside_a_tensors_ranks_are_refused_before_anything_is_sent() -> None:
    class Session:
        def _persistent_id(self, thing: Any) -> str:
            return "tensor:part#7"

    class Tensor:
        class engine:
            ranks = (0, 1)

    lend = MeshReferences(Session()).persistent_id_for([1, 2, 3], [])  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=r"lies on ranks 0-1, and actors on ranks 2-3 .*slice of the actors"):
        lend(Tensor())


def _wait_for_gate(actor: Any) -> None:
    actor.gate = threading.Event()
    actor.gate.wait(WAIT_S)


def test_what_endpoints_print_is_folded_and_logging_option_rules_it(
    mesh: Any, counters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def look() -> str:
        said.append(capsys.readouterr().out)
        return "".join(said)

    for number in range(10):  # equal lines are one if they come within a moment, for which a rank may be too busy
        counters.say.call(f"all of us {number}").get(WAIT_S)
        counters.slice(dp=1).say.call(f"me alone {number}").get(WAIT_S)
        when(lambda n=number: f"[1] me alone {n}" in look() and look().count(f"all of us {n}") in (1, 2))
        if f"all of us {number}" in look().splitlines():
            break
    assert f"all of us {number}" in look().splitlines()
    assert f"[1] me alone {number}" in look().splitlines()


def test_stop_ends_the_wait_for_what_cannot_be_interrupted_and_the_actor_lives(mesh: Any, counters: Any) -> None:
    def all_hold() -> bool:
        running = [row["running"] for row in meshes.list_actors(mesh) if row["actor"] == "counters"]
        return running == ["hold", "hold"]

    call = counters.hold.call()
    presses = send_sigint_when(all_hold)
    with pytest.raises(KeyboardInterrupt, match=r"counters.hold on ranks 0-1 was interrupted and goes on: it sleeps"):
        call.get(WAIT_S)
    presses.join()
    counters._apply_concurrently(open_gate).get(WAIT_S)
    counters._apply(_clear_gate).get(WAIT_S)
    assert len(counters.add.call(0).get(WAIT_S)) == 2


def _clear_gate(actor: Any) -> None:
    actor.gate.clear()


def test_rows_say_what_each_actor_does(mesh: Any, counters: Any) -> None:
    busy = counters.slice(dp=0).hold.call()
    counters.slice(dp=0).note.broadcast("waits")
    counters.slice(dp=1).add.call(0).get(WAIT_S)

    def rows() -> list[dict[str, Any]]:
        return [row for row in meshes.list_actors(mesh, timeout=WAIT_S) if row["actor"] == "counters"]

    # one has to take its message up first; the other forgets its own after the reply is sent
    when(lambda: [row["running"] for row in rows()] == ["hold", None] and rows()[0]["mailbox"] == 1)
    assert {(row["class"], row["state"]) for row in rows()} == {("Counter", "living")}
    assert rows()[1]["messages"] > 0
    counters.slice(dp=0)._apply_concurrently(open_gate).get(WAIT_S)
    busy.get(WAIT_S)


def test_meshes_of_different_sizes_live_side_by_side_and_talk(mesh: Any, counters: Any) -> None:
    one: ProcMesh = this_host().spawn_procs()
    three = this_host().spawn_procs({"a": 1, "b": 3})
    try:
        single, grid = one.spawn("single", Counter), three.spawn("grid", Counter)
        assert (single.extent, grid.extent) == ({}, {"a": 1, "b": 3})
        assert single.add.call_one().get(WAIT_S) == 1
        assert single.total.call_one(grid).get(WAIT_S) == 0
        assert list(grid.flatten("x").slice(x=slice(0, 2)).total.call(counters).get(WAIT_S).values())
        assert grid.slice(a=0, b=2).where.call_one().get(WAIT_S)[2] == {"a": 0, "b": 2}
        handed = single.echo.call_one(three, grid.add).get(WAIT_S)[0]  # processes and endpoints are values too
        assert handed[0].spawn("late", Counter, 7).add.call().get(WAIT_S).item(a=0, b=1) == 8
        assert len(handed[1].call(0).get(WAIT_S)) == 3
    finally:
        one.stop().get(WAIT_S)
        three.stop().get(WAIT_S)


# ---------------------------------------------------------------------------------------------------------------------
# Actors that wait for each other


class Ring(Actor):
    """Each calls the next, and the last calls the first."""

    @endpoint
    def go(self, ring: list[Any], place: int = 0) -> str:
        if place == len(ring) - 1:
            return str(ring[0].done.call_one().get())
        return str(ring[place + 1].go.call_one(ring, place + 1).get())

    @endpoint
    def done(self) -> str:
        return "done"


class AsyncRing(Actor):
    @endpoint
    async def go(self, ring: list[Any], place: int = 0) -> str:
        if place == len(ring) - 1:
            return str(await ring[0].done.call_one())
        return str(await ring[place + 1].go.call_one(ring, place + 1))

    @endpoint
    async def done(self) -> str:
        return "done"


def _find_circle(mesh: Any) -> Any:
    when(lambda: mesh.why().findings[0].kind == "actor-deadlock")
    return mesh.why()


@pytest.mark.parametrize("length", [2, 3])
def test_actors_that_wait_for_each_other_are_explained_with_the_chain_and_an_interrupt_ends_it(
    mesh: Any, length: int
) -> None:
    ring = [mesh.slice(dp=place % 2).spawn(f"ring {place}", Ring) for place in range(length)]
    call = ring[0].go.call_one(ring)
    text = _find_circle(mesh).text
    for place in range(length):
        following = f"ring {place + 1}.go" if place < length - 1 else "ring 0.done"
        assert f"waits for {following} on rank {(place + 1) % length % 2}" in text
    assert "actors/test_on_mesh.py, line" in text
    assert "%mesh kill" not in text
    call.interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        call.get(WAIT_S)
    assert ring[0].done.call_one().get(WAIT_S) == "done"
    for actors in ring:
        actors.stop().get(WAIT_S)


def test_async_actors_that_call_each_other_in_a_ring_are_answered(mesh: Any) -> None:
    ring = [mesh.slice(dp=place % 2).spawn(f"async ring {place}", AsyncRing) for place in range(3)]
    assert ring[0].go.call_one(ring).get(WAIT_S) == "done"
    for actors in ring:
        actors.stop().get(WAIT_S)


def test_a_program_that_waits_for_actors_in_a_circle_is_told_unasked(
    mesh: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_transport().replies, "on_added", None)
    monkeypatch.setattr(background_output_of(mesh.session), "enabled", False)  # that is what ranks print
    reported = threading.Event()

    def tell(answer: Any) -> bool:
        if not proc_backends.report_deadlock(answer):
            return False
        reported.set()
        return True

    DeadlockWatch(local_transport(), tell, after_s=0.5)
    ring = [mesh.slice(dp=place).spawn(f"told ring {place}", Ring) for place in range(2)]
    call = ring[0].go.call_one(ring)
    waiter = threading.Thread(target=call.exception)
    waiter.start()
    assert reported.wait(WAIT_S)
    call.interrupt()
    waiter.join(WAIT_S)
    said = capsys.readouterr().err
    assert "[meshbook] told ring 0.go is not answered\nActors told ring 0 (rank 0) and told ring 1 (rank 1)" in said
    for actors in ring:
        actors.stop().get(WAIT_S)
