"""Why does it hang? Asked in the next cell, while the one that hangs still runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kernel.frontend import Cell, FrontEnd, kernel

pytestmark = pytest.mark.usefixtures("starts_kernels")

HANG = "if rank == 0:\n    dist.all_reduce(torch.ones(2))\nelse:\n    time.sleep(1000)"


@pytest.fixture(scope="module")
def front(run: object) -> Iterator[FrontEnd]:
    with kernel(env={"MESHBOOK_STALL_S": "3"}) as front:
        assert front.run("import time").status == "ok"
        yield front


@contextmanager
def hanging(front: FrontEnd) -> Iterator[Cell]:
    """A cell that hangs, once the notebook has said so by itself; stopped at the end."""
    cell = front.send(HANG)
    front.wait_until_shown(cell, lambda cell: "stands still" in cell.text)
    try:
        yield cell
    finally:
        front.interrupt()
        front.wait(cell)


def test_a_cell_that_hangs_is_explained_under_it_and_the_next_cell_asks_more_while_it_hangs(front: FrontEnd) -> None:
    with hanging(front) as cell:
        assert "Rank 1 sleeps at cell 2, line 4" in cell.text
        assert cell.text.count("stands still") == 1
        for line, expected in (
            ("%mesh why", "Rank 1 sleeps at cell 2, line 4 and has not come to all_reduce #1, where rank 0 waits"),
            ("%mesh stacks", "[1] > cell 2, line 4: time.sleep(1000)"),
            ("%mesh stacks 0", "dist.all_reduce(torch.ones(2))"),
            ("%mesh stacks rank=1 --twice", "(stands still)"),
            ("%mesh health", "all_reduce #1 since"),
            ("%mesh memory", "MiB"),
            ("%mesh history 2", "Rank 1 sleeps at cell 2, line 4"),
            ("%mesh logs --grep 'no such line'", "There are no lines of any rank that match 'no such line'."),
        ):
            asked = front.run(line)
            assert asked.status == "ok", asked.text
            assert expected in asked.text, line
            assert not cell.reply
        wrong = front.run("%mesh stacks 7")
        assert "MeshShapeError: rank 7 is not in this mesh of 2 ranks (0-1)" in wrong.traceback
        assert not cell.reply
    assert cell.status == "error"
    # Those that overtook it took no number away, and the kernel goes on as if they had not been.
    assert front.run("rank + 40").reply["execution_count"] == cell.reply["execution_count"] + 1
    assert "Nothing runs" in front.run("%mesh why").text


def test_logs_are_followed_beside_a_cell_until_stop_has_ended_it(front: FrontEnd) -> None:
    front.run("print('followed')")
    with hanging(front) as cell:
        following = front.send("%mesh logs -f --grep ^followed --since 1h")
        front.wait_until_shown(following, lambda following: "] followed" in following.stdout)
        assert not cell.reply
    assert front.wait(following).status == "ok", following.text


def test_cells_that_are_sent_together_keep_their_order(front: FrontEnd) -> None:
    first = front.send("print('done')")
    second = front.send("%mesh why")
    front.wait(second)
    assert "done" in first.text
    assert "Nothing runs" in second.text
