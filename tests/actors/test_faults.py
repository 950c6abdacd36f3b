"""What happens when an actor's process dies: who is told, how soon, and what goes on working. The faults are real."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meshbook.actors.procs import ProcMesh, this_host
from meshbook.actors.runtime import exit_reasons
from meshbook.actors.runtime import registry as lives
from meshbook.actors.runtime.faults import ActorStopped, MeshFailure, SupervisionError
from meshbook.actors.runtime.transport import local_transport
from tests.actors.example_actors import Counter, Gate, ParentActor, SpawningActor
from tests.budget import WAIT_S, when
from tests.scripts import run_python
from tests.standstill import stopped

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture
def doomed() -> Iterator[ProcMesh]:
    """Processes of a test's own, to be killed."""
    started = this_host().spawn_procs({"gpus": 3}, name="doomed")
    yield started
    started.stop().get(WAIT_S)


def _pids(mesh: Any) -> list[int]:
    return [found[3] for found in mesh.where.call().get(WAIT_S).values()]


def test_a_dead_process_fails_every_open_call_on_it_at_once_and_slices_without_it_work(
    doomed: ProcMesh, procs: ProcMesh, unhandled: list[MeshFailure]
) -> None:
    counters = doomed.spawn("counters", Counter)
    callers = procs.spawn("callers", Gate)
    pids = _pids(counters)
    from_here = counters.sleep.call(60)
    streamed = list(counters.slice(gpus=2).sleep.stream(60))
    from_actor = callers.slice(gpus=0).call_lost.call_one(counters)
    when(lambda: _has_called(callers))
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(SupervisionError, match=r"rank 2 of 'counters' is lost.*SIGKILL.*a slice without it") as caught:
        from_here.get(WAIT_S)
    assert caught.value.endpoint == "counters.sleep"
    with pytest.raises(SupervisionError, match="is lost"):
        streamed[0].get(WAIT_S)
    said = from_actor.get(WAIT_S)
    assert "SupervisionError: counters.sleep: rank 2" in said
    assert "was killed by SIGKILL" in said
    with pytest.raises(SupervisionError, match="is lost"):  # a call that begins afterwards
        counters.add.call().get(WAIT_S)
    more = doomed.slice(gpus=slice(0, 2)).spawn("more", Counter)
    assert list(more.add.call().get(WAIT_S).values()) == [1, 1]
    when(lambda: unhandled)
    assert unhandled[0].ranks == (2,)
    assert "SIGKILL" in str(unhandled[0])


def test_callers_and_owners_hear_how_a_process_has_ended_however_late_its_supervisor_says_so(
    doomed: ProcMesh, unhandled: list[MeshFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (exit_reasons, lives):
        monkeypatch.setattr(module, "REASON_TIMEOUT_S", 1e6)
    reasons, asked = local_transport().exit_reasons, threading.Semaphore(0)
    monkeypatch.setattr(reasons, "ask_after_s", 0.0)
    ask: Any = reasons.ask

    def note_and_ask(node: str, then: Any) -> None:
        ask(node, then)
        asked.release()

    monkeypatch.setattr(reasons, "ask", note_and_ask)
    counters = doomed.spawn("counters", Counter)
    pids = _pids(counters)
    waiting = counters.sleep.call(60)
    errors: list[BaseException | None] = []
    caller = threading.Thread(target=lambda: errors.append(waiting.exception(WAIT_S)))
    with stopped(doomed._backend.mesh().session.info.supervisor_pid):  # type: ignore[attr-defined]
        caller.start()
        for pid in pids:  # all of them: nobody has to end the call on the others
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):  # the caller, and the owner of the mesh
            assert asked.acquire(timeout=WAIT_S)
        assert (errors, unhandled) == ([], [])
    caller.join(WAIT_S)
    assert "was killed by SIGKILL" in str(errors[0])
    when(lambda: unhandled)
    assert "was killed by SIGKILL" in str(unhandled[0])


def test_a_caller_whose_connection_breaks_while_the_process_runs_waits_for_no_reason(
    doomed: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_reasons, "REASON_TIMEOUT_S", 1e6)
    (address, *_) = doomed.spawn("counters", Counter)._ref.addresses
    assert local_transport().exit_reasons.describe(address, wait=True).endswith(") has ended")


def _has_called(callers: Any) -> bool:
    running = callers.slice(gpus=0)._apply_concurrently(_running).get(WAIT_S)
    return "call_lost" in running.get(0)


def _running(actor: Any) -> list[str]:
    return [method for row in lives.local_registry().status_rows() for method in [row["running"]] if method]


def test_what_an_owner_does_not_handle_goes_to_its_owner(
    doomed: ProcMesh, procs: ProcMesh, unhandled: list[MeshFailure]
) -> None:
    boss = procs.slice(gpus=0).spawn("lax boss", ParentActor, doomed, False)
    boss.lose.call_one(0).get(WAIT_S)
    when(lambda: unhandled)
    assert unhandled[0].mesh_name == "staff"
    assert unhandled[0].ranks == (0,)
    assert boss.news.call_one().get(WAIT_S)  # it was asked first, and lives
    boss.stop().get(WAIT_S)


def test_a_failed_broadcast_is_heard_by_the_owner(procs: ProcMesh, unhandled: list[MeshFailure]) -> None:
    counters = procs.slice(gpus=1).spawn("unheard", Counter)
    counters.fail.broadcast("nobody waits")
    when(lambda: unhandled)
    assert "unheard.fail" in str(unhandled[0])
    assert "nobody waits" in unhandled[0].report()
    assert counters.add.call_one().get(WAIT_S) == 1


def test_stopped_processes_are_no_failure(unhandled: list[MeshFailure]) -> None:
    started = this_host().spawn_procs({"gpus": 2})
    counters = started.spawn("counters", Counter)
    waiting = counters.sleep.call(60)
    started.stop().get(WAIT_S)
    with pytest.raises(SupervisionError):
        waiting.get(WAIT_S)
    with pytest.raises(ActorStopped, match="the processes of 'counters' were stopped"):
        counters.add.call().get(WAIT_S)
    assert unhandled == []


SCRIPT = """
    import sys, threading, time
    from meshbook.actors import procs
    from meshbook.actors.runtime import futures
    from tests.actors.example_actors import Counter

    started = procs.this_host().spawn_procs({"gpus": 2})
    counters = started.spawn("counters", Counter)
    counters.add.call().get(20)

    def kill_beside() -> None:
        while "elsewhere" in sys.argv and threading.main_thread().ident not in futures._waiting_threads:
            time.sleep(0.01)
        counters.die.broadcast(1)

    threading.Thread(target=kill_beside).start()
    try:
        if "elsewhere" in sys.argv:
            counters.slice(gpus=0).sleep.call(60).get(40)
        else:
            time.sleep(40)
    except BaseException as error:
        print("stopped by", type(error).__name__, error)
    print("rank 0 says", counters.slice(gpus=0).add.call_one().get(20) if "elsewhere" not in sys.argv else "")
    started.stop().get(20)
"""


@pytest.mark.parametrize(("where", "by"), [("elsewhere", "SupervisionError rank 1"), ("asleep", "KeyboardInterrupt")])
def test_by_default_a_failure_that_nobody_handles_stops_what_runs(where: str, by: str) -> None:
    done = run_python(SCRIPT, where)
    assert f"stopped by {by}" in done.stdout, done
    assert done.returncode == 0
    assert "is lost: its process" in done.stdout + done.stderr


def test_a_forked_child_does_not_hide_the_end_of_its_parent(doomed: ProcMesh, unhandled: list[MeshFailure]) -> None:
    founder = doomed.slice(gpus=0).spawn("founder", SpawningActor)
    pid, child = founder.fork.call_one().get(WAIT_S)
    try:
        waiting = doomed.slice(gpus=0).spawn("waiting", Counter).sleep.call_one(60)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SupervisionError, match="is lost"):
            waiting.get(WAIT_S)
        os.kill(child, 0)  # and holds what it has inherited
    finally:
        os.kill(child, signal.SIGKILL)
