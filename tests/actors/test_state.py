"""What actors hold, seen and changed from a notebook: attributes, tables, cells inside actors, classes defined anew.

One mesh of two processes for all of it. Classes are made by `exec` in a namespace of their own, as cells would."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshbook import actor
from meshbook.actor import Actor, ActorError, ActorMesh, ProcMesh, ValueMesh, current_rank, endpoint, pull, this_host
from meshbook.actors import cells, listing, lookup, redefine
from meshbook.actors.procs import list_actors
from meshbook.errors import MeshNameError, TransferError, ValuesDiffer
from tests.budget import WAIT_S

pytestmark = pytest.mark.usefixtures("starts_meshes")


class Trainer(Actor):
    def __init__(self, lr: float) -> None:
        self.lr, self.step, self.place = lr, 0, current_rank().rank
        self.losses = [3.0, 2.0]
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        self.waits, self.go_on = threading.Event(), threading.Event()

    @endpoint
    def learn(self) -> int:
        self.step += 1
        return self.step

    @endpoint
    def wait(self) -> None:
        self.waits.set()
        self.go_on.wait(WAIT_S)


@pytest.fixture(scope="module")
def procs(run: object) -> Iterator[ProcMesh]:
    procs = this_host().spawn_procs({"gpus": 2})
    yield procs
    actor.shutdown_context().get(WAIT_S)


@pytest.fixture
def trainers(procs: ProcMesh) -> Iterator[ActorMesh[Any]]:
    trainers = procs.spawn("trainers", Trainer, 0.1)
    yield trainers
    trainers.stop().get(WAIT_S)


def test_attributes_read_as_if_local_and_folded_over_ranks(trainers: ActorMesh[Any]) -> None:
    trainers.learn.call().get(WAIT_S)
    assert repr(trainers.state.step) == "1"
    assert repr(trainers.state.place) == "[0] 0\n[1] 1"
    assert trainers.state.step == 1
    assert trainers.state.lr < 0.2
    assert f"{trainers.state.lr:.2f}" == "0.10"
    assert list(trainers.state.losses) == [3.0, 2.0]
    assert len(trainers.state.losses) == 2
    assert repr(trainers.state.losses[-1]) == "2.0"
    assert "(3, 2)" in repr(trainers.state.model[0].weight)
    assert list(pull(trainers.state.place).values()) == [0, 1]
    assert {"step", "lr", "model", "learn"} <= set(dir(trainers.state))
    assert trainers.slice(gpus=1).state.place == 1


def test_what_is_set_is_on_every_rank_and_a_value_mesh_gives_each_its_own(trainers: ActorMesh[Any]) -> None:
    trainers.state.lr = 0.5
    trainers.state.losses[0] = 9.0
    trainers.state.place = ValueMesh(trainers.state.place._meshbook_mesh._axes, ["a", "b"])
    assert list(pull(trainers.state.lr).values()) == [0.5, 0.5]
    assert list(pull(trainers.state.losses[0]).values()) == [9.0, 9.0]
    assert list(pull(trainers.state.place).values()) == ["a", "b"]
    trainers.state.model[0].bias.data = torch.ones(3)
    assert list(trainers.state.model[0].bias.sum().values()) == [3.0, 3.0]


def test_arithmetic_takes_what_all_actors_agree_on(trainers: ActorMesh[Any]) -> None:
    assert (trainers.state.lr * 2, 1 - trainers.state.lr, -trainers.state.lr) == (0.2, 0.9, -0.1)
    trainers.state.step += 3
    assert list(pull(trainers.state.step).values()) == [3, 3]
    assert trainers.state.place < 2
    with pytest.raises(ValuesDiffer, match=r"do not agree on trainers.state.place"):
        trainers.state.place + 1


def test_reading_never_waits_behind_a_long_endpoint(trainers: ActorMesh[Any]) -> None:
    waiting = trainers.wait.call()
    assert trainers.state.step == 0
    trainers._apply_concurrently(lambda actor: actor.go_on.set()).get(WAIT_S)
    waiting.get(WAIT_S)


def test_what_is_not_there_and_what_differs_is_said(trainers: ActorMesh[Any]) -> None:
    with pytest.raises(AttributeError, match=r"trainers.state has no attribute 'stepp' on .*; did you mean step\?"):
        trainers.state.stepp  # noqa: B018  (asking is the test)
    with pytest.raises(AttributeError, match=r"trainers.state.model has no attribute 'fc' on any rank"):
        trainers.state.model.fc  # noqa: B018
    with pytest.raises(LookupError, match=r"trainers.state.losses\[5\] is on no rank: IndexError"):
        trainers.state.losses[5]
    with pytest.raises(ValuesDiffer, match=r"(?s)do not agree on trainers.state.place:\n\[0\] 0\n\[1\] 1\nslice"):
        int(trainers.state.place)
    with pytest.raises(TransferError, match=r"trainers.state.step is in the actors.*pull"):
        trainers._apply(_fail, trainers.state.step)
    assert not hasattr(trainers.state, "_repr_png_")


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_the_table_shows_what_waits_what_runs_and_what_went_wrong(
    procs: ProcMesh, trainers: ActorMesh[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = trainers.slice(gpus=1).wait.call_one()
    behind = [trainers.slice(gpus=1).learn.call_one() for _ in range(3)]
    with pytest.raises(ActorError):
        trainers.slice(gpus=0)._apply(_fail).get(WAIT_S)
    trainers.slice(gpus=1)._apply_concurrently(_until_it_waits).get(WAIT_S)
    monkeypatch.setattr(listing, "list_actors", lambda procs, **_: list_actors(procs, timeout=WAIT_S))
    shown = str(listing.all_actors())
    trainers._apply_concurrently(lambda actor: actor.go_on.set()).get(WAIT_S)
    waiting.get(WAIT_S)
    assert [future.get(WAIT_S) for future in behind] == [1, 2, 3]
    first, second = (line for line in shown.splitlines() if line.startswith("trainers"))
    assert "ValueError: on purpose" in first
    assert "wait for " in second
    assert re.search(r" living +3 ", second)  # in the mailbox


def _until_it_waits(trainer: Any) -> None:
    assert trainer.waits.wait(WAIT_S)


def _fail(trainer: Any, *_: Any) -> None:
    raise ValueError("on purpose")


def test_ranks_that_do_the_same_share_a_line() -> None:
    row = {
        "actor": "a", "id": "a-1", "class": "A", "state": "living", "mailbox": 0, "running": None, "seconds": None,
        "messages": 5, "last_error": None,
    }  # fmt: skip
    rows = [{**row, "rank": 0}, {**row, "rank": 1, "mailbox": 7}, {**row, "rank": 2, "running": "step", "seconds": 2.0}]
    assert str(listing.actor_table("Mesh m", rows)) == (
        "Mesh m: 3 in 1 mesh.\n"
        "actor  class  ranks  state   mailbox  runs            messages\n"
        "a      A      0-1    living  0-7                      5\n"
        "a      A      2      living  0        step for 2.0 s  5"
    )
    assert "no actors" in str(listing.actor_table("Mesh m", []))


# ---------------------------------------------------------------------------------------------------------------------
# Cells in actors


def test_a_cell_runs_in_the_actors_with_self_bound_and_keeps_its_names(trainers: ActorMesh[Any]) -> None:
    found = lookup.find_actors("trainers")
    shown = cells.run_in_actors(found, "double = 2 * self.place\nself.step = 40 + double\nself.step")
    assert repr(shown) == "[0] 40\n[1] 42"
    assert cells.run_in_actors(found, "triple = lambda: double + self.place") is None
    assert repr(cells.run_in_actors(found, "triple()")) == "[0] 0\n[1] 3"
    assert list(trainers.learn.call().get(WAIT_S).values()) == [41, 43]
    with pytest.raises(ActorError, match=r"(?s)<cell \d+ in trainers>.*ZeroDivisionError"):
        cells.run_in_actors(found, "x = 1\nx / self.place")
    with pytest.raises(SyntaxError):
        cells.run_in_actors(found, "x =")
    with pytest.raises(MeshNameError, match=r"no actors are named 'trainer'; did you mean trainers\?"):
        lookup.find_actors("trainer")


def test_a_cell_in_an_actor_with_an_event_loop_may_await(procs: ProcMesh) -> None:
    class Waiter(Actor):
        @endpoint
        async def one(self) -> int:
            return 1

    waiters = procs.spawn("waiters", Waiter)
    shown = cells.run_in_actors(waiters, "import asyncio\nawait asyncio.sleep(0)\nawait self.one() + 1")
    assert repr(shown) == "2"
    waiters.stop().get(WAIT_S)


# ---------------------------------------------------------------------------------------------------------------------
# Classes defined anew

FIRST = """
class Counter(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def add(self, number):
        self.count += number
        return self.count

    @endpoint
    def same(self):
        return "same"

    @endpoint
    def old(self):
        return "old"
"""

SECOND = """
class Counter(Actor):
    def __init__(self):
        self.count = 100

    @endpoint
    def add(self, number, times=1):
        self.count += times * number
        return self.count

    @endpoint
    def same(self):
        return "same"

    @endpoint
    def fresh(self):
        return self.count
"""


def cell(source: str, names: dict[str, Any]) -> None:
    exec(source, names)


def test_running_the_cell_again_gives_live_actors_the_new_methods_and_says_so(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redefine, "_WAIT_S", WAIT_S)
    names: dict[str, Any] = {"__name__": "__main__", "Actor": Actor, "endpoint": endpoint}
    cell(FIRST, names)
    counters = procs.spawn("counters", names["Counter"])
    bystanders = procs.spawn("bystanders", Trainer, 0.1)
    assert list(counters.add.call(2).get(WAIT_S).values()) == [2, 2]
    assert redefine.redefine_from(names) == []
    cell(SECOND, names)
    (said,) = redefine.redefine_from(names)
    assert str(said) == (
        "counters runs the new Counter (changed: add; new: fresh; gone: old); "
        "its __init__ is for actors spawned from now on"
    )
    assert list(counters.add.call(2, times=4).get(WAIT_S).values()) == [10, 10]  # the count is what it was
    assert list(counters.fresh.call().get(WAIT_S).values()) == [10, 10]
    with pytest.raises(AttributeError, match="has no endpoint 'old'"):
        counters.old.call()
    assert redefine.redefine_from(names) == []
    bystanders.stop().get(WAIT_S)
    counters.stop().get(WAIT_S)


def test_messages_sent_before_run_the_old_methods_and_later_ones_the_new(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redefine, "_WAIT_S", 0.1)
    names: dict[str, Any] = {"__name__": "__main__", "Actor": Actor, "endpoint": endpoint}
    cell("import threading\n" + FIRST + "    @endpoint\n    def block(self):\n        self.go_on.wait(30)\n", names)
    counters = procs.slice(gpus=0).spawn("busy", names["Counter"])
    counters._apply(_give_event).get(WAIT_S)
    blocked, before = counters.block.call_one(), counters.add.call_one(1)
    cell(SECOND, names)
    (said,) = actor.redefine(names["Counter"])
    assert said.is_pending
    assert "after what it is running" in str(said)
    after = counters.add.call_one(1, times=5)
    counters._apply_concurrently(lambda counter: counter.go_on.set()).get(WAIT_S)
    blocked.get(WAIT_S)
    assert (before.get(WAIT_S), after.get(WAIT_S)) == (1, 6)
    counters.stop().get(WAIT_S)


def _give_event(counter: Any) -> None:
    counter.go_on = threading.Event()


def test_a_class_that_needs_another_thread_is_refused_with_the_reason(procs: ProcMesh) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "Actor": Actor, "endpoint": endpoint}
    cell(FIRST, names)
    counters = procs.slice(gpus=0).spawn("plain", names["Counter"])
    cell(FIRST.replace("    def", "    async def").replace("async def __init__", "def __init__"), names)
    (said,) = redefine.redefine_from(names)
    assert str(said).startswith("plain keeps the old Counter: its endpoints were plain def")
    assert redefine.redefine_from(names) == []
    assert counters.add.call_one(3).get(WAIT_S) == 3
    counters.stop().get(WAIT_S)


def test_what_cannot_be_pulled_is_named_as_it_was_written(trainers: ActorMesh[Any]) -> None:
    with pytest.raises(TransferError, match=r"^trainers\.state\.waits: .*cannot be pickled"):
        pull(trainers.state.waits)
