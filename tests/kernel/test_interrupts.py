"""Stop, pressed while ranks are at all kinds of work. Afterwards the next cell works."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterator

import pytest

from meshbook.wire.process_control import is_stopped
from meshbook.wire.stop_timing import INTERRUPT_DEBOUNCE_S, KILL_AFTER_S
from tests.budget import when
from tests.gate import Gate
from tests.kernel.frontend import TIMEOUT_S, Cell, FrontEnd, has_exited, kernel, printed_by_both

pytestmark = pytest.mark.usefixtures("starts_kernels")


@pytest.fixture(scope="module")
def front(run: object) -> Iterator[FrontEnd]:
    with kernel() as front:
        assert front.run("import time").status == "ok"
        yield front


def stop(front: FrontEnd, source: str) -> Cell:
    """Run a cell, press Stop once all its ranks are at it, and wait for its end."""
    cell = front.send(f"print('at it', flush=True)\n{source}")
    front.wait_until_shown(cell, lambda cell: printed_by_both(cell, "at it"))
    front.interrupt()
    front.wait(cell)
    assert front.run("'next'").result == "'next'"
    return cell


def test_stop_ends_a_cell_and_the_programs_that_it_has_started_on_all_its_ranks(front: FrontEnd) -> None:
    cell = stop(front, "import os\nif rank: dist.barrier()\nos.system('sleep 60; sleep 60')")
    assert cell.reply["ename"] == "KeyboardInterrupt"
    assert "was stopped on ranks 0-1" in cell.reply["evalue"]


def test_stop_calls_the_cells_own_handler_once(front: FrontEnd) -> None:
    source = """
    import signal
    presses = []
    signal.signal(signal.SIGINT, lambda *_: presses.append(1))
    while not presses: time.sleep(.01)
    print('left the loop', presses)
    """
    cell = stop(front, textwrap.dedent(source))
    assert cell.status == "ok"
    assert cell.stdout.endswith("left the loop [1]\n")
    cell = stop(front, "time.sleep(60)")
    assert cell.reply["ename"] == "KeyboardInterrupt"


def test_stop_ends_a_controller_cell_that_waits_for_nobody(front: FrontEnd) -> None:
    cell = front.send("%%controller\nimport time\nprint('at it', flush=True)\ntime.sleep(60)")
    front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"


def test_stop_ends_the_following_of_logs_without_an_error(front: FrontEnd) -> None:
    front.run("print('followed, before')")
    cell = front.send("%mesh logs -f --grep ^followed --since 1h")
    front.wait_until_shown(cell, lambda cell: "followed, before" in cell.stdout)
    front.interrupt()
    assert front.wait(cell).status == "ok"
    assert front.run("'next'").result == "'next'"


def test_stop_ends_what_a_controller_cell_has_the_ranks_do(front: FrontEnd) -> None:
    source = "%%controller\nwhile True: mesh.run('print(1, flush=True)\\ntime.sleep(60)')"
    cell = front.send(source)
    front.wait_until_shown(cell, lambda cell: "1" in cell.stdout)
    front.interrupt()
    assert front.wait(cell).reply["ename"] in ("CellInterrupted", "KeyboardInterrupt")
    assert front.run("'next'").result == "'next'"


def test_a_cell_that_was_not_sent_to_the_ranks_yet_is_stopped_too(front: FrontEnd, gate: Gate) -> None:
    behind = front.run(f"%%mesh --bg\n{gate.wait}")
    cell = front.send("ran_by_test = 1")
    front.wait_until_shown(cell, lambda cell: "waits for" in cell.notes)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    gate.open()
    front.wait_until_shown(behind, lambda cell: "is done after" in cell.notes)
    assert front.run("'ran_by_test' in globals()").result == "False"


def test_stop_ends_questions_to_the_user_of_every_rank(front: FrontEnd) -> None:
    front.input_replies.clear()
    front.input_requests.clear()
    cell = front.send("input('never answered')")
    deadline = time.monotonic() + TIMEOUT_S
    while not front.input_requests:
        assert time.monotonic() < deadline, cell.text
        if front.client.stdin_channel.msg_ready():
            front._reply_to_input()
        front._iopub(0.02)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    assert "zmq" not in cell.traceback
    assert front.run("'next'").result == "'next'"


def test_two_presses_of_stop_at_once_end_the_cell_with_the_rank_that_does_not_come_back(run: object) -> None:
    with kernel() as front:
        front.run("import time\nx = rank")
        source = (  # it answers when a second press is a press of its own
            "while rank == 1:\n"
            "    try: time.sleep(60)\n"
            "    except KeyboardInterrupt: time.sleep(0.4); print('not me', flush=True)"
        )
        cell = front.send(f"print('at it', flush=True)\n{source}")
        front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
        front.interrupt()
        front.wait_until_shown(cell, lambda cell: "not me" in cell.stdout)
        front.interrupt()
        if front.wait(cell).reply["ename"] == "KeyboardInterrupt":  # the first was given up before the second came
            assert "rank 1 has not come back" in cell.reply["evalue"]
            front.wait_until_shown(cell, lambda cell: "second Stop: rank 1" in cell.text)
            return
        assert cell.reply["ename"] == "RankLost"
        assert f"second Stop: rank 1 did not come back within {KILL_AFTER_S:g} s and was killed" in cell.text
        assert front.run("x").result == "0"


def test_one_stop_brings_back_a_rank_that_stops_itself_again_and_again(front: FrontEnd) -> None:
    pids = front.pids()
    front.run("import os, signal")
    stops = "while rank == 0: os.kill(os.getpid(), signal.SIGSTOP)"
    cell = front.send(f"print('at it', flush=True)\n{stops}\ntime.sleep(60)")
    front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
    when(lambda: is_stopped(pids["rank 0"]), "its stop")
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    assert front.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").result == "2.0"
    assert front.pids() == pids


def test_a_rank_in_c_code_that_does_not_come_back_leaves_the_kernel_usable_and_a_second_stop_ends_it(
    run: object,
) -> None:
    with kernel() as front:
        front.run("import ctypes, time\nx = rank")
        pids = front.pids()
        # PyDLL keeps the GIL, and a mutex that is locked twice waits for ever, whatever signals come.
        source = (
            "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)\n"
            "while rank == 1:\n"
            "    try: print('at it', flush=True); time.sleep(0.3); lock(mutex)\n"
            "    except KeyboardInterrupt: pass\n"
            "time.sleep(60)"
        )
        cell = front.send(source)
        front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
        front.interrupt()
        front.wait(cell)
        assert cell.reply["ename"] == "KeyboardInterrupt"
        assert "rank 1 has not come back: rank 1 (pid" in cell.reply["evalue"]
        assert "C code" in cell.reply["evalue"]
        assert "%mesh kill 1" in cell.reply["evalue"]
        assert front.run("%%controller\n1 + 1").result == "2"
        assert "busy" in front.run("%mesh status").text
        assert front.run("%mesh why").status == "ok"
        assert front.run("%mesh stacks").status == "ok"
        assert front.run("%%mesh --ranks 0\nx + 1").result == "1"
        waiting = front.send("x")
        front.wait_until_shown(waiting, lambda cell: "waits for rank 1, not back from cell" in cell.notes)
        front.interrupt()
        assert front.wait(waiting).reply["ename"] == "KeyboardInterrupt"
        pressed = time.monotonic()
        assert front.value("get_ipython().meshbook.mesh.session.lost") == ()
        when(
            lambda: time.monotonic() > pressed + INTERRUPT_DEBOUNCE_S,
            "the time in which two presses are one",
        )
        front.interrupt()
        when(lambda: has_exited(pids["rank 1"]), "its end")
        when(lambda: front.value("get_ipython().meshbook.mesh.session.lost") == (1,), "the news of its end")
        assert front.run("x").result == "0"


# What this very cell, which arms the signal, comes to next.
BEHIND_THE_CELL = ("read_payload", "finish_metadata", "post_handler_hook")


@pytest.mark.parametrize(
    ("owner", "name", "ends"),
    [
        ("kernel", "_publish_execute_input", "KeyboardInterrupt"),
        ("kernel", "do_execute", "KeyboardInterrupt"),
        ("kernel.shell", "transform_cell", "KeyboardInterrupt"),
        ("kernel.shell.payload_manager", "read_payload", "KeyboardInterrupt"),
        ("kernel", "finish_metadata", None),  # too late: the cell has ended well
        ("kernel", "post_handler_hook", None),
    ],
)
def test_a_signal_outside_the_code_of_a_cell_loses_no_reply(
    front: FrontEnd, owner: str, name: str, ends: str | None
) -> None:
    arm = (
        "%%controller\n"
        "import os, signal\n"
        "kernel = get_ipython().kernel\n"
        f"before = {owner}.{name}\n"
        "def armed(*args, **kwargs):\n"
        "    if kernel.shell.user_ns.pop('skips', 0):\n"
        "        return before(*args, **kwargs)\n"
        f"    setattr({owner}, {name!r}, before)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return before(*args, **kwargs)\n"
        f"skips = {name in BEHIND_THE_CELL}\n"
        f"setattr({owner}, {name!r}, armed)"
    )
    assert front.run(arm).status == "ok"
    cell = front.run("1 + 1")
    assert cell.reply.get("ename") == ends
    assert front.run("'next'").result == "'next'"


def test_a_supervisor_that_is_stopped_is_named_and_stop_lets_it_go_on(front: FrontEnd) -> None:
    supervisor = front.pids()["supervisor"]
    cell = front.send("kept = rank\nprint('at it', flush=True)\ntime.sleep(60)")
    front.wait_until_shown(cell, lambda cell: printed_by_both(cell, "at it"))
    os.kill(supervisor, signal.SIGSTOP)
    front.wait_until_shown(cell, lambda cell: "does not answer" in cell.text)
    for part in (f"(pid {supervisor})", "it is stopped (SIGSTOP)", f"`kill -CONT {supervisor}`", "keep what they hold"):
        assert part in cell.text
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    assert "was stopped on ranks 0-1" in cell.reply["evalue"]
    assert front.run("kept").result == "[0] 0\n[1] 1"


def test_stop_ends_the_start_of_a_mesh_and_the_next_cell_starts_another(run: object) -> None:
    with kernel() as front:
        cell = front.send("'first'")
        front.wait_until_shown(cell, lambda _: front.request("kernel_info_request", {})["status"] == "ok")
        front.interrupt()
        front.wait(cell)
        if cell.status == "error":  # else it was up before we got there
            assert cell.reply["ename"] == "KeyboardInterrupt"
        assert front.run("'second'").result == "'second'"
