"""What cells showed, read afterwards: by the program that ran them, and by one that attaches when theirs is gone."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.past_cells import PastCell
from meshbook.controller.starting import attach
from meshbook.errors import CellError
from tests.budget import WAIT_S, when
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")

PROGRAM = """
import meshbook
mesh = meshbook.create_mesh(2, name={name!r}, orphan_ttl_s=60)
mesh.run("first = 1", echo=False)
mesh.run({source!r}, ranks=0)
"""


def last_number(mesh: Mesh) -> int:
    number = mesh.history()[-1].number
    assert number is not None
    return number


def test_output_and_value_of_a_cell_can_be_read_again(mesh: Mesh) -> None:
    def run() -> PastCell:
        mesh.run("print('to all')\nif rank == 1: print('to one')\nrank * 10", echo=False)
        return mesh.history(last_number(mesh))

    # A line waits for other ranks for a tenth of a second, and one of them may be later on a busy machine.
    when(lambda: run().text == "to all\n[1] to one\n[0] 0\n[1] 10\n[2] 20\n[3] 30\n")
    past = mesh.history(last_number(mesh))
    assert (past.status, past.ranks) == ("ok", (0, 1, 2, 3))
    assert re.fullmatch(r"cell \d+ of \d\d:\d\d:\d\d on ranks 0-3: ended after \d+ ms, 2 lines", past.heading)
    assert repr(past) == f"{past.heading}\n{past.text}".rstrip("\n")


def test_an_error_can_be_read_again_with_its_traceback(mesh: Mesh) -> None:
    with pytest.raises(CellError):
        mesh.run("def fail():\n    raise ValueError('bad shard')\nif rank == 2: fail()", echo=False)
    past = mesh.history(last_number(mesh))
    assert past.status == "error"
    assert "rank 2: ValueError: bad shard" in past.text
    assert "in fail()" in past.text
    assert "ranks 0-1,3 ran to their end" in past.text


def test_a_cell_that_runs_can_be_read_so_far(mesh: Mesh, gate: Gate) -> None:
    running = mesh.run(f"print('so far', flush=True)\n{gate.wait}\nprint('the rest')", ranks=0, wait=False, echo=False)
    number = last_number(mesh)
    when(lambda: mesh.history(number).text == "so far\n")
    assert ": runs, for " in mesh.history(number).heading
    gate.open()
    running.result(WAIT_S)
    assert mesh.history(number).text == "so far\nthe rest\n"


def test_a_figure_is_kept_and_shown_as_text_where_there_is_no_page(mesh: Mesh) -> None:
    mesh.run(
        "from IPython.display import display\n"
        "class Figure:\n"
        "    def _repr_mimebundle_(self, **_): return {'text/plain': 'a figure', 'image/png': 'aGVsbG8='}\n"
        "display(Figure())",
        ranks=0,
        echo=False,
    )
    past = mesh.history(last_number(mesh))
    assert past.text == "a figure\n"
    assert [item.item.data["image/png"].strip() for item in past.items] == ["aGVsbG8="]


def test_whoever_attaches_hears_of_the_cell_that_went_on_without_its_program(
    run: object, gate: Gate, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "left-by-test"
    source = f"print('at it', flush=True)\n{gate.wait}\nprint('alone')"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(name=name, source=source)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program.stdout:
        assert program.stdout.readline() == "at it\n"
        program.send_signal(signal.SIGKILL)
        program.wait(WAIT_S)
    watched = attach(name)
    try:
        said = capfd.readouterr().err
        assert "cell 2 goes on without its client, for " in said
        assert "its output until now: mesh.history(2)" in said
        assert watched.history(2).text == "at it\n"
        gate.open()
        when(lambda: watched.history(2).status == "ok")
        attach(name).session.close()
        said = capfd.readouterr().err
        assert re.search(
            r"\[meshbook\] cell 2 went on without its client: ended after [\d.]+ m?s · its output \(2 lines\): "
            r"mesh\.history\(2\)\n",
            said,
        )
        assert watched.history(2).text == "at it\nalone\n"
        attach(name).session.close()
        assert "went on" not in capfd.readouterr().err
    finally:
        watched.stop()
