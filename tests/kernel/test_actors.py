"""Actors from a notebook: the table, cells inside actors, and a class cell that is run again."""

from __future__ import annotations

import re

import pytest

from tests.kernel.frontend import FrontEnd, strip_ansi

pytestmark = pytest.mark.usefixtures("starts_kernels")

CLASS = """%%controller
from meshbook.actor import Actor, endpoint

class Greeter(Actor):
    def __init__(self, name):
        self.name = name

    @endpoint
    def greet(self):
        return "{word} " + self.name
"""


def test_actors_live_beside_cells_and_take_new_methods_when_their_cell_is_run_again(shared: FrontEnd) -> None:
    assert shared.run(CLASS.replace("{word}", "hello")).status == "ok"
    assert shared.run("%%controller\ngreeters = mesh.spawn('greeters', Greeter, 'you')").status == "ok"
    greet = "%%controller\nlist(greeters.greet.call().get(60).values())"
    assert shared.run(greet).result == "['hello you', 'hello you']"
    again = shared.run(CLASS.replace("{word}", "bye"))
    assert again.stdout == "greeters runs the new Greeter (changed: greet)\n"
    assert shared.run(greet).result == "['bye you', 'bye you']"
    assert shared.run(CLASS.replace("{word}", "bye")).stdout == "greeters runs the new Greeter (nothing differs)\n"

    assert shared.run("%%controller\ngreeters.state.name = 'all'\ngreeters.state.name").result == "'all'"
    shared.run("place = 10 * rank")
    inside = shared.run("%%mesh --actor greeters\nself.name += str(place)\nself.greet()")
    assert inside.result == "[0] 'bye all0'\n[1] 'bye all10'"
    failed = shared.run("%%mesh --actor greeters\nself.nmae")
    assert failed.status == "error"
    assert "nmae" in strip_ansi(failed.traceback)

    shared.run("%%controller\ngreeters.state.name = 3")
    raised = strip_ansi(shared.run(greet).traceback)
    assert "greeters.greet failed.\nranks 0-1: TypeError: can only concatenate" in raised
    assert re.search(r"Cell In\[\d+\], line 10, in greet\n    return \"bye \" \+ self.name\n", raised), raised
    assert "futures.py" not in raised

    table = shared.run("%mesh actors").result
    assert table is not None
    assert table.splitlines()[0] == "All actors: 2 in 1 mesh."
    assert table.splitlines()[2].split()[:4] == ["greeters", "Greeter", "0-1", "living"]
    assert shared.run("%%controller\nmesh.actors()").result == table.replace("All actors", "Mesh " + mesh_name(shared))
    assert shared.run("%%controller\ngreeters.stop().get(60)").status == "ok"
    assert "no actors" in str(shared.run("%mesh actors").result)


def mesh_name(front: FrontEnd) -> str:
    return str(front.run("%%controller\nmesh.name").result).strip("'")


def test_a_slip_in_the_line_is_answered_with_how_it_is_written(shared: FrontEnd) -> None:
    slip = shared.run("%%mesh --actor greeters --ranks 0\n1")
    assert slip.reply["ename"] == "UsageError"
    assert "--actor NAME stands alone" in slip.reply["evalue"]
    unknown = shared.run("%%mesh --actor nobody\n1")
    assert unknown.reply["ename"] == "MeshNameError"
