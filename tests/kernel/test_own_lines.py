"""What an error in a cell of the notebook's own process shows: the user's lines, and not Meshbook's."""

from __future__ import annotations

import re

import pytest

from tests.kernel.frontend import FrontEnd

pytestmark = pytest.mark.usefixtures("starts_kernels")

HERE = "%%controller\nimport torch, meshbook\n"


def test_an_error_of_an_operation_on_remote_tensors_shows_the_users_line_and_no_frame_of_meshbook(
    shared: FrontEnd,
) -> None:
    shared.run("import torch; ol_w = torch.ones(4, 3)")
    shown = shared.run(HERE + "ol_w @ torch.ones(5, 5)")
    assert shown.reply["ename"] == "RuntimeError"
    assert "----> 3 ol_w @ torch.ones(5, 5)" in shown.traceback
    assert "must have same reduction dim" in shown.traceback
    assert "meshbook/" not in shown.traceback
    assert "meshbook/" not in shared.run("%%controller\n%tb").traceback
    timed = shared.run("%%controller\n%time ol_w.view(7)")
    assert "shape '[7]' is invalid" in timed.text
    assert "meshbook/" not in timed.text


def test_a_cell_here_that_does_not_compile_is_shown_as_ever(shared: FrontEnd) -> None:
    shown = shared.run("%%controller\nx = = 1").traceback
    assert shown.strip().endswith("SyntaxError: invalid syntax")
    assert "x = = 1" in shown


def test_an_error_of_a_model_on_the_ranks_shows_the_line_that_has_called_it(shared: FrontEnd) -> None:
    made = HERE + "ol_net = meshbook.distribute(torch.nn.Linear(4, 2), mesh, strategy='ddp')\nol_net(torch.ones(3, 5))"
    first = shared.run(made).traceback
    assert re.match(r"  Cell In\[\d+\], line 4, in <module>\n    ol_net\(torch.ones\(3, 5\)\)\n", first), first
    assert "ranks 0-1: RuntimeError: mat1 and mat2" in first
    assert "site-packages" not in first
    own = "class OlNet(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x).view(7)\n"
    inside = shared.run(f"{HERE}{own}ol_own = meshbook.distribute(OlNet(), mesh)\nol_own(torch.ones(2, 2))").traceback
    assert re.search(r"line 5, in OlNet\.forward\(self, x\)\n----> 5         return torch\.relu", inside), inside
    assert "site-packages" not in inside
    rows = "ol_rows = meshbook.distribute(torch.nn.Embedding(4, 2), mesh, strategy='ddp')\n"
    later = shared.run(f"{HERE}{rows}ol_rows(torch.tensor([0]))\nlate = ol_rows(torch.tensor([9]))\nlate.tolist()")
    assert re.search(r"issued here:\n  Cell In\[\d+\], line 5, in <module>\n    late = ", later.traceback), later.text
    assert "sparse.py" not in later.traceback


def test_a_failure_of_a_function_that_a_cell_defines_shows_the_cells_line(shared: FrontEnd) -> None:
    function = "%%controller\ndef ol_f(x):\n    return undefined_there + x\nprint()\nmesh.execute(ol_f, 1)"
    shown = shared.run(function).traceback
    assert re.match(r"  Cell In\[(\d+)\], line 5, in <module>\n    mesh.execute\(ol_f, 1\)\n", shown), shown
    assert re.search(r"\nCell In\[\d+\], line 3, in ol_f\(x\)\n----> 3     return undefined_there \+ x\n", shown), shown
    assert "Could not get source" not in shown
    assert "/tmp/ipykernel" not in shown


def test_a_cell_for_the_ranks_shows_nothing_of_this_process(shared: FrontEnd) -> None:
    assert shared.run("1 / 0").traceback.startswith("ranks 0-1: ZeroDivisionError")
    assert shared.run("%%mesh --ranks 0\n1 / 0").traceback.startswith("rank 0: ZeroDivisionError")


def test_source_that_a_cell_runs_on_the_ranks_has_the_number_of_that_cell(shared: FrontEnd) -> None:
    shown = shared.run("%%controller\nmesh.run('1 / 0')").traceback
    numbers = re.findall(r"Cell In\[(\d+)\], line", shown)
    assert len(numbers) == 2
    assert len(set(numbers)) == 1
    last = str(shared.run("%mesh history").result).splitlines()[-1]
    assert last.split()[0] == numbers[0]
    assert last.endswith("1 / 0")


def test_ranks_that_have_ended_a_call_of_meshbooks_own_say_it_as_one_types_it(shared: FrontEnd) -> None:
    shared.run("%mesh record off")
    assert str(shared.run("%mesh stacks").result).startswith("[0-1] have ended mesh.record()")
