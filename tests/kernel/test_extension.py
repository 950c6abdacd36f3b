"""`%load_ext meshbook` in shells that are not ours: an ordinary ipykernel, and IPython in a terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.budget import WAIT_S, when
from tests.cli.commands import typed
from tests.kernel.frontend import FrontEnd, has_exited, kernel, shows, strip_ansi

pytestmark = pytest.mark.usefixtures("starts_kernels")


@pytest.fixture(scope="module")
def ordinary(run: object) -> Iterator[FrontEnd]:
    """An ordinary Python kernel with the extension and a mesh of two ranks."""
    with kernel(name="python3") as front:
        assert front.run("%load_ext meshbook").status == "ok"
        assert "with 2 ranks is ready" in front.run("%mesh start -n 2").stdout
        yield front


@pytest.fixture
def front(ordinary: FrontEnd) -> Iterator[FrontEnd]:
    yield ordinary
    ordinary.run("%mesh auto off")


def test_cells_stay_local_until_told_otherwise(front: FrontEnd) -> None:
    assert front.run("x = 20\nx + 1").result == "21"
    assert front.run("os.getpid()").reply["ename"] == "NameError"
    assert "runs on the ranks" in front.run("%mesh auto off").stdout
    front.run("%mesh auto on")
    assert front.run("rank + 1").result == "[0] 1\n[1] 2"
    assert front.run("%%controller\nx").result == "20"
    front.run("%mesh auto off")
    assert front.run("x").result == "20"


def test_a_cell_magic_streams_shows_values_and_binds_names(front: FrontEnd) -> None:
    cell = front.run("%%mesh\nimport torch\ny = torch.ones(2) * rank\nprint('rank', rank)\ny.sum().item()")
    assert shows(cell.stdout, "rank 0…1\n", "[0] rank 0\n", "[1] rank 1\n")
    assert cell.result == "[0] 0.0\n[1] 2.0"
    assert front.run("mesh.pull(y)[1].tolist()").result == "[1.0, 1.0]"


def test_output_of_a_cell_magic_arrives_while_it_runs(front: FrontEnd) -> None:
    cell = front.send("%%mesh\nprint('begun')\nimport time\nwhile True: time.sleep(0.01)")
    front.wait_until_shown(cell, lambda cell: "begun" in cell.stdout)
    front.interrupt()
    assert front.wait(cell).reply["ename"] == "KeyboardInterrupt"
    assert front.run("%%mesh\nrank").result == "[0] 0\n[1] 1"


def test_a_handle_works_in_local_code(front: FrontEnd) -> None:
    front.run("%%mesh\nclass Box:\n    def __init__(self, side): self.side = side\nbox = Box(3)")
    assert front.run("int(box.side) + 1").result == "4"


def test_an_error_of_an_operation_on_remote_tensors_shows_the_users_line(front: FrontEnd) -> None:
    front.run("%%mesh\nimport torch\nxt_w = torch.ones(4, 3)")
    shown = front.run("import torch\nxt_w @ torch.ones(5, 5)").traceback
    assert "----> 2 xt_w @ torch.ones(5, 5)" in shown
    assert "meshbook/" not in shown


def test_loading_twice_does_no_harm(front: FrontEnd) -> None:
    front.run("%load_ext meshbook")
    assert front.run("%reload_ext meshbook").status == "ok"
    assert front.run("%%mesh\nworld_size").result == "2"


def test_the_mesh_ends_with_the_kernel(run: object) -> None:
    with kernel(name="python3") as front:
        front.run("%load_ext meshbook\n%mesh start -n 1")
        pids = front.pids()
    for name, pid in pids.items():
        when(lambda pid=pid: has_exited(pid), f"the end of the {name}")  # type: ignore[misc]


def test_unloading_takes_the_magics_away(run: object) -> None:
    with kernel(name="python3") as front:
        front.run("%load_ext meshbook")
        front.run("%mesh auto on")
        front.run("%unload_ext meshbook")
        assert "not found" in front.run("%mesh status").text
        assert front.run("1 + 1").result == "2"
        front.run("%load_ext meshbook")
        assert "no mesh yet" in (front.run("%mesh").result or "")


def test_ipython_in_a_terminal_runs_cells_on_ranks_and_leaves_nothing(run: object) -> None:
    cells = [
        "%load_ext meshbook",
        "%mesh start -n 2 --name in-a-terminal",
        "%mesh auto on",
        "print('rank', rank)",
        "rank * 10",
        "1 / rank",
        "%mesh list",
    ]
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-confirm-exit", "--colors=nocolor", "--quiet"]
    done = subprocess.run(
        command, input="\n".join(cells) + "\n", capture_output=True, text=True, timeout=2 * WAIT_S, check=True
    )
    text = strip_ansi(done.stdout)
    assert shows(text, "rank 0…1\n", "[0] rank 0\n", "[1] rank 1\n")
    assert re.search(r"Out\[\d+\]: \n\[0\] 0\n\[1\] 10\n", text)
    assert "rank 0: ZeroDivisionError: division by zero" in text
    assert re.search(r"in-a-terminal +2 ranks", text)
    assert "in-a-terminal" not in typed("list").out
