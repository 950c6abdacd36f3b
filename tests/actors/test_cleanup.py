"""What must not be left over: callers without an answer, messages without a receiver, memory without a reader, and
connections to strangers. Most of it within this process, which is a process with actors like any other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import operator
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import meshbook
from meshbook.actors.base import Actor, endpoint
from meshbook.actors.mesh import interrupt
from meshbook.actors.procs import ProcMesh, this_host, this_proc
from meshbook.actors.runtime import actor_loop, futures, unix_sockets
from meshbook.actors.runtime import registry as lives
from meshbook.actors.runtime import transport as posts
from meshbook.actors.runtime.faults import ActorError, ActorStopped, MeshFailure, SupervisionError
from meshbook.actors.runtime.interrupts import Interruptible
from meshbook.actors.runtime.peer import Peer, PeerLost
from meshbook.actors.runtime.ports import Channel
from meshbook.actors.runtime.transport import Transport, local_transport
from meshbook.actors.state import pull
from meshbook.errors import MeshTimeout
from meshbook.wire import messages
from meshbook.wire.process_control import kill_supervisor
from meshbook.wire.processes import children_of
from tests.actors.example_actors import AsyncCleanupActor, CleanupActor, Counter, Gate, open_gate, send_sigint_when
from tests.budget import WAIT_S, when
from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_processes")

LARGE_BYTES = 1 << 20

started = threading.Event()
begun, unblocked = threading.Event(), threading.Event()


class Late(Actor):
    """Its `__init__` goes on until the test lets it."""

    def __init__(self) -> None:
        started.wait(WAIT_S)
        self.ready = True


class AsyncFounder(Actor):
    @endpoint
    async def found(self) -> int:
        procs = this_host().spawn_procs({"n": 1}, name="founded")
        answer: int = await procs.spawn("settlers", Counter).add.call_one(2)
        await procs.stop()
        return answer


class Untidy(Actor):
    def __cleanup__(self, exc: Exception | None) -> None:
        raise SystemExit("cannot clean up")


class Sender(Actor):
    @endpoint
    def send(self, port: Any, nbytes: int) -> None:
        port.send(bytes(nbytes))


def test_an_async_actor_that_is_stopped_answers_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_loop, "_STOP_GRACE_S", 0.1)
    gate = this_proc().spawn("stopped gate", Gate)
    running = gate.wait.call_one("a")
    stops = [gate.stop("enough"), gate.stop("again")]
    behind = gate.wait.call_one("b")
    for stop in stops:
        stop.get(WAIT_S)
    for waiting in (running, behind):
        with pytest.raises(ActorStopped, match="has ended"):
            waiting.get(WAIT_S)


def test_a_clean_up_that_fails_is_said_and_the_actor_ends(caplog: pytest.LogCaptureFixture) -> None:
    this_proc().spawn("untidy", Untidy).stop().get(WAIT_S)
    assert "__cleanup__ of untidy" in caplog.text
    assert "cannot clean up" in caplog.text


@pytest.mark.usefixtures("starts_meshes")
def test_stopped_processes_end_their_actors_first(tmp_path: Path) -> None:
    """What they were sent before is worked off; what does not end is interrupted in time for `__cleanup__`."""
    mine = this_host().spawn_procs({"gpus": 2}, name="tidy")
    mine.spawn("idle", CleanupActor, str(tmp_path / "idle"))
    tidy = mine.spawn("working", CleanupActor, str(tmp_path / "working"))
    waiting = mine.spawn("waiting", AsyncCleanupActor, str(tmp_path / "waiting"))
    spinning = mine.spawn("spinning", CleanupActor, str(tmp_path / "spinning"))
    for _ in range(100):
        tidy.add.broadcast()
    open_call, stuck = waiting.forever.call(), spinning.spin.call()
    mine.stop().get(WAIT_S)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said == {
        f"{name}.{rank}": f"{100 if name == 'working' else 0}, None"
        for name in ("idle", "working", "waiting", "spinning")
        for rank in (0, 1)
    }
    for call in (open_call, stuck):
        with pytest.raises(ActorError, match=r"stopped|KeyboardInterrupt"):
            call.get(WAIT_S)


@pytest.mark.usefixtures("starts_meshes")
@pytest.mark.parametrize("cell", ["", "import time; time.sleep(20)"], ids=["idle", "beside a cell"])
def test_a_mesh_that_is_stopped_ends_its_actors_first(
    cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with meshbook.create_mesh(2, torch=False) as mesh:
        tidy = mesh.spawn("tidy", CleanupActor, str(tmp_path / "tidy"))
        assert list(tidy.add.call().get(WAIT_S).values()) == [1, 1]
        mesh.run("1")
        if cell:
            mesh.run(cell, wait=False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"tidy.0": "1, None", "tidy.1": "1, None"}
    said = capsys.readouterr().out.splitlines()
    assert said in (["tidied up"], ["[0] tidied up", "[1] tidied up"], ["[1] tidied up", "[0] tidied up"])


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts


def _running() -> list[str]:
    """The endpoints that run in this process."""
    return [row["running"] for row in lives.local_registry().status_rows() if row["running"]]


def _spins() -> bool:
    """Whether a thread is in the loop of a `spin`, and not still before what notes the interrupt."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if inner.f_code.co_name == "spin" and "deadline" in inner.f_locals:
                return True
            inner = inner.f_back
    return False


def test_an_interrupted_call_ends_and_the_others_go_on() -> None:
    counter = this_proc().spawn("interrupted", Counter)
    runs, waits = counter.spin.call_one(), counter.spin.call_one()
    other, last = counter.add.call_one(), counter.notes.call_one()
    when(_spins)
    waits.interrupt()
    runs.interrupt()
    for call, why in ((runs, "KeyboardInterrupt"), (waits, "before it began")):
        with pytest.raises(ActorError, match=why) as caught:
            call.get(WAIT_S)
        assert isinstance(caught.value.exception, KeyboardInterrupt)
    assert other.get(WAIT_S) == 1
    assert last.get(WAIT_S) == ["interrupted"]
    calls = [counter.spin.call_one() for _ in range(3)]
    counter.add.broadcast()
    interrupt(counter)
    for call in calls:
        with pytest.raises(ActorError, match="KeyboardInterrupt"):
            call.get(WAIT_S)
    assert counter.add.call_one().get(WAIT_S) == 2
    counter.stop().get(WAIT_S)


class Endless(Actor):
    def __init__(self) -> None:
        begun.set()
        due = time.monotonic() + WAIT_S
        while time.monotonic() < due:
            pass


INTERRUPTED_AS_IT_WAITED = """
    import sys, threading, time
    from meshbook.actors.runtime import futures
    from meshbook.actors.runtime.interrupts import Interruptible

    tries, waited = [], []
    code = Interruptible(lambda delay, again: tries.append(again))
    futures.raise_in_waiter = lambda thread, error: waited.append(error) is None  # it hears of it there

    def interrupt():
        code.interrupt("it")
        while tries:  # the main thread was still in `start`
            time.sleep(0.001)
            tries.pop()()

    other = threading.Thread(target=interrupt)
    with code.section("it"):
        try:
            other.start()
            other.join(40)
        except KeyboardInterrupt:
            pass
    other.join(40)
    sys.settrace(lambda *event: None)
    print(*map(repr, waited))
"""


def test_a_process_in_which_something_was_interrupted_can_be_debugged() -> None:
    done = run_python(INTERRUPTED_AS_IT_WAITED)
    assert done.stdout == "KeyboardInterrupt()\n", done.stderr


def test_an_endpoint_that_is_interrupted_as_it_takes_a_lock_does_not_keep_it() -> None:
    """The exception would strike in `Handler.acquire`, as soon as that has the lock."""
    handler, begun, ended = logging.Handler(), threading.Event(), threading.Event()
    tries: list[Callable[[], None]] = []
    code = Interruptible(lambda delay, again: tries.append(again))
    handler.emit = lambda record: None  # type: ignore[method-assign]

    def work() -> None:
        with contextlib.suppress(KeyboardInterrupt), code.section("it"):
            handler.handle(logging.makeLogRecord({}))
        with contextlib.suppress(KeyboardInterrupt), code.section("it"):
            begun.set()
            while True:
                pass
        ended.set()

    thread = threading.Thread(target=work, daemon=True)
    with handler.lock:  # type: ignore[union-attr]
        thread.start()
        while sys._current_frames()[thread.ident or 0].f_code is not logging.Handler.acquire.__code__:
            time.sleep(0.001)
        code.interrupt("it")
    assert begun.wait(WAIT_S)
    while tries:
        tries.pop()()
        time.sleep(0.001)
    assert ended.wait(WAIT_S)
    assert handler.lock.acquire(blocking=False)  # type: ignore[union-attr]
    handler.lock.release()  # type: ignore[union-attr]


def test_an_init_that_does_not_end_is_interrupted_too() -> None:
    begun.clear()
    endless = this_proc().spawn("endless", Endless)
    assert begun.wait(WAIT_S)
    interrupt(endless)
    with pytest.raises(SupervisionError, match=r"Endless.__init__ failed.*KeyboardInterrupt"):
        endless.initialized.get(WAIT_S)
    endless.stop().get(WAIT_S)


def test_an_interrupt_reaches_what_the_endpoint_waits_for() -> None:
    first, second = (this_proc().spawn(name, Counter) for name in ("first", "second"))
    call = first.wait_for.call_one(second)
    when(lambda: _spins() and bool(futures._waiting_threads))  # the one spins, and the other waits for it
    call.interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        call.get(WAIT_S)
    assert second.notes.call_one().get(WAIT_S) == ["interrupted"]
    for counter in (first, second):
        counter.stop().get(WAIT_S)


class Shell(Actor):
    def __init__(self) -> None:
        self.thread = 0

    @endpoint
    def run(self, how: str) -> None:
        self.thread = threading.get_native_id()
        if how == "system":
            os.system("sleep 3000")
        elif how == "stubbornly":
            os.system("trap '' INT TERM; sleep 3000")
        else:
            subprocess.run(["sleep", "3000"], check=False, timeout=WAIT_S if how == "run with a timeout" else None)


class AsyncShell(Shell):
    @endpoint
    async def run(self, how: str) -> None:
        self.thread = threading.get_native_id()
        os.system("sleep 3000")


def sleeps(shell: Any) -> list[int]:
    """Return the process that sleeps: os.system's shell, which may not have started it yet, takes SIGINT for it."""
    (thread,) = shell._apply_concurrently(lambda actor: actor.thread).get(WAIT_S).values()
    own = children_of(os.getpid(), thread) if thread else []
    below = [*own, *itertools.chain.from_iterable(map(children_of, own))]
    return [pid for pid in below if psutil.Process(pid).name() == "sleep"]


@pytest.mark.parametrize(
    ("Class", "how"), [(Shell, "system"), (Shell, "run"), (Shell, "run with a timeout"), (AsyncShell, "system")]
)
def test_an_interrupt_reaches_the_process_that_an_endpoint_waits_for_and_no_other_actors(Class: type, how: str) -> None:
    shells = [this_proc().spawn(name, Class) for name in ("interrupted shell", "other shell")]
    calls = [shell.run.call_one(how) for shell in shells]

    when(lambda: all(map(sleeps, shells)), "both sleep")
    other = sleeps(shells[1])
    calls[0].interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        calls[0].get(WAIT_S)
    assert sleeps(shells[1]) == other
    calls[1].interrupt()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        calls[1].get(WAIT_S)
    for shell in shells:
        shell.stop().get(WAIT_S)


def test_a_process_that_ignores_an_interrupt_of_its_endpoint_is_killed_by_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshbook.wire.started_processes.STUCK_AFTER_S", 0.1)
    shell = this_proc().spawn("stubborn shell", Shell)
    call = shell.run.call_one("stubbornly")
    when(lambda: sleeps(shell))

    def interrupted() -> bool:
        call.interrupt()
        return call.done()

    when(interrupted)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        call.get(WAIT_S)
    shell.stop().get(WAIT_S)


def test_async_endpoints_are_cancelled_at_an_await_and_interrupted_between_two() -> None:
    gate = this_proc().spawn("interrupted gate", Gate)
    waits, other = gate.wait.call_one("a"), gate.wait.call_one("b")
    spins = gate.spin.call_one()
    when(_spins)
    waits.interrupt()
    spins.interrupt()
    for call, why in ((spins, "KeyboardInterrupt"), (waits, "CancelledError")):
        with pytest.raises(ActorError, match=why):
            call.get(WAIT_S)
    assert gate.let_go.call_one().get(WAIT_S)
    assert other.get(WAIT_S) == "b"
    gate.stop().get(WAIT_S)


class Blocking(Actor):
    """Has an event loop, and an endpoint that blocks it."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    @endpoint
    def block(self) -> None:
        begun.set()
        unblocked.wait(WAIT_S)

    @endpoint
    async def note(self, number: int) -> list[int]:
        self.noted.append(number)
        return self.noted


def test_calls_that_are_queued_behind_a_blocked_loop_are_interrupted_too() -> None:
    begun.clear()
    unblocked.clear()
    blocking = this_proc().spawn("blocking", Blocking)
    blocking.block.broadcast()
    assert begun.wait(WAIT_S)
    queued = [blocking.note.call_one(number) for number in range(2)]
    interrupt(blocking)
    later = blocking.note.call_one(2)
    _until_all_is_heard()
    unblocked.set()
    for call in queued:
        with pytest.raises(ActorError, match="before it began"):
            call.get(WAIT_S)
    assert later.get(WAIT_S) == [2]
    blocking.stop().get(WAIT_S)


@pytest.mark.parametrize("ends_by_itself", [True, False], ids=["short", "long"])
def test_stop_lets_a_short_endpoint_end_and_interrupts_a_long_one(
    monkeypatch: pytest.MonkeyPatch, ends_by_itself: bool
) -> None:
    monkeypatch.setattr(futures, "_FINISH_GRACE_S", WAIT_S if ends_by_itself else 0.0)
    monkeypatch.setattr(futures, "_INTERRUPT_GRACE_S", WAIT_S)
    counter = this_proc().spawn("stopped", Counter)
    call = counter.hold_or_spin.call_one(ends_by_itself)
    then = (lambda: counter._apply_concurrently(open_gate).get(WAIT_S)) if ends_by_itself else (lambda: None)
    presses = send_sigint_when(lambda: "hold_or_spin" in _running() if ends_by_itself else _spins(), then)
    with pytest.raises(KeyboardInterrupt) as caught:
        call.get(WAIT_S)
    presses.join()
    shown = "\n".join(caught.value._render_traceback_())
    assert "call.get(WAIT_S)" in shown
    assert "futures.py" not in shown
    assert str(caught.value) == ("" if ends_by_itself else "stopped.hold_or_spin on rank 0 was interrupted")
    assert counter.notes.call_one().get(WAIT_S) == ([] if ends_by_itself else ["interrupted"])
    counter.stop().get(WAIT_S)


@pytest.mark.usefixtures("starts_meshes")
def test_an_async_endpoint_may_spawn_on_processes_that_it_has_just_started() -> None:
    founder = this_proc().spawn("async founder", AsyncFounder)
    assert founder.found.call_one().get(WAIT_S) == 2
    founder.stop().get(WAIT_S)


@pytest.mark.parametrize("raises", [lambda _: operator.truediv(1, 0), lambda _: sys.exit(3)], ids=["error", "exit"])
def test_a_callback_that_raises_holds_up_nobody_else(
    caplog: pytest.LogCaptureFixture, raises: Callable[[Any], Any]
) -> None:
    home = this_proc().spawn("called back", Gate)
    future = home.wait.call_one("a")
    future.add_done_callback(raises)
    heard = threading.Event()
    future.add_done_callback(lambda _: heard.set())
    home.let_go.call_one().get(WAIT_S)
    assert heard.wait(WAIT_S)
    assert "a callback of called back.wait failed" in caplog.text
    home.stop().get(WAIT_S)


def test_a_recv_that_was_given_up_takes_no_message_along() -> None:
    port, receiver = Channel.open()
    with pytest.raises(MeshTimeout) as caught:
        receiver.recv().get(timeout=0.01)
    del caught
    port.send("for who asks now")
    assert receiver.recv().get(WAIT_S) == "for who asks now"

    async def polled() -> Any:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receiver.recv(), 0.01)
        kept = receiver.recv()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(kept, 0.01)
        gc.collect()
        port.send("for who has kept it")
        return await asyncio.wait_for(kept, WAIT_S)

    assert asyncio.run(polled()) == "for who has kept it"
    heard: list[Any] = []
    receiver.recv().add_done_callback(lambda future: heard.append(future.get()))
    gc.collect()
    port.send("for a callback")
    _until_all_is_heard()
    assert heard == ["for a callback"]


def _until_all_is_heard() -> None:
    """What this process has sent to itself."""
    heard = threading.Event()
    local_transport().reactor.call_soon(heard.set)
    assert heard.wait(WAIT_S)


def _used_bytes() -> int:
    _until_all_is_heard()
    gc.collect()
    local_transport().release_segments()
    _until_all_is_heard()
    return local_transport().payloads.pool.used_bytes


def test_memory_goes_back_where_nobody_opens_what_has_come() -> None:
    sender = this_proc().spawn("sender", Sender)
    port, receiver = Channel.open()
    sender.send.call_one(port, LARGE_BYTES).get(WAIT_S)
    assert _used_bytes() > LARGE_BYTES
    del receiver
    assert _used_bytes() == 0
    sender.stop().get(WAIT_S)
    broken = this_proc().spawn("broken", Counter, fail=True)
    with pytest.raises(SupervisionError, match="no such start"):
        broken.note.call_one(bytes(LARGE_BYTES)).get(WAIT_S)
    assert _used_bytes() == 0
    broken.stop().get(WAIT_S)


def test_memory_goes_back_where_the_caller_has_gone_before_its_answer_was_packed() -> None:
    near, far = socket.socketpair()
    peer = Peer(near, None, local_transport().reactor)
    far.close()
    peer.close("it has ended")
    plain, payload = local_transport().payloads.pack(bytes(LARGE_BYTES), (peer,))
    assert local_transport().payloads.pool.used_bytes > LARGE_BYTES
    local_transport().reply(peer, messages.ActorReply(1, plain, payload))
    assert local_transport().payloads.pool.used_bytes == 0


def test_a_spawn_that_fails_in_one_process_leaves_nothing_in_the_others(procs: ProcMesh) -> None:
    procs.slice(gpus=1).spawn("taken", Counter)
    with pytest.raises(ValueError, match="an actor named 'taken' lives"):
        procs.spawn("taken", Counter)
    assert procs.slice(gpus=0).spawn("taken", Counter).add.call_one().get(WAIT_S) == 1


def test_a_name_is_free_again_as_soon_as_its_actor_is_told_to_stop(procs: ProcMesh) -> None:
    busy = procs.spawn("handed on", Counter)
    busy.hold.broadcast()
    stopped = busy.stop()
    heir = procs.spawn("handed on", Counter)
    assert heir.add.call().get(WAIT_S).item(gpus=0) == 1
    assert not stopped.done()
    busy._apply_concurrently(open_gate).get(WAIT_S)
    stopped.get(WAIT_S)
    heir.stop().get(WAIT_S)


def test_state_is_read_when_the_actor_is_there() -> None:
    started.clear()
    late = this_proc().spawn("late", Late)
    looked = late._apply_concurrently(operator.attrgetter("ready"))
    assert not looked.done()
    started.set()
    assert looked.get(WAIT_S).item() is True
    late.stop().get(WAIT_S)
    broken = this_proc().spawn("broken again", Counter, fail=True)
    with pytest.raises(SupervisionError, match="no such start"):
        pull(broken.state)
    broken.stop().get(WAIT_S)


@pytest.mark.usefixtures("starts_meshes")
def test_a_mesh_whose_supervisor_and_standby_were_killed_is_a_failure(unhandled: list[MeshFailure]) -> None:
    procs: Any = this_host().spawn_procs({"gpus": 1}, name="headless")
    counters = procs.spawn("headless counters", Counter)
    assert counters.add.call_one().get(WAIT_S) == 1
    kill_supervisor(procs._backend.mesh().session.connection.connection_info.pid)  # and its standby
    when(lambda: unhandled)
    assert unhandled[0].mesh_name == "headless counters"
    (address,) = counters._ref.addresses  # its process may be known to be gone before its supervisor is
    when(lambda: local_transport().exit_reasons.has_mesh_ended(address))
    with pytest.raises(
        SupervisionError, match=r"has ended with its mesh: its supervisor \(pid \d+\) has ended; create"
    ):
        counters.add.call_one().get(WAIT_S)
    procs.stop().get(WAIT_S)


def test_that_memory_ran_out_is_part_of_how_a_process_has_ended() -> None:
    exited = messages.RankExited(0, 7, None, 9, "one", (), None, oom_killed=True)
    assert exited.description_with_reason == "was killed by SIGKILL because the host ran out of memory"


# ---------------------------------------------------------------------------------------------------------------------
# Strangers


def test_nobody_else_sends_on_a_connection_before_it_has_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Transport()
    known = []
    real = posts.encode

    def encode(word: Any) -> bytes:
        known.append(other.address.node in local_transport()._peers)
        return real(word)

    try:
        monkeypatch.setattr(posts, "encode", encode)
        local_transport().peer(other.address)
        assert known == [False]
    finally:
        other.close()


def test_who_has_not_greeted_is_heard_for_a_few_bytes_only() -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(unix_sockets.socket_address(local_transport().address.node))
        stranger.send((5000).to_bytes(4, "little")[:2])  # in two parts, so that it has to be kept
        stranger.send((5000).to_bytes(4, "little")[2:])
        assert stranger.recv(1) == b""


STRANGER = """
    import os, socket, sys
    os.setgid(65534)
    os.setuid(65534)
    taken = socket.socket(socket.AF_UNIX)
    taken.bind(b"\\0meshbook/" + sys.argv[1].encode())
    taken.listen()
    taken.settimeout(20)
    print("listens", flush=True)
    said = taken.accept()[0].recv(100)
    knocks = socket.socket(socket.AF_UNIX)
    knocks.settimeout(20)
    knocks.connect(b"\\0meshbook/" + sys.argv[2].encode())
    print(len(said), len(knocks.recv(1)), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becomes another user")
def test_another_user_is_neither_greeted_nor_heard() -> None:
    ended = Transport()
    address = ended.address
    ended.close()
    command = [sys.executable, "-c", textwrap.dedent(STRANGER), address.node, local_transport().address.node]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "listens\n"
            with pytest.raises(PeerLost):
                local_transport().peer(address)
            assert stranger.communicate(timeout=WAIT_S)[0] == "0 0\n"
        finally:
            stranger.kill()
