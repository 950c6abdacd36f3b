"""breakpoint() in a notebook: one prompt for all ranks that stop, and nobody is left waiting, however it is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

import meshbook
from meshbook.cli import kernels
from tests.budget import when
from tests.kernel.frontend import Cell, FrontEnd, kernel

pytestmark = pytest.mark.usefixtures("starts_kernels")

IN_A_FUNCTION = """
def train(step):
    loss = 2.5 + rank
    breakpoint()
    return loss * 2
dist.barrier()  # so that the ranks stop at about the same time, and have one prompt
train(3)
"""
ONE_IN_A_COLLECTIVE = """
t = torch.ones(1)
if rank == 0:
    breakpoint()
    t += 1
dist.all_reduce(t)
t.item()
"""


@pytest.fixture(scope="module")
def front(run: object) -> Iterator[FrontEnd]:
    with kernel() as front:
        # A busy machine keeps ranks of one line apart: the prompt waits longer for all of them than it does for users.
        patience = "from meshbook.controller import debugging\ndebugging._STOPS_S = 1.0"
        assert front.run(f"%%controller\n{patience}").status == "ok"
        assert front.run("import time").status == "ok"
        yield front


def debug(front: FrontEnd, source: str, *replies: str) -> Cell:
    """Run a cell with these commands for the debugger; afterwards the next cell works on all ranks."""
    front.input_requests.clear()
    front.input_replies[:] = replies
    try:
        cell = front.run(source)
    except AssertionError:  # it waits at a prompt for which there is no command: the tests after this one are not to
        front.interrupt()
        raise
    assert len(front.input_requests) == len(replies)
    follow_up = front.run("t = torch.full((1,), rank + 1.)\ndist.all_reduce(t)\nt.item()")
    assert follow_up.result == "3.0"
    return cell


def begin(front: FrontEnd, source: str) -> Cell:
    """Run a cell until the debugger has asked for its first command."""
    front.input_requests.clear()
    front.input_replies.clear()
    cell = front.send(source)
    when(front.client.stdin_channel.msg_ready, "the prompt")  # type: ignore[union-attr]
    front.wait_until_shown(cell, lambda cell: "stopped " in cell.stdout)
    return cell


def test_a_rank_that_has_had_no_failure_says_so(front: FrontEnd) -> None:
    # First of all: each Stop of a later test is a failure.
    assert "Nothing has failed on this rank yet." in debug(front, "%mesh postmortem 1").stdout


def test_all_ranks_stop_at_one_prompt_and_answers_are_folded(front: FrontEnd) -> None:
    cell = debug(front, IN_A_FUNCTION, "p step", "loss = 10 * rank", "c")
    assert "stopped at cell" in cell.stdout
    assert "in train · step=3 · loss={2.5, 3.5}\n-> return loss * 2\n3\n" in cell.stdout
    assert front.input_requests[0]["prompt"] == "(ranks 0-1 · h lists the commands) "
    assert cell.result == "[0] 0\n[1] 20"


def test_one_rank_is_looked_at_while_the_other_stays_where_it_is(front: FrontEnd) -> None:
    cell = debug(front, IN_A_FUNCTION, "rank 1", "p loss", "ranks", "c", "p loss", "c")
    assert "[1] 3.5\n" in cell.stdout
    assert "rank 0: cell" in cell.stdout
    assert "[0] 2.5\n" in cell.stdout
    prompts = [request["prompt"] for request in front.input_requests]
    assert prompts[1:3] == ["(rank 1 · 0 stopped too) "] * 2
    assert prompts[-1] == "(rank 0 · 1 not stopped) "


def test_a_rank_in_a_collective_waits_for_the_one_that_is_stopped(front: FrontEnd) -> None:
    cell = debug(front, ONE_IN_A_COLLECTIVE, "p t.item()", "n", "p t.item()", "c")
    assert "[0] 1.0\n" in cell.stdout
    assert "[0] 2.0\n" in cell.stdout
    assert cell.result == "3.0"


def test_quitting_ends_the_cell_on_all_ranks(front: FrontEnd) -> None:
    cell = debug(front, ONE_IN_A_COLLECTIVE, "p 1", "q")
    assert cell.reply["ename"] == "KeyboardInterrupt"
    assert "was stopped on ranks 0-1" in cell.reply["evalue"]
    assert "pdb.py" not in cell.traceback


def test_quitting_at_a_breakpoint_in_the_last_line_shows_nothing_of_meshbook(front: FrontEnd) -> None:
    assert debug(front, "breakpoint()", "q").traceback == "ranks 0-1: KeyboardInterrupt"


def test_stop_at_the_prompt_ends_the_cell_on_all_ranks(front: FrontEnd) -> None:
    cell = begin(front, ONE_IN_A_COLLECTIVE)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    debug(front, "1")


def test_stop_while_a_rank_runs_on_from_the_debugger_ends_the_cell(front: FrontEnd) -> None:
    source = "breakpoint()\nprint('went on', flush=True)\ntime.sleep(60)"
    front.input_replies[:] = ["c"]
    cell = front.send(source)
    when(front.client.stdin_channel.msg_ready, "the prompt")  # type: ignore[union-attr]
    front._reply_to_input()
    front.wait_until_shown(cell, lambda cell: "went on" in cell.stdout)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    debug(front, "1")


def test_a_cell_stops_at_its_first_line(front: FrontEnd) -> None:
    # On one rank: when two of them begin a cell some time apart, they are asked for one after the other.
    cell = debug(front, "%%mesh --break --ranks 1\na = rank\na * 10", "n", "p a", "c")
    assert "line 2\n-> a = rank\n" in cell.stdout
    assert cell.result == "10"


def test_a_failure_is_looked_into_on_the_ranks_that_have_it(front: FrontEnd) -> None:
    failed = front.run("def f(a):\n    return 1 / a\nf(rank)")
    assert "ZeroDivisionError" in failed.traceback
    cell = debug(front, "%debug", "p a", "u", "c")
    assert "stopped at cell" in cell.stdout
    assert front.input_requests[0]["prompt"].startswith("(rank 0 · ")
    for _ in range(2):  # leaving by `q` is no failure, and the next look is at the same one
        cell = debug(front, "%mesh postmortem 0", "p a", "q")
        assert "0\n" in cell.stdout
        assert cell.status == "ok"


def test_a_stop_while_one_looks_at_a_failure_leaves_it_to_be_looked_at(front: FrontEnd) -> None:
    front.run("def f(a):\n    return 1 / a\nf(rank)")
    cell = begin(front, "%debug")
    front.interrupt()
    front.wait(cell)
    cell = debug(front, "%mesh postmortem 0", "p a", "q")
    assert "ZeroDivisionError: division by zero\n" in cell.stdout


def test_functions_that_a_controller_cell_runs_on_the_ranks_stop_too(front: FrontEnd) -> None:
    source = "%%controller\n@mesh.remote\ndef twice(x):\n    breakpoint()\n    return 2 * x\nprint(twice(4).same())"
    cell = debug(front, source, "p x + 1", "c")
    assert "stopped at a notebook cell, line 5 in twice · x=4\n5\n8\n" in cell.stdout


def test_a_cell_in_the_background_says_that_nobody_gives_commands(front: FrontEnd) -> None:
    front.run("%%mesh --bg\nbreakpoint()")
    cell = front.run("_.result()")
    assert "nobody to give the debugger commands" in cell.text
    cell = front.run("%%mesh --bg --break\n1")
    assert "leave --bg out" in cell.traceback


def test_a_front_end_without_input_is_told_how_to_pass_breakpoints_by(front: FrontEnd) -> None:
    for source in ("breakpoint()", "%%mesh --break\n1"):
        cell = front.wait(front.send(source, allow_stdin=False))
        assert "nobody to give the debugger commands" in cell.traceback
        assert "MESHBOOK_BREAKPOINT=0" in cell.traceback
        assert "meshbook/rank" not in cell.traceback


def test_a_rank_that_is_killed_meanwhile_is_told_of_at_the_prompt(front: FrontEnd) -> None:
    pid = front.pids()["rank 1"]
    cell = begin(front, ONE_IN_A_COLLECTIVE)
    os.kill(pid, signal.SIGKILL)
    front.wait_until_shown(cell, lambda cell: "has ended: rank 1 was killed by SIGKILL; press Enter" in cell.text)
    front.input_replies[:] = [""]
    assert front.wait(cell).reply["ename"] == "RankLost"
    front.run("%mesh heal")
    debug(front, "1")


def test_a_rank_is_healed_from_elsewhere_while_the_prompt_of_its_call_still_stands(front: FrontEnd) -> None:
    name, pid = front.value("get_ipython().meshbook.mesh.name"), front.pids()["rank 0"]
    cell = begin(front, ONE_IN_A_COLLECTIVE)
    os.kill(pid, signal.SIGKILL)  # the one that is stopped; the other waits for it
    front.wait_until_shown(cell, lambda cell: "has ended: rank 0 was killed by SIGKILL; press Enter" in cell.text)
    other = meshbook.attach(name)
    try:
        assert "rank 0 is back" in str(other.heal())
        assert other.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()", echo=False).values.same() == 2.0
    finally:
        other.detach()
    front.input_replies[:] = ["p t"]  # nobody is there to take it
    assert front.wait(cell).reply["ename"] == "RankLost"
    debug(front, "1")


def test_why_names_the_rank_that_waits_in_the_debugger(front: FrontEnd) -> None:
    name = front.value("get_ipython().meshbook.mesh.name")
    cell = begin(front, ONE_IN_A_COLLECTIVE)
    observer = meshbook.attach(name, observer=True)
    try:
        text = observer.why().text
    finally:
        observer.detach()
    assert "Rank 0 waits in the debugger for a command at cell" in text
    assert "has not come to all_reduce" in text
    assert re.search(r"rank 1 waits in all_reduce #\d+ at cell \d+, line 5, held by the debugger on rank 0", text)
    front.input_replies[:] = ["c"]
    assert front.wait(cell).result == "3.0"


def begin_loop(front: FrontEnd) -> Cell:
    """Begin a cell that loops until the debugger sets `done`, and wait until a cell beside it would be answered."""
    front.input_requests.clear()
    front.input_replies.clear()
    loop = "while not done:\n    i += 1\n    time.sleep(0.01)"
    cell = front.send(f"done, i = False, 0\nprint('loops', flush=True)\n{loop}")
    front.wait_until_shown(cell, lambda cell: "loops" in cell.stdout)
    started = time.monotonic()
    when(lambda: time.monotonic() - started > 2.2, "the age at which a cell is answered beside another")
    return cell


def test_a_cell_that_runs_is_stopped_and_has_the_prompt(front: FrontEnd) -> None:
    cell = begin_loop(front)
    front.input_replies[:] = ["p i > 0", "done = True", "c"]
    beside = front.run("%mesh debug")
    assert "ranks 0-1 stop in the debugger, with its prompt below cell" in beside.stdout
    front.wait(cell)
    assert "stopped " in cell.stdout
    assert "-> " in cell.stdout
    assert "True\n" in cell.stdout
    assert front.input_requests[0]["prompt"] == "(ranks 0-1 · h lists the commands) "
    assert cell.status == "ok"


def test_a_cell_in_the_background_is_stopped_from_the_next_one(front: FrontEnd) -> None:
    front.run("%%mesh --bg\ndone = False\nwhile not done: time.sleep(0.01)")
    cell = debug(front, "%mesh debug", "rank 1", "p 40 + rank", "all done = True", "all c")
    assert "[1] 41\n" in cell.stdout
    assert "goes on" in cell.text


def test_stop_at_the_prompt_of_a_cell_in_the_background_lets_it_go_on(front: FrontEnd) -> None:
    front.run("%%mesh --bg\ndone = False\nwhile not done: time.sleep(0.01)")
    cell = begin(front, "%mesh debug")
    front.interrupt()
    assert "left the debugger; cell" in front.wait(cell).text
    debug(front, "%mesh debug", "done = True", "c")


def test_jupyters_own_debugger_which_would_see_the_kernel_alone_is_not_claimed(front: FrontEnd) -> None:
    assert "debugger" not in kernels.kernel_spec().metadata
    assert "debugger" not in front.request("kernel_info_request", {})["supported_features"]


def test_a_port_for_vs_code_is_opened_with_the_entry_that_attaches_and_cells_are_files(front: FrontEnd) -> None:
    front.run("def seen(): return 1")
    shown = front.run("%mesh debug 1 --dap").stdout
    assert '"name": "rank 1 of' in shown
    assert '"request": "attach"' in shown
    source = "__import__('pathlib').Path(seen.__code__.co_filename).read_text()"
    assert "def seen(): return 1" in (front.run(f"%%mesh --ranks 1\n{source}").result or "")
    assert "--port is debugpy's" in front.run("%mesh debug 1 --port 5678").text
