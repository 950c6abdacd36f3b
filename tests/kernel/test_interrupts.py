"""Stop, pressed while ranks are at all kinds of work. Afterwards the next cell works."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.kernel.frontend import Cell, FrontEnd, kernel

# What a loaded machine may take for what takes 0.05 to 0.4 s.
SOON_S = 5.0


@pytest.fixture(scope="module")
def front(run: object) -> Iterator[FrontEnd]:
    with kernel() as front:
        assert front.run("import time").status == "ok"
        yield front


def stop(front: FrontEnd, source: str, ranks: str = "01") -> Cell:
    """Run a cell, press Stop once all its ranks are at it, and wait for its end."""
    cell = front.send(f"print('at it', flush=True)\n{source}")
    front.until(cell, lambda cell: "at it" in cell.stdout)
    pressed = time.monotonic()
    front.interrupt()
    front.wait(cell)
    assert time.monotonic() - pressed < SOON_S
    assert front.run("'next'").result == "'next'"
    return cell


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(60)",
        "while True: pass",
        "import threading\nthreading.Event().wait(60)",
        "import asyncio\nawait asyncio.sleep(60)",
        "!sleep 60",
        "if rank == 0: time.sleep(60)\nelse: dist.barrier()",
    ],
)
def test_stop_ends_a_cell_on_all_its_ranks(front: FrontEnd, source: str) -> None:
    cell = stop(front, source)
    assert cell.reply["ename"] == "KeyboardInterrupt"
    assert "was stopped on ranks 0-1" in cell.reply["evalue"]


def test_stop_ends_a_collective_that_one_rank_never_joined_and_the_group_works_again(front: FrontEnd) -> None:
    cell = stop(front, "t = torch.ones(1)\nif rank == 0: dist.all_reduce(t)")
    assert "rank 0" in cell.traceback
    assert "rank 1 ran to its end" in cell.traceback
    assert front.run("t = torch.full((1,), rank + 1.)\ndist.all_reduce(t)\nt.item()").result == "3.0"


def test_stop_ends_a_controller_cell_that_waits_for_nobody(front: FrontEnd) -> None:
    cell = front.send("%%controller\nimport time\nprint('at it', flush=True)\ntime.sleep(60)")
    front.until(cell, lambda cell: "at it" in cell.stdout)
    front.interrupt()
    assert front.wait(cell, timeout_s=SOON_S).reply["ename"] == "KeyboardInterrupt"


def test_stop_ends_what_a_controller_cell_has_the_ranks_do(front: FrontEnd) -> None:
    source = "%%controller\nwhile True: mesh.run('print(1, flush=True)\\ntime.sleep(60)')"
    cell = front.send(source)
    front.until(cell, lambda cell: "1" in cell.stdout)
    front.interrupt()
    assert front.wait(cell, timeout_s=SOON_S).reply["ename"] in ("CellInterrupted", "KeyboardInterrupt")
    assert front.run("'next'").result == "'next'"


def test_a_cell_that_was_not_sent_to_the_ranks_yet_is_stopped_too(front: FrontEnd) -> None:
    behind = front.run("%%mesh --bg\ntime.sleep(2)")
    cell = front.send("ran_by_test = 1")
    front.until(cell, lambda cell: "waits for" in cell.notes)
    front.interrupt()
    assert front.wait(cell, timeout_s=SOON_S).reply["ename"] == "KeyboardInterrupt"
    front.until(behind, lambda cell: "is done after" in cell.notes)
    assert front.run("'ran_by_test' in globals()").result == "False"


def test_stop_ends_questions_to_the_user_of_every_rank(front: FrontEnd) -> None:
    front.answers.clear()
    front.asked.clear()
    cell = front.send("input('never answered')")
    deadline = time.monotonic() + 30
    while not front.asked:
        assert time.monotonic() < deadline, cell.text
        if front.client.stdin_channel.msg_ready():
            front._answer()
        front._iopub(0.02)
    front.interrupt()
    assert front.wait(cell, timeout_s=SOON_S).reply["ename"] == "KeyboardInterrupt"
    assert front.run("'next'").result == "'next'"


def test_stopping_one_cell_and_then_another_does_not_escalate(front: FrontEnd) -> None:
    pids = front.pids()
    for _ in range(3):
        stop(front, "time.sleep(60)")
    assert front.pids() == pids


def test_a_second_stop_ends_ranks_that_do_not_come_back_and_says_so(run: object) -> None:
    with kernel() as front:
        assert front.run("import time\nx = rank").status == "ok"
        source = (
            "while rank == 1:\n"
            "    try:\n"
            "        print('at it', flush=True)\n"
            "        time.sleep(60)\n"
            "    except KeyboardInterrupt:\n"
            "        print('not me', flush=True)\n"
        )
        cell = front.send(source)
        front.until(cell, lambda cell: "at it" in cell.stdout)
        front.interrupt()
        front.until(cell, lambda cell: "did not stop within" in cell.stderr)
        assert "Press Stop twice" in cell.stderr
        front.interrupt()
        if not front.until(cell, lambda cell: bool(cell.stderr.count("[meshbook]") > 1)).reply:
            front.wait(cell, timeout_s=SOON_S)
        assert "second Stop" in cell.stderr
        assert cell.reply["ename"] == "RankLost"
        assert front.run("x").result == "0"


def test_stop_ends_the_start_of_a_mesh_and_the_next_cell_starts_another(run: object) -> None:
    with kernel() as front:
        cell = front.send("'first'")
        front.until(cell, lambda _: front.ask("kernel_info_request", {})["status"] == "ok")
        front.interrupt()
        front.wait(cell)
        if cell.status == "error":  # else it was up before we got there
            assert cell.reply["ename"] == "KeyboardInterrupt"
        assert front.run("'second'").result == "'second'"
