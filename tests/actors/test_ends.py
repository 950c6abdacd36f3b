"""How an actor ends: by a failure of its own, while its `__init__` runs, and what its `__del__` does then."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshbook.actors.base import Actor, endpoint
from meshbook.actors.procs import ProcMesh, this_host, this_proc
from meshbook.actors.runtime import construction, runner
from meshbook.actors.runtime.context import context, current_rank
from meshbook.actors.runtime.faults import ActorError, ActorStopped, MeshFailure, SupervisionError
from tests.actors.example_actors import Counter
from tests.budget import WAIT_S, when
from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_processes")

begun, released = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    """Ends what the actors of a test wait for."""
    begun.clear()
    released.clear()
    yield
    released.set()


class Failing(Actor):
    def __init__(self, path: str = "") -> None:
        self.path = path
        self.port: Any = None

    @endpoint(explicit_response_port=True)
    def answer(self, port: Any, only: int | None = None) -> None:
        if only in (None, current_rank().rank):
            raise ValueError("no answer")
        port.send("answer")

    @endpoint(explicit_response_port=True)
    def spin(self, port: Any) -> None:
        begun.set()
        while not released.is_set():
            pass

    @endpoint(explicit_response_port=True)
    def keep(self, port: Any) -> None:
        self.port = port

    @endpoint(explicit_response_port=True)
    def drop(self, port: Any) -> None:
        pass

    @endpoint(explicit_response_port=True)
    def pass_on(self, port: Any, other: Any) -> None:
        other.answer_to.broadcast(port)

    @endpoint
    def answer_to(self, port: Any) -> None:
        port.send("answered by another")

    @endpoint
    def answer_kept(self) -> None:
        self.port.send("answered later")

    @endpoint
    def leave(self) -> None:
        sys.exit("left")

    @endpoint
    def abort(self) -> None:
        context().actor_instance.abort("gave up")

    @endpoint
    def hold(self) -> None:
        released.wait(WAIT_S)

    @endpoint
    def fine(self) -> str:
        return "fine"

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.path:
            Path(f"{self.path}.{current_rank().rank}").write_text(repr(exc))


class AsyncFailing(Failing):
    @endpoint(explicit_response_port=True)
    async def answer_later(self, port: Any) -> None:
        raise ValueError("no answer")

    @endpoint
    async def leave_later(self) -> None:
        sys.exit("left")


class Owner(Actor):
    """Its `__supervise__` handles what it hears."""

    def __init__(self, procs: ProcMesh) -> None:
        self.failures: list[tuple[str, tuple[int, ...]]] = []
        self.staff = procs.spawn("staff", Failing)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append((str(failure), failure.ranks))
        return True

    @endpoint
    def ask(self, only: int) -> str:
        try:
            return str(self.staff.answer.call(only).get(WAIT_S))
        except SupervisionError as error:
            return f"SupervisionError: {error.message}"

    @endpoint
    def heard(self) -> list[tuple[str, tuple[int, ...]]]:
        return self.failures


def test_what_an_endpoint_with_an_explicit_port_raises_ends_its_actor_and_slices_without_it_work(
    procs: ProcMesh, unhandled: list[MeshFailure], tmp_path: Path
) -> None:
    mesh = procs.spawn("explicit", Failing, str(tmp_path / "cleaned"))
    with pytest.raises(
        SupervisionError, match=r"explicit.answer failed, and its actor has ended: ValueError"
    ) as caught:
        mesh.answer.call(2).get(WAIT_S)
    assert caught.value.ranks == (2,)
    assert "raise ValueError" in caught.value.traceback
    for part in (mesh, mesh.slice(gpus=slice(1, 3)), mesh.slice(gpus=2)):
        with pytest.raises(ActorStopped, match=r"explicit.answer {'gpus': 2/3} failed") as stopped:
            part.fine.call().get(WAIT_S)
        assert isinstance(stopped.value, RuntimeError)  # as Monarch's
    assert list(mesh.slice(gpus=slice(0, 2)).fine.call().get(WAIT_S).values()) == ["fine", "fine"]
    when(lambda: unhandled, "the failure at its owner")
    assert [failure.ranks for failure in unhandled] == [(2,)]
    when(lambda: (tmp_path / "cleaned.2").exists(), "its clean-up")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"cleaned.2": "ValueError('no answer')"}
    assert procs.spawn("explicit again", Failing).fine.call().get(WAIT_S)
    mesh.stop().get(WAIT_S)


def test_ranks_that_fail_alike_are_one_error(procs: ProcMesh, unhandled: list[MeshFailure]) -> None:
    mesh = procs.spawn("alike", Failing)
    with pytest.raises(SupervisionError) as caught:
        mesh.answer.call().get(WAIT_S)
    assert caught.value.ranks == (0, 1, 2)
    when(lambda: len(unhandled) == 3, "the failures at their owner")
    assert sorted(failure.ranks for failure in unhandled) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("Class", "method"), [(Failing, "leave"), (AsyncFailing, "leave"), (AsyncFailing, "leave_later")]
)
def test_an_endpoint_that_exits_ends_its_actor(Class: type, method: str, unhandled: list[MeshFailure]) -> None:
    mesh: Any = this_proc().spawn("leaving", Class)
    with pytest.raises(SupervisionError, match=f"leaving.{method} failed, and its actor has ended: SystemExit: left"):
        getattr(mesh, method).call_one().get(WAIT_S)
    with pytest.raises(ActorStopped, match="SystemExit: left"):
        mesh.fine.call_one().get(WAIT_S)
    when(lambda: unhandled, "the failure at its owner")


def test_an_actor_that_has_failed_takes_none_of_the_messages_that_wait(unhandled: list[MeshFailure]) -> None:
    mesh = this_proc().spawn("queue", Failing)
    held, failing, waiting = mesh.hold.call_one(), mesh.abort.call_one(), mesh.fine.call_one()
    released.set()
    held.get(WAIT_S)
    failing.get(WAIT_S)
    with pytest.raises(ActorStopped, match="gave up"):
        waiting.get(WAIT_S)
    when(lambda: unhandled, "the failure at its owner")


def test_an_explicit_port_without_a_receiver_ends_the_actor_too(unhandled: list[MeshFailure]) -> None:
    mesh = this_proc().spawn("unheard", AsyncFailing)
    mesh.answer_later.broadcast()
    when(lambda: unhandled, "the failure at its owner")
    assert "unheard.answer_later failed: ValueError: no answer" in str(unhandled[0])
    with pytest.raises(ActorStopped):
        mesh.fine.call_one().get(WAIT_S)


def test_an_interrupt_ends_no_actor_with_an_explicit_port() -> None:
    mesh = this_proc().spawn("patient", Failing)
    waiting = mesh.spin.call_one()
    assert begun.wait(WAIT_S)
    waiting.interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        waiting.get(WAIT_S)
    assert mesh.fine.call_one().get(WAIT_S) == "fine"
    mesh.stop().get(WAIT_S)


def test_an_owner_that_handles_the_failure_of_a_part_of_its_mesh_lives(
    procs: ProcMesh, unhandled: list[MeshFailure]
) -> None:
    owner = procs.slice(gpus=0).spawn("owner", Owner, procs)
    said = owner.ask.call_one(1).get(WAIT_S)
    assert said == "SupervisionError: staff.answer failed, and its actor has ended: ValueError: no answer"
    when(lambda: owner.heard.call_one().get(WAIT_S), "the failure at its owner")
    ((text, ranks),) = owner.heard.call_one().get(WAIT_S)
    assert (text, ranks) == ("staff.answer {'gpus': 1/3} failed: ValueError: no answer", (1,))
    assert unhandled == []
    owner.stop().get(WAIT_S)


# ---------------------------------------------------------------------------------------------------------------------
# `__init__`


class Unborn(Actor):
    def __init__(self, *, in_python: bool) -> None:
        begun.set()
        while in_python and not released.is_set():
            pass
        released.wait(WAIT_S)

    @endpoint
    def fine(self) -> str:
        return "fine"


@pytest.mark.parametrize(
    ("in_python", "why"),
    [(True, "__init__ failed.*KeyboardInterrupt"), (False, "it was stopped, and its __init__ did not end")],
    ids=["in Python", "in C"],
)
def test_a_stop_does_not_wait_for_an_init_that_does_not_return(
    in_python: bool, why: str, monkeypatch: pytest.MonkeyPatch, unhandled: list[MeshFailure]
) -> None:
    monkeypatch.setattr(construction, "_STOP_GRACE_S", 0.0)
    monkeypatch.setattr(construction, "_GIVE_UP_S", WAIT_S if in_python else 0.0)
    mesh = this_proc().spawn("unborn", Unborn, in_python=in_python)
    assert begun.wait(WAIT_S)
    waiting = mesh.fine.call_one()
    mesh.stop().get(WAIT_S)
    with pytest.raises(SupervisionError, match=why):
        waiting.get(WAIT_S)
    with pytest.raises(ActorStopped):
        mesh.fine.call_one().get(WAIT_S)
    assert unhandled == []


def test_an_init_that_returns_is_left_alone_by_a_stop() -> None:
    counter = this_proc().spawn("soon", Counter)
    answer = counter.add.call_one()
    counter.stop().get(WAIT_S)
    assert answer.get(WAIT_S) == 1


# ---------------------------------------------------------------------------------------------------------------------
# `__del__`


class Deleted(Actor):
    def __init__(self, path: str, what: str = "") -> None:
        self.path, self.what = path, what
        self.itself = self if what == "in a cycle" else None

    def __del__(self) -> None:
        Path(f"{self.path}.{os.getpid()}").touch()
        if self.what == "raises":
            raise ValueError("in __del__")
        if self.what == "waits":
            begun.set()
            released.wait(WAIT_S)


@pytest.mark.usefixtures("starts_meshes")
@pytest.mark.parametrize("what", ["in a cycle", "raises", "alone"])
def test_del_has_run_when_an_actor_or_its_processes_have_stopped(what: str, tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    procs.spawn("stopped", Deleted, str(tmp_path / "stopped"), what).stop().get(WAIT_S)
    assert len(list(tmp_path.glob("stopped.*"))) == 2
    procs.spawn("left", Deleted, str(tmp_path / "left"), what)
    procs.stop().get(WAIT_S)
    assert len(list(tmp_path.glob("left.*"))) == 2


def test_a_stop_does_not_wait_for_a_del_that_does_not_return(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "_DEL_GRACE_S", 0.0)
    mesh = this_proc().spawn("waiting", Deleted, str(tmp_path / "waiting"), "waits")
    mesh.stop().get(WAIT_S)
    assert begun.wait(WAIT_S)


PROGRAM = """
    from meshbook.actor import Actor, this_proc

    class Here(Actor):
        def __cleanup__(self, exc):
            print("cleaned up")

        def __del__(self):
            print("deleted")

    here = this_proc().spawn("here", Here)
"""


def test_actors_in_a_programs_own_process_end_with_it() -> None:
    done = run_python(PROGRAM)
    assert done.stdout == "cleaned up\ndeleted\n", done.stderr


@pytest.mark.parametrize("Class", [Failing, AsyncFailing])
def test_who_waits_for_a_port_that_an_actor_kept_learns_that_the_actor_has_ended(Class: type) -> None:
    mesh: Any = this_proc().spawn("keeper", Class)
    waiting, answered = mesh.keep.call_one(), mesh.keep.call_one()
    mesh.answer_kept.call_one().get(WAIT_S)
    assert answered.get(WAIT_S) == "answered later"
    kept = mesh.keep.call_one()
    mesh.stop("enough").get(WAIT_S)
    for unanswered in (waiting, kept):
        with pytest.raises(SupervisionError, match=r"keeper.keep (kept|dropped) the port of this call"):
            unanswered.get(WAIT_S)


def test_each_rank_of_a_mesh_says_so_of_its_port(procs: ProcMesh) -> None:
    mesh = procs.spawn("keepers", Failing)
    kept = mesh.keep.call()
    mesh.fine.call().get(WAIT_S)
    mesh.stop("enough").get(WAIT_S)
    with pytest.raises(SupervisionError, match=r"keepers.keep kept .*, and its actor has ended .*enough") as caught:
        kept.get(WAIT_S)
    assert caught.value.ranks == (0, 1, 2)


def test_a_port_that_is_dropped_without_an_answer_is_an_error_and_one_that_is_passed_on_is_not(procs: ProcMesh) -> None:
    first, other = procs.spawn("first", Failing), procs.spawn("other", Failing)
    with pytest.raises(SupervisionError, match=r"first.drop dropped the port of this call without an answer"):
        first.slice(gpus=0).drop.call_one().get(WAIT_S)
    answer = first.slice(gpus=0).pass_on.call_one(other.slice(gpus=1))
    assert answer.get(WAIT_S) == "answered by another"
    for mesh in (first, other):
        mesh.stop().get(WAIT_S)
