"""The debugger on a cell that runs: stopped where it is, looked at, and gone on with, and nobody is left waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meshbook
from meshbook.controller import debugging, running_debugger
from meshbook.controller.console import Console
from meshbook.controller.mesh import Mesh
from meshbook.controller.running_debugger import RunningDebugger, find_running
from meshbook.errors import CellError, CellInterrupted, NotAttached, RankLost, UsageError
from meshbook.rank.service import HEARTBEAT_S
from tests.budget import WAIT_S, when
from tests.gate import Gate
from tests.host_processes import pid_of
from tests.standstill import stopped

pytestmark = pytest.mark.usefixtures("starts_meshes")

# Seconds: more than ranks take from the end of a prompt to the next collective, on a busy machine too.
SHORT_TIMEOUT_S = 3.0
LOOP = """
i, done = 0, False
while not done:
    i += 1
    __import__("time").sleep(0.01)
i > 0
"""
IN_A_COLLECTIVE = """
t = torch.ones(1)
if rank == 0:
    {wait}
dist.all_reduce(t)
t.item()
"""
IN_A_RECEIVE = """
t = torch.zeros(1)
if rank == 1:
    dist.recv(t, 0)
elif rank == 0:
    {wait}
    dist.send(torch.ones(1), 1)
"""
PLACES = {
    "a sleep": ("import time\ntime.sleep(600)", "time.sleep(600)"),
    "a queue": ("import queue\nqueue.Queue().get()", "queue.Queue().get()"),
    "a lock": ("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", "lock.acquire()"),
    "a coroutine": ("import asyncio\nwhile True: await asyncio.sleep(0.01)", "asyncio.sleep(0.01)"),
    "torch": (
        "m = torch.nn.Linear(300, 300)\nx = torch.ones(300, 300)\nwhile True: m(x).sum().backward()",
        "m(x).sum()",
    ),
    "a child process": ("import subprocess\nsubprocess.run(['sleep', '600'])", "subprocess.run"),
    "a function": ("def f():\n    import time\n    y = 5\n    time.sleep(600)\nf()", "time.sleep(600)"),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt waits for all ranks that were asked to stop, and `q` for the cell's end, however busy the machine is."""
    monkeypatch.setattr(debugging, "_STOPS_S", 60.0)
    monkeypatch.setattr(debugging, "_COMMAND_S", 60.0)
    monkeypatch.setattr(running_debugger, "_STOP_TIMEOUT_S", 60.0)
    monkeypatch.setattr(running_debugger, "_QUIT_TIMEOUT_S", 60.0)


@pytest.fixture(autouse=True)
def nothing_runs_on(mesh: Mesh) -> Iterator[None]:
    """A cell of a test that fails does not keep the ranks from the next one."""
    yield
    mesh.interrupt()


Reply = str | Callable[[RunningDebugger], str | None] | None


class Dialogue:
    """A debugger with replies that were thought of before; None leaves it, a function does something first."""

    def __init__(self, mesh: Mesh, ranks: tuple[int, ...], *replies: Reply, notes: list[str] | None = None) -> None:
        self.prompts: list[str] = []
        self.notes: list[str] = [] if notes is None else notes
        self._replies = list(replies)
        call = find_running(mesh.session, ranks)
        console = Console(call.ranks, echo=False)
        self._debugger = RunningDebugger(mesh.session, call, ranks, console, self._ask, self.notes.append)
        self._debugger.run()
        self.text = console.text
        assert self._replies == []

    def _ask(self, prompt: str, _password: bool) -> str | None:
        self.prompts.append(prompt)
        reply = self._replies.pop(0)
        return reply(self._debugger) if callable(reply) else reply


def begin(mesh: Mesh, source: str, *, at: str, rank: int = 1) -> Any:
    """Run a cell on ranks 0 and 1 in the background; return its future when a rank is at a line."""
    future = mesh.run(source, ranks="0-1", wait=False)
    when(lambda: at in mesh.stacks(rank).text)
    return future


def check_groups(mesh: Mesh) -> None:
    assert mesh.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").values.same() == len(mesh)


def test_a_loop_is_stopped_looked_at_stepped_and_let_go(mesh: Mesh) -> None:
    future = begin(mesh, LOOP, at="sleep(0.01)")
    found = Dialogue(mesh, (0, 1), "p i > 0", "n", "n", "done = True", "c")
    assert found.prompts[0] == "(ranks 0-1 · h lists the commands) "
    assert "stopped " in found.text
    assert "\nTrue\n" in found.text
    assert found.notes == ["the cell goes on"]
    assert future.result(WAIT_S).values.same() is True


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_stops_where_it_waits_or_computes(mesh: Mesh, place: str) -> None:
    source, line = PLACES[place]
    future = begin(mesh, source, at=line)
    found = Dialogue(mesh, (0, 1), "p 40 + 2", "q")
    assert line in found.text
    assert "\n42\n" in found.text
    with pytest.raises(CellInterrupted):
        future.result(WAIT_S)
    check_groups(mesh)


def begin_with_a_timeout(mesh: Mesh, gate: Gate, at_the_gate: str) -> Any:
    """Run a cell on ranks 0 and 1: an all_reduce in a group with a short timeout, after the gate for these ranks."""
    mesh.run("import datetime\nshort = dist.new_group([0, 1])")
    source = (
        f"dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds={SHORT_TIMEOUT_S}), short)\n"
        f"t = torch.ones(1)\nif rank in {at_the_gate}:\n    {gate.wait}  # line 4\n"
        "dist.all_reduce(t, group=short)\nt.item()"
    )
    future = mesh.run(source, ranks="0-1", wait=False)
    when(lambda: "line 4" in mesh.stacks(0).text)
    return future


def test_a_collective_does_not_time_out_while_a_prompt_is_open(mesh: Mesh, gate: Gate) -> None:
    future = begin_with_a_timeout(mesh, gate, "(0, 1)")

    def look_for_long(_: RunningDebugger) -> str:
        gate.open()
        when(lambda: "all_reduce" in mesh.stacks(1).text)
        began = time.monotonic()
        when(lambda: time.monotonic() - began > SHORT_TIMEOUT_S + 3 * HEARTBEAT_S, "more than the timeout")
        assert "all_reduce" in mesh.stacks(1).text
        return "c"

    Dialogue(mesh, (0,), look_for_long)
    assert future.result(WAIT_S).values.same() == 2.0
    check_groups(mesh)


def test_a_collective_times_out_where_no_prompt_is_open(mesh: Mesh, gate: Gate) -> None:
    future = begin_with_a_timeout(mesh, gate, "(0,)")
    Dialogue(mesh, (0,), None)  # it was open, and is left
    when(lambda: "all_reduce" in mesh.stacks(1).text)
    when(lambda: "all_reduce" not in mesh.stacks(1).text, "the timeout")
    gate.open()
    with pytest.raises(CellError, match=f"timed out: it was not completed within {SHORT_TIMEOUT_S:g} s"):
        future.result(WAIT_S)
    check_groups(mesh)


def test_ranks_stop_whose_first_signal_was_lost(mesh: Mesh, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is one that comes just before Python waits for a lock; here, while another handler has its place."""
    source = (
        "import signal, threading\nnumber, lock = signal.SIGRTMAX - 5, threading.Lock()\n"
        f"handler = signal.signal(number, signal.SIG_IGN)\n{gate.wait}  # line 4\nsignal.signal(number, handler)\n"
        "lock.acquire()\nlock.acquire()  # for good"
    )
    future = mesh.run(source, ranks="0-1", wait=False)
    when(lambda: all("line 4" in mesh.stacks(rank).text for rank in (0, 1)))
    request_stop = running_debugger.request_stop

    def ask_and_open(*arguments: Any) -> Any:
        places = request_stop(*arguments)
        places.add_done_callback(lambda _: gate.open())
        return places

    monkeypatch.setattr(running_debugger, "request_stop", ask_and_open)
    found = Dialogue(mesh, (0, 1), "p 40 + 2", "q")
    assert "-> lock.acquire()  # for good" in found.text
    assert "\n42\n" in found.text
    with pytest.raises(CellInterrupted):
        future.result(WAIT_S)


def test_one_rank_is_stopped_and_the_other_runs_on(mesh: Mesh) -> None:
    future = begin(mesh, LOOP, at="sleep(0.01)")
    found = Dialogue(mesh, (1,), "done = True", "c")
    assert found.prompts == ["(rank 1 · h lists the commands · 0 not stopped) ", "(rank 1 · 0 not stopped) "]
    Dialogue(mesh, (0,), "done = True", "c")
    assert future.result(WAIT_S).values.same() is True


def test_a_rank_in_a_collective_is_looked_at_there_and_the_collective_is_completed(mesh: Mesh, gate: Gate) -> None:
    future = mesh.run(IN_A_COLLECTIVE.format(wait=gate.wait), wait=False)  # a collective takes all ranks of its group
    when(lambda: all("dist.all_reduce" in mesh.stacks(rank).text for rank in (1, 2, 3)))

    def open_and_step(_debugger: RunningDebugger) -> str:
        gate.open()
        return "n"

    found = Dialogue(mesh, (1, 2), "p rank > 0", "w", open_and_step, "p t.item()", "c")
    assert "stopped within" in found.text
    assert "-> dist.all_reduce(t)" in found.text
    assert "[1-2] True\n" in found.text
    assert "[1-2] 4.0\n" in found.text
    assert "group_health" not in found.text
    assert future.result(WAIT_S).values.same() == 4.0


def test_a_rank_that_cannot_stop_yet_is_named_with_what_it_is_in(
    mesh: Mesh, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debugging, "_STOPS_S", 0.2)
    future = begin(mesh, IN_A_RECEIVE.format(wait=gate.wait), at="dist.recv(t, 0)")
    found = Dialogue(mesh, (0, 1), "ranks", "c")
    (note, _) = found.notes
    assert note.startswith("not stopped yet, rank 1: in recv #1 at cell")
    assert "rank 1: not stopped, in recv #1 at" in found.text
    gate.open()
    future.result(WAIT_S)


def test_quitting_ends_the_cell_on_all_ranks_also_on_those_in_a_collective(mesh: Mesh, gate: Gate) -> None:
    future = mesh.run(IN_A_COLLECTIVE.format(wait=gate.wait), wait=False)
    when(lambda: "dist.all_reduce" in mesh.stacks(1).text)
    assert Dialogue(mesh, (1,), "q").notes == ["the cell has ended"]
    with pytest.raises(CellInterrupted):
        future.result(WAIT_S)
    check_groups(mesh)


def test_quitting_ends_the_cell_also_on_a_rank_that_stops_meanwhile(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debugging, "_STOPS_S", 0.2)
    future = begin(mesh, LOOP, at="sleep(0.01)")
    pid = pid_of(mesh, 1)

    def go_on_and_quit(debugger: RunningDebugger) -> str:
        os.kill(pid, signal.SIGCONT)
        when(lambda: not debugger._inbox.empty())
        return "q"

    with stopped(pid):
        found = Dialogue(mesh, (0, 1), go_on_and_quit)
    assert found.prompts == ["(rank 0 · h lists the commands · 1 not stopped) "]
    with pytest.raises(CellInterrupted):
        future.result(WAIT_S)
    check_groups(mesh)


def test_a_stop_of_the_cell_ends_the_debugger(mesh: Mesh) -> None:
    future = begin(mesh, LOOP, at="sleep(0.01)")
    notes: list[str] = []

    def stop(_debugger: RunningDebugger) -> str:
        mesh.interrupt()
        future.exception(WAIT_S)
        when(lambda: notes)  # the debugger hears of the end by a message of its own
        return ""

    Dialogue(mesh, (0, 1), stop, notes=notes)
    assert notes[0] == "the cell has ended; press Enter"
    check_groups(mesh)


def test_a_breakpoint_stops_them_again_after_they_were_let_go(mesh: Mesh) -> None:
    future = begin(mesh, LOOP, at="sleep(0.01)")
    found = Dialogue(mesh, (0, 1), "b 3", "c", "cl 1", "done = True", "c")
    assert found.text.count("-> i += 1") == 1
    future.result(WAIT_S)


def test_another_client_debugs_a_cell_and_the_ranks_go_on_when_it_is_gone(mesh: Mesh) -> None:
    future = begin(mesh, LOOP, at="sleep(0.01)")
    other = meshbook.attach(mesh.name, observer=True)
    try:
        Dialogue(other, (0, 1), "p i > 0", "c")

        def vanish(_debugger: RunningDebugger) -> str:
            other.detach()
            return "n"

        with pytest.raises(NotAttached):
            Dialogue(other, (0, 1), vanish)
    finally:
        other.session.close()
    when(lambda: "sleep(0.01)" in mesh.stacks(1).text)
    Dialogue(mesh, (0, 1), "done = True", "c")
    assert future.result(WAIT_S).values.same() is True


def test_a_function_that_runs_on_the_ranks_is_stopped_too(mesh: Mesh) -> None:
    def wait() -> int:
        import time

        done = 0
        while not done:
            time.sleep(0.01)
        return done

    command = mesh.session.call_command(wait, (), {}, (0, 1), label="wait")
    future = mesh.session.request(command)
    when(lambda: "time.sleep" in mesh.stacks(1).text)
    assert "in wait · done=0" in Dialogue(mesh, (0, 1), "done = 7", "c").text
    assert future.result(WAIT_S).outcomes[0].outcome.status == "ok"


def test_without_anything_that_runs_there_is_nothing_to_stop(mesh: Mesh) -> None:
    with pytest.raises(UsageError, match="nothing runs on ranks 0-1"):
        find_running(mesh.session, (0, 1))


def test_a_rank_that_is_killed_meanwhile_is_named_and_the_cell_ends() -> None:
    with meshbook.create_mesh(2) as mesh:
        mesh.run("kept = 41 + rank")
        future = begin(mesh, LOOP, at="sleep(0.01)")
        pid = pid_of(mesh, 1)
        notes: list[str] = []

        def kill(_debugger: RunningDebugger) -> str:
            os.kill(pid, signal.SIGKILL)
            future.exception(WAIT_S)
            when(lambda: notes)  # the debugger hears of it by a message of its own
            return ""

        Dialogue(mesh, (0, 1), kill, notes=notes)
        assert notes[0].startswith("rank 1 was killed by SIGKILL")
        with pytest.raises(RankLost):
            future.result(WAIT_S)
        assert mesh.run("kept", ranks=0).values[0] == 41
