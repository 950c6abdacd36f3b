"""Calls: the verbs, order, arguments and results, ports, context, actors that call actors."""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from meshbook.actors import replies
from meshbook.actors.base import Actor, endpoint
from meshbook.actors.mesh import as_endpoint, send
from meshbook.actors.procs import ProcMesh, this_proc
from meshbook.actors.runtime.context import context, current_actor_name
from meshbook.actors.runtime.faults import ActorError, ActorStopped, SupervisionError
from meshbook.actors.runtime.futures import as_completed
from meshbook.actors.runtime.ports import Channel
from meshbook.actors.shape import Point
from meshbook.actors.values import Accumulator
from meshbook.errors import MeshTimeout, TransferError
from tests.actors.example_actors import CleanupActor, Counter, Gate, SpawningActor, open_gate
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture(scope="module")
def counters(procs: ProcMesh) -> Any:
    return procs.spawn("counters", Counter, 10)


def test_each_verb_gives_what_its_name_says(counters: Any) -> None:
    called = counters.echo.call(1, key="two").get(WAIT_S)
    assert dict(called.items()) == {Point(rank, counters.extent): ((1,), {"key": "two"}) for rank in range(3)}
    assert called.item(gpus=2) == called[2] == ((1,), {"key": "two"})
    assert counters.slice(gpus=1).where.call_one().get(WAIT_S)[2] == {"gpus": 1}
    assert {counters.where.choose().get(WAIT_S)[0], counters.later.choose().get(WAIT_S)} <= {0, 1, 2}
    assert sorted(future.get(WAIT_S)[0] for future in counters.where.stream()) == [0, 1, 2]
    assert Accumulator(counters.add, 0, operator.add).accumulate(0).get(WAIT_S) == 30


def test_messages_of_one_sender_arrive_in_the_order_sent(counters: Any) -> None:
    for number in range(500):
        counters.note.broadcast(number)
    assert all(notes == list(range(500)) for notes in counters.notes.call().get(WAIT_S).values())


def test_a_message_knows_its_place_in_the_mesh_that_was_called(counters: Any, procs: ProcMesh) -> None:
    part = counters.slice(gpus=slice(1, 3)).rename(gpus="tp")
    assert [found[:3] for found in part.where.call().get(WAIT_S).values()] == [
        (0, {"tp": 2}, {"gpus": 1}),
        (1, {"tp": 2}, {"gpus": 2}),
    ]
    assert part.sizes == {"tp": 2}
    assert [line.split()[0] for line in procs.to_table().splitlines()] == ["place", "gpus=0", "gpus=1", "gpus=2"]
    assert part.flatten("x").extent == {"x": 2}
    assert counters.split(gpus=("a", "b"), b=3).sizes == {"a": 1, "b": 3}


def test_large_arrays_and_bytes_arrive_whole_and_their_memory_comes_back(counters: Any) -> None:
    from meshbook.actors.runtime.transport import local_transport

    array, raw = numpy.arange(1 << 18), bytes(range(256)) * 4096
    for answer in counters.echo.call(array, raw=raw).get(WAIT_S).values():
        (found,), named = answer
        assert numpy.array_equal(found, array)
        assert named == {"raw": raw}
    del answer, found, named
    counters.add.call(0).get(WAIT_S)  # what has been let go of is told before the next message
    pool = local_transport().payloads.pool
    when(lambda: pool.used_bytes == 0)


def test_an_exception_comes_back_with_its_traceback_and_ranks_and_the_actor_lives(
    counters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_GATHER_FAILURES_S", WAIT_S)  # for all three of them, however busy the machine
    with pytest.raises(ActorError) as caught:
        counters.fail.call("missing").get(WAIT_S)
    assert caught.value.ranks == (0, 1, 2)
    assert isinstance(caught.value.exception, KeyError)
    assert "counters.fail failed" in str(caught.value)
    assert "raise KeyError(text)" in str(caught.value)
    with pytest.raises(ActorError) as caught:
        counters.fail.call(only=2).get(WAIT_S)
    assert caught.value.ranks == (2,)
    assert len(counters.add.call(0).get(WAIT_S)) == 3


def test_what_cannot_be_called_says_why_before_anything_is_sent(counters: Any, procs: ProcMesh) -> None:
    with pytest.raises(AttributeError, match=r"has no endpoint 'adds'; did you mean add\?"):
        _ = counters.adds
    with pytest.raises(AttributeError, match=r"Counter.plain is not an endpoint.*@endpoint"):
        _ = counters.plain.call
    with pytest.raises(TypeError, match=r"counters.add\(self, by.*too many positional"):
        counters.add.call(1, 2, 3)
    with pytest.raises(TypeError, match=r"counters.add.call\(…\)"):
        counters.add(1)
    with pytest.raises(TypeError, match=r"'counters' is a mesh of actors; one of them: .slice\(\w+=0\)"):
        counters[0]
    with pytest.raises(TypeError, match="'counters' is a mesh of actors"):
        list(counters)
    with pytest.raises(ValueError, match="mesh of one actor, and 'counters' has 3"):
        counters.add.call_one()
    with pytest.raises(TransferError, match=r"args\[0\]\['lock'\].*lock"):
        counters.note.call({"lock": threading.Lock()})
    with pytest.raises(ValueError, match="an actor named 'counters' lives in this process already"):
        procs.spawn("counters", Counter)
    with pytest.raises(TypeError, match="not a class of actors"):
        procs.spawn("numbers", int)
    with pytest.raises(ActorError, match="lock"):
        counters.lock.call().get(WAIT_S)


def test_a_timeout_does_not_use_the_future_up(counters: Any) -> None:
    future = counters.hold.call()
    with pytest.raises(MeshTimeout, match=r"counters.hold was not answered within 0.01 s"):
        future.get(timeout=0.01)
    counters._apply_concurrently(open_gate).get(WAIT_S)
    assert list(future.get(WAIT_S).values()) == [None] * 3


def test_futures_are_awaited_and_come_as_completed(counters: Any) -> None:
    async def both() -> Any:
        first, second = await asyncio.gather(counters.add.call(0), counters.where.call())
        return first, second, await counters.add.call(0).as_asyncio()

    assert [len(found) for found in asyncio.run(both())] == [3, 3, 3]
    slow, fast = counters.slice(gpus=0).hold.call(), counters.slice(gpus=1).add.call(0)
    done = as_completed([slow, fast], timeout=WAIT_S)
    assert next(done) is fast
    counters.slice(gpus=0)._apply_concurrently(open_gate).get(WAIT_S)
    assert list(done) == [slow]
    assert slow.exception(WAIT_S) is None
    assert isinstance(counters.fail.call().exception(WAIT_S), ActorError)


def test_ports_carry_any_number_of_answers_and_tell_who_sent_them(counters: Any) -> None:
    port, receiver = Channel.open()
    counters.slice(gpus=0).note.call(port).get(WAIT_S)  # a port can be passed on and kept
    send(counters.slice(gpus=2).thrice, ("x",), {}, port)
    assert [receiver.recv().get(WAIT_S) for _ in range(3)] == [(0, "x"), (1, "x"), (2, "x")]
    port, ranked = Channel.open_ranked()
    send(counters.add, (0,), {}, port)
    assert sorted(ranked.recv().get(WAIT_S)[0] for _ in range(3)) == [0, 1, 2]
    assert sorted(counters.later.call().get(WAIT_S).values()) == [0, 1, 2]
    port.exception(ValueError("through the port"))
    with pytest.raises(ValueError, match="through the port"):
        ranked.recv().get(WAIT_S)


def test_sync_actors_have_a_thread_and_async_endpoints_interleave(counters: Any, procs: ProcMesh) -> None:
    assert set(counters.thread.call().get(WAIT_S).values()) == {"actor counters"}
    gates = procs.spawn("gates", Gate)
    waiting = [gates.wait.call(name) for name in "ab"]
    order = gates.let_go.call().get(WAIT_S)
    assert order.get(0)[:2] == ["a waits", "b waits"]
    assert [list(future.get(WAIT_S).values()) for future in waiting] == [["a"] * 3, ["b"] * 3]


def test_actors_call_actors_and_get_their_meshes_as_arguments(counters: Any, procs: ProcMesh) -> None:
    others = procs.spawn("others", Counter, 100)
    assert list(counters.total.call(others).get(WAIT_S).values()) == [300] * 3
    gates = procs.spawn("asking gates", Gate)
    assert gates.slice(gpus=0).ask.call_one(others.slice(gpus=slice(0, 2))).get(WAIT_S) == [100, 100]
    assert "write `await future`" in gates.slice(gpus=0).ask_wrongly.call_one(others).get(WAIT_S)
    assert "call the method itself" in others.slice(gpus=0).ask_self.call_one(others).get(WAIT_S)


def test_an_actor_can_live_beside_the_program_that_spawns_it(procs: ProcMesh) -> None:
    home = this_proc().spawn("at home", Counter, 5)
    assert home.add.call_one().get(WAIT_S) == 6
    away = procs.spawn("away", Counter)
    away.total.call(home).get(WAIT_S)
    home.stop().get(WAIT_S)


def test_a_stopped_actor_has_cleaned_up_and_says_that_it_ended(procs: ProcMesh, tmp_path: Any) -> None:
    tidy = procs.spawn("tidy", CleanupActor, str(tmp_path / "note"))
    assert list(tidy.add.call().get(WAIT_S).values()) == [1, 1, 1]
    tidy.stop("enough").get(WAIT_S)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["1, None"] * 3
    with pytest.raises(ActorStopped, match="the actor 'tidy' has ended: enough"):
        tidy.add.call().get(WAIT_S)
    procs.spawn("tidy", CleanupActor, str(tmp_path / "note")).stop().get(WAIT_S)  # its name is free again


def test_an_exception_in_init_is_every_calls_answer(procs: ProcMesh) -> None:
    broken = procs.spawn("broken", Counter, fail=True)
    with pytest.raises(SupervisionError, match=r"Counter.__init__ failed.*ValueError: no such start"):
        broken.add.call().get(WAIT_S)
    with pytest.raises(SupervisionError, match="no such start"):
        broken.initialized.get(WAIT_S)


def test_an_actor_can_start_processes_and_actors_of_its_own(procs: ProcMesh) -> None:
    founder = procs.slice(gpus=0).spawn("founder", SpawningActor)
    assert founder.found.call_one().get(WAIT_S) == [3, 3, 2]


def _own_processes(actor: Any) -> tuple[str, str, int]:
    instance = context().actor_instance
    return instance.proc_mesh.name, instance.proc.name, os.getpid()


def test_an_actor_knows_its_process_and_the_mesh_that_it_was_spawned_on(procs: ProcMesh, counters: Any) -> None:
    for mesh_name, name, pid in counters._apply(_own_processes).get(WAIT_S).values():
        assert (mesh_name, name) == (procs.name, f"process {pid}")
    assert context().actor_instance.proc.name == context().actor_instance.proc_mesh.name == f"process {os.getpid()}"


def _ids(actor: Any) -> tuple[str, str]:
    return context().actor_instance.actor_id, current_actor_name()


def test_the_id_of_an_actor_is_its_own_and_the_same_in_a_slice(counters: Any) -> None:
    ids = list(counters._apply(_ids).get(WAIT_S).values())
    assert [actor_id for actor_id, _ in ids] == [name for _, name in ids]
    assert len(set(ids)) == len(counters)
    assert counters.slice(gpus=1)._apply(_ids).get(WAIT_S).item() == ids[1]
    assert current_actor_name() == "client"


class Mixed(Actor):
    """Has an endpoint and a hook of each kind."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def plain(self) -> int:
        return threading.get_ident()

    @endpoint
    async def later(self) -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    @endpoint
    def wait_for(self, other: Any) -> Any:
        return other.hold.call_one().get(WAIT_S)

    def __cleanup__(self, exc: Exception | None) -> None:
        Path(self.path).write_text(str(threading.get_ident()))


def test_an_actor_that_mixes_endpoints_runs_all_of_them_and_its_hooks_on_one_thread(
    counters: Any, tmp_path: Path
) -> None:
    mixed = this_proc().spawn("both kinds", Mixed, str(tmp_path / "thread"))
    threads = {mixed.plain.call_one().get(WAIT_S), mixed.later.call_one().get(WAIT_S)}
    with pytest.raises(ActorError, match=r"get\(\) would stop the event loop of Mixed"):
        mixed.wait_for.call_one(counters.slice(gpus=0)).get(WAIT_S)
    counters.slice(gpus=0)._apply_concurrently(open_gate).get(WAIT_S)
    mixed.stop().get(WAIT_S)
    assert threads == {int((tmp_path / "thread").read_text())}


class Unmarked(Actor):
    def twice(self, number: int) -> int:
        return 2 * number


def test_a_method_made_an_endpoint_stays_one_in_a_message(procs: ProcMesh) -> None:
    mesh = this_proc().spawn("unmarked", Unmarked)
    twice = pickle.loads(pickle.dumps(as_endpoint(mesh.twice)))
    assert twice.call_one(2).get(WAIT_S) == 4
    with pytest.raises(ActorError, match="TypeError"):
        twice.call_one().get(WAIT_S)
    mesh.stop().get(WAIT_S)


def test_an_answer_that_nobody_asks_for_is_let_go_of(procs: ProcMesh) -> None:
    founder = procs.slice(gpus=1).spawn("founder", SpawningActor)
    dropped = founder.big.call_one(1 << 20)
    assert founder.held.call_one().get(WAIT_S) > 1 << 20  # it has come, for answers keep their order
    del dropped

    def is_let_go() -> bool:
        gc.collect()
        return founder.held.call_one().get(WAIT_S) == 0  # type: ignore[no-any-return]

    when(is_let_go)
