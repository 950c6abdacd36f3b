"""A cell's output that came while no kernel or page was there is shown when the notebook comes back. Real kernels."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from meshbook.controller.starting import attach
from tests.budget import when
from tests.gate import Gate
from tests.kernel.frontend import FrontEnd, has_exited, kernel

pytestmark = pytest.mark.usefixtures("starts_kernels")

NUM_LINES = 400


def counting(gate: Gate) -> str:
    """A loop of numbered lines, some hundreds per second, so that the kernel dies in the middle of them.

    The last hundred wait for the gate, which is opened when the kernel is dead, however late the test came to kill it.
    Of one rank: how those of two are folded depends on how far the ranks are apart.
    """
    return (
        f"for n in range({NUM_LINES} if rank == 0 else 0):\n"
        "    print('line', n, flush=True)\n"
        "    time.sleep(0.004)\n"
        f"    if n >= {NUM_LINES - 100}:\n"
        f"        {gate.wait}\n"
    )


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^\[0\] line (\d+)$", text, re.MULTILINE)]


def again(front: FrontEnd, *, kill: bool = True) -> FrontEnd:
    """A front end for the kernel that comes after this one's, which is killed."""
    if kill:
        os.kill(front.pid, signal.SIGKILL)
    front.manager.restart_kernel(now=True)
    front.close()
    return FrontEnd(front.manager)


def wait_until_ended(name: str) -> None:
    """Wait for the end of the last cell of a mesh, as somebody who only looks on."""
    mesh = attach(name, observer=True)
    try:
        when(lambda: mesh.history()[-1].status != "running", "the end of the cell")
    finally:
        mesh.session.close()


def end(front: FrontEnd) -> None:
    front.close()
    front.manager.shutdown_kernel()


def test_no_line_is_lost_when_the_kernel_is_killed_while_a_cell_prints(run: object, gate: Gate) -> None:
    with kernel() as front:
        front.run("import time")
        name = front.value("get_ipython().meshbook.mesh.name")
        cell = front.send(f"{counting(gate)}{gate.wait}\nrank * 10")
        front.wait_until_shown(cell, lambda cell: "line 50\n" in cell.stdout)
        os.kill(front.pid, signal.SIGKILL)
        when(lambda: has_exited(front.pid), "the end of the kernel")
        gate.open()
        wait_until_ended(name)
        front = again(front, kill=False)
        first = front.run("%%controller\n'back'")
        assert re.search(
            rf"cell 2 went on without the notebook: ended after [\d.]+ s · its output \({NUM_LINES} lines\): "
            r"%mesh history 2$",
            first.notes,
            re.MULTILINE,
        )
        shown = front.run("%mesh history 2")
        assert numbers(shown.stdout) == list(range(NUM_LINES))
        assert "[0] 0\n[1] 10" in shown.text
        assert "cell 2 of " in shown.notes
        # The user knows now: neither the next cell nor the next kernel says it again.
        assert "went on" not in front.run("1 + 1").notes
        front = again(front)
        assert "went on" not in front.run("1 + 1").notes
        end(front)


def test_a_cell_that_still_runs_shows_what_it_printed_meanwhile_and_goes_on_live(
    run: object, gate: Gate, tmp_path: Path
) -> None:
    last_lines = Gate(tmp_path / "last lines")
    with kernel() as front:
        front.run("import time\nx = rank")
        pids = front.pids()
        lines = f"print('before', flush=True)\n{counting(last_lines)}"
        cell = front.send(f"{lines}{gate.wait}\nprint('after')\nif rank == 1: 1 / 0")
        front.wait_until_shown(cell, lambda cell: "line 50\n" in cell.stdout)
        seen = numbers(cell.stdout)
        os.kill(front.pid, signal.SIGKILL)
        when(lambda: has_exited(front.pid), "the end of the kernel")
        last_lines.open()
        front = again(front, kill=False)
        first = front.run("%%controller\n'back'")
        assert "cell 2 from before the kernel's restart still runs on ranks 0-1" in first.notes
        assert "%mesh interrupt stops it" in first.notes
        assert "its whole output until now: %mesh history 2" in first.notes
        front.wait_until_shown(first, lambda cell: f"line {NUM_LINES - 1}\n" in cell.stdout)
        # Some lines are shown twice, because nobody knows what the old kernel still showed; none is missing.
        meanwhile = numbers(first.stdout)
        assert meanwhile == list(range(meanwhile[0], NUM_LINES))
        assert sorted({*seen, *meanwhile}) == list(range(NUM_LINES))
        waiting = front.send("'next'")
        front.wait_until_shown(waiting, lambda cell: "waits for cell 2" in cell.notes)
        gate.open()
        assert front.wait(waiting).result == "'next'"
        front.wait_until_shown(first, lambda cell: "ZeroDivisionError" in cell.stderr)
        assert "after\n" in first.stdout
        assert front.run("x").result == "[0] 0\n[1] 1"
        assert front.pids() == pids
        end(front)


@pytest.mark.thorough
def test_the_value_of_a_cell_that_is_followed_is_shown_and_stopping_the_mesh_does_not_wait_for_it(
    run: object, gate: Gate
) -> None:
    with kernel() as front:
        front.run("%mesh start -n 2 --hosts 2")
        cell = front.send(f"print('at it', flush=True)\n{gate.wait}\nprint('live')\nrank * 10")
        front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
        front = again(front)
        first = front.run("%%controller\n'back'")
        gate.open()
        front.wait_until_shown(first, lambda cell: "cell 2 is done after" in cell.notes)
        assert "live\n" in first.stdout
        assert "[0] 0\n[1] 10\n" in first.text
        hangs = front.send("import time\nprint('again')\ntime.sleep(600)")
        front.wait_until_shown(hangs, lambda cell: "again" in cell.stdout)
        front = again(front)
        stopped = front.run("%mesh stop")
        assert "still runs" in stopped.notes
        assert "has ended" in stopped.stdout
        assert "waiting for" not in stopped.notes
        end(front)


def test_a_cell_that_failed_without_its_kernel_says_so_and_its_error_is_there(run: object, gate: Gate) -> None:
    with kernel() as front:
        front.run("pass")
        name = front.value("get_ipython().meshbook.mesh.name")
        cell = front.send(
            f"print('at it', flush=True)\n{gate.wait}\nprint('alone')\nif rank: raise ValueError('bad shard')"
        )
        front.wait_until_shown(cell, lambda cell: "at it" in cell.stdout)
        os.kill(front.pid, signal.SIGKILL)
        when(lambda: has_exited(front.pid), "the end of the kernel")
        gate.open()
        wait_until_ended(name)
        front = again(front, kill=False)
        assert "cell 2 went on without the notebook: failed after" in front.run("'back'").notes
        # The new kernel counts from 1 again: neither cell 2 is taken for the other.
        front.run("if rank == 0: print('of the new kernel')")
        latest = front.run("%mesh history 2")
        assert latest.stdout == "[0] of the new kernel\n"
        assert "an earlier cell had the same number: %mesh history 2 --all" in latest.notes
        shown = front.run("%mesh history 2 --all")
        assert shown.status == "ok"
        assert "at it\n" in shown.stdout
        assert "alone\n" in shown.stdout
        assert "rank 1: ValueError: bad shard" in shown.stderr
        assert "rank 0 ran to its end" in shown.stderr
        assert shown.stdout.endswith("of the new kernel\n")
        end(front)


def test_the_history_marks_cells_with_output_and_says_of_which_it_has_some(shared: FrontEnd) -> None:
    printed = shared.run("for n in range(3 * (rank == 0)): print('kept', n)").reply["execution_count"]
    valued = shared.run("rank + 5").reply["execution_count"]
    quiet = shared.run("silent = 1").reply["execution_count"]
    rows = {line.split()[0]: line for line in shared.run("%mesh history").text.splitlines() if line[:1].isdecimal()}
    assert re.search(r"ok +3 lines +for n in", rows[str(printed)])
    assert re.search(r"ok +kept +rank \+ 5", rows[str(valued)])
    assert re.search(r"ok +silent = 1", rows[str(quiet)])
    kept = "[0] kept 0\n[0] kept 1\n[0] kept 2\n"
    assert shared.run(f"%mesh history {printed}").stdout == kept
    assert "[0] 5\n[1] 6" in shared.run(f"%mesh history {valued}").text
    missing = shared.run("%mesh history 9999")
    assert missing.reply["ename"] == "UsageError"
    assert re.search(rf"no output of a cell 9999 is kept; it is of cells: .*{quiet}", missing.reply["evalue"])
    assert "%mesh history [N]" in shared.run("%mesh history seven").reply["evalue"]
    assert f"cell {printed}\n" not in shared.run(f"%%controller\nmesh.history({printed}).text").text
    assert shared.value(f"mesh.history({printed}).text") == kept


def test_displays_of_a_past_cell_are_shown_as_they_were_last_and_the_cells_own_are_left_alone(shared: FrontEnd) -> None:
    drawn = shared.run(
        "from IPython.display import display\n"
        "class Figure:\n"
        "    def __init__(self, step): self.step = step\n"
        "    def _repr_mimebundle_(self, **_):\n"
        "        return {'text/plain': f'step {self.step}', 'image/png': 'aGVsbG8='}\n"
        "shown = display(Figure(0), display_id=True)\n"
        "for step in range(1, 4): shown.update(Figure(step))"
    )
    shared.run("shown.update(Figure(9))")
    number = drawn.reply["execution_count"]
    past = shared.run(f"%mesh history {number}")
    assert [data["text/plain"] for data in past.displays if "image/png" in data] == ["step 3"]
    # A later update reaches the display of the cell itself, and not the one that the history shows.
    assert [one["id"] for one in past.outputs if "image/png" in one.get("data", {})] == [None]


def test_a_page_that_is_reloaded_while_a_cell_runs_is_shown_where_its_output_is(shared: FrontEnd, gate: Gate) -> None:
    assert "reloaded" not in shared.run("1 + 1").notes
    say = "if rank == 0: print"
    running = shared.send(f"{say}('before the reload', flush=True)\n{gate.wait}\n{say}('after the reload')")
    queued = shared.send("print('the next one')")
    shared.wait_until_shown(running, lambda cell: "before the reload" in cell.stdout)
    page = FrontEnd(shared.manager, own_session=True)
    try:
        gate.open()
        number = shared.wait(running).reply["execution_count"]
        shared.wait(queued)
        first = page.run("'here'")
        assert first.notes == (
            f"the page was opened or reloaded while cells {number}-{number + 1} ran, or just after; "
            f"their whole output: %mesh history {number}, %mesh history {number + 1}"
        )
        assert page.run(f"%mesh history {number}").stdout == "[0] before the reload\n[0] after the reload\n"
        assert "reloaded" not in page.run("'here'").notes
        assert "reloaded" not in shared.run("1 + 1").notes
    finally:
        page.close()
