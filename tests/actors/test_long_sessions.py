"""What a program that goes on for weeks keeps of actors that have come and gone: nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from meshbook.actors import replies
from meshbook.actors.procs import ProcMesh, this_host, this_proc
from meshbook.actors.runtime import registry as lives
from meshbook.actors.runtime.bounded_dict import BoundedDict
from meshbook.actors.runtime.context import context
from meshbook.actors.runtime.faults import ActorError, MeshFailure, SupervisionError
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.refs import ProcMeshRef
from meshbook.actors.runtime.transport import local_transport
from meshbook.rank import device
from tests.actors.example_actors import Counter, Gate
from tests.budget import WAIT_S, when

pytestmark = pytest.mark.usefixtures("starts_processes")


@pytest.fixture
def alive() -> Iterator[lives.ActorRegistry]:
    found = lives.local_registry()
    yield found
    found.use_device = lambda: None


def _kept(alive: lives.ActorRegistry) -> tuple[int, int, int]:
    heard = threading.Event()  # what the reading thread is at, and what it has been given to do
    local_transport().reactor.call_soon(heard.set)
    assert heard.wait(WAIT_S)
    return len(alive.owned), len(alive.actors), len(local_transport().replies)


def _stop_itself(actor: Any) -> None:
    context().actor_instance.stop()


def test_actors_that_were_stopped_leave_nothing_where_they_were_spawned(
    alive: lives.ActorRegistry, procs: ProcMesh
) -> None:
    procs.spawn("first", Counter).stop().get(WAIT_S)
    before = _kept(alive)
    for number in range(300):
        counter = (this_proc() if number % 2 else procs).spawn("one of many", Counter)
        counter.add.call().get(WAIT_S)
        if number % 3:
            counter.stop().get(WAIT_S)
        else:
            counter._apply(_stop_itself).get(WAIT_S)
            counter.stop().get(WAIT_S)
    del counter
    gc.collect()
    when(lambda: _kept(alive) == before)


@pytest.mark.usefixtures("starts_meshes")
def test_processes_that_have_ended_leave_nothing_of_their_actors(
    alive: lives.ActorRegistry, unhandled: list[MeshFailure]
) -> None:
    before = _kept(alive)
    stopped, killed = (this_host().spawn_procs({"n": 2}, name=name) for name in ("stopped", "killed"))
    for procs in (stopped, killed):
        counters = procs.spawn("counters", Counter)
        pids = [found[3] for found in counters.where.call().get(WAIT_S).values()]
    stopped.stop().get(WAIT_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        counters.add.call().get(WAIT_S)
    when(lambda: _kept(alive) == before and len(unhandled) == 2)
    killed.stop().get(WAIT_S)


def test_what_is_remembered_of_ended_processes_and_failures_has_an_end() -> None:
    remembered: BoundedDict[int, int] = BoundedDict()
    for number in range(3 * BoundedDict.LIMIT):
        remembered[number] = number
        remembered[0] = number
    assert len(remembered) == BoundedDict.LIMIT
    assert remembered[0] == number
    assert (
        type(replies.reported_failures)
        is type(replies.stopped_procs)
        is type(local_transport().exit_reasons._reason_by_node)
        is BoundedDict
    )
    post = local_transport()
    for _ in range(3 * BoundedDict.LIMIT):
        post._record_lost_node("nobody")
    assert len(post._lost_nodes) == BoundedDict.LIMIT


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def test_all_answers_of_a_call_are_heard_on_one_thread(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an actor in this process, of one in another, and of one that is lost."""
    heard_on: list[str] = []
    real = replies.GatherCollector.on_reply, replies.GatherCollector.on_peer_lost

    def arrived(self: Any, peer: Any, word: Any) -> bool:
        heard_on.append(threading.current_thread().name)
        return real[0](self, peer, word)

    def lost(self: Any, peer: Any, reason: str) -> bool:
        heard_on.append(threading.current_thread().name)
        return real[1](self, peer, reason)

    far = procs.slice(gpus=0)._backend.procs_ref().addresses[0]
    lost_one = far.__class__("nobody", "", 0)
    home = ProcMeshRef("mixed", ("place",), (2,), (local_transport().address, far), None)
    mixed = ProcMesh.from_ref(home).spawn("mixed", Counter)
    monkeypatch.setattr(replies.GatherCollector, "on_reply", arrived)
    monkeypatch.setattr(replies.GatherCollector, "on_peer_lost", lost)
    assert list(mixed.add.call().get(WAIT_S).values()) == [1, 1]
    both = mixed._ref.addresses
    mixed._ref.addresses, mixed._ref._peers = (local_transport().address, lost_one), [None, None]
    with pytest.raises(SupervisionError, match="rank 1 of 'mixed' is lost"):
        mixed.add.call().get(WAIT_S)
    assert len(heard_on) >= 3
    assert set(heard_on) == {"meshbook-post"}
    mixed._ref.addresses, mixed._ref._peers = both, [None, None]
    mixed.stop().get(WAIT_S)


def test_answers_that_come_on_two_threads_at_once_wait_for_each_other() -> None:
    """An actor in this process is switched away from while its answer is being delivered, and another's comes."""
    entered, leave = threading.Event(), threading.Event()
    first, second = (this_proc().spawn(name, Counter) for name in ("slow answer", "other answer"))
    order: list[str] = []

    def slow(_: Future[Any]) -> None:
        order.append("begins")
        entered.set()
        leave.wait(WAIT_S)
        order.append("ends")

    one = first.hold.call_one()
    one.add_done_callback(slow)
    first._apply_concurrently(lambda actor: actor.gate.set())
    assert entered.wait(WAIT_S)
    other = second.add.call_one()
    other.add_done_callback(lambda _: order.append("other"))
    leave.set()
    other.get(WAIT_S)
    assert order == ["begins", "ends", "other"]
    for actor in (first, second):
        actor.stop().get(WAIT_S)


def test_a_call_after_the_end_of_the_process_s_post_fails_at_once() -> None:
    from meshbook.actors.runtime.peer import PeerLost
    from meshbook.actors.runtime.transport import Transport

    post = Transport()
    mine = post.peer(post.address)
    post.close()
    with pytest.raises(PeerLost, match="this process has left"):
        mine.send(b"\0\0\0\0")
    done: list[int] = []
    post.reactor.call_soon(lambda: done.append(1))
    assert done == [1]


class AnyCuda:
    """What `torch.cuda` is to us on a machine with GPUs: a current device for each thread."""

    def __init__(self) -> None:
        self.current = threading.local()

    def set_device(self, device: str) -> None:
        self.current.device = device


def _current_device(actor: Any) -> str:
    return getattr(torch.cuda.current, "device", "cuda:0")  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("Class", [Counter, Gate], ids=["def", "async def"])
def test_every_thread_of_an_actor_has_its_ranks_gpu(
    alive: lives.ActorRegistry, monkeypatch: pytest.MonkeyPatch, Class: type
) -> None:
    monkeypatch.setattr(torch, "cuda", AnyCuda())
    alive.use_device = partial(device.select_device, "cuda:3")
    actor = this_proc().spawn("on a gpu", Class)
    assert actor._apply(_current_device).get(WAIT_S).item() == "cuda:3"
    assert actor._apply_concurrently(_current_device).get(WAIT_S).item() == "cuda:3"
    actor.stop().get(WAIT_S)


def _device_of_rank(actor: Any) -> str:
    (device,) = sys.modules["meshbook.actors.runtime.registry"].local_registry().use_device.args
    return str(device)


def test_a_rank_tells_its_actors_which_device_it_has(procs: ProcMesh) -> None:
    counters = procs.spawn("told", Counter)
    assert list(counters._apply(_device_of_rank).get(WAIT_S).values()) == ["cpu"] * 3
    counters.stop().get(WAIT_S)


def test_a_gpu_that_cannot_be_used_is_an_error_of_the_actor(
    alive: lives.ActorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(AnyCuda):
        def set_device(self, device: str) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "cuda", Broken())
    alive.use_device = partial(device.select_device, "cuda:3")
    actor = this_proc().spawn("without its gpu", Counter)
    with pytest.raises((SupervisionError, ActorError), match="device-side assert"):
        actor.add.call_one().get(WAIT_S)
    actor.stop().get(WAIT_S)
