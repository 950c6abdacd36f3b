"""Actors whose program was killed: found again by name, and somebody hears of their failures once more."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import meshbook
from meshbook.actors.lookup import find_actors
from meshbook.actors.procs import this_host
from meshbook.actors.runtime.faults import MeshFailure
from meshbook.errors import MeshNameError
from tests.actors.example_actors import Counter
from tests.budget import WAIT_S, when
from tests.scripts import run_python

pytestmark = pytest.mark.usefixtures("starts_meshes")

# A class of its own, as a notebook's cell defines one, and actors on all ranks and on one.
PROGRAM = """
    import os, signal, meshbook
    from meshbook.actor import Actor, endpoint
    from tests.actors.example_actors import Counter

    class Tally(Actor):
        def __init__(self, start):
            self.count = start

        @endpoint
        def add(self, by=1):
            self.count += by
            return self.count

    mesh = meshbook.create_mesh({"dp": 2}, name="left", torch=False, orphan_ttl_s=60)
    mesh.spawn("tallies", Tally, 5).add.call(1).get(20)
    mesh.slice(dp=1).spawn("one", Counter, 7).add.call(0).get(20)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left() -> Iterator[Any]:
    done = run_python(PROGRAM)
    assert done.returncode == -signal.SIGKILL, done.stderr
    mesh = meshbook.attach("left")
    try:
        yield mesh
    finally:
        mesh.stop()


def test_actors_of_a_killed_program_are_found_by_name_and_have_a_new_owner(
    left: Any, unhandled: list[MeshFailure]
) -> None:
    this_host()  # from here on this process hears of failures
    found = left.actors()
    assert "tallies" in str(found)
    tallies = found["tallies"]
    assert tallies.extent == {"dp": 2}
    assert list(tallies.add.call(4).get(WAIT_S).values()) == [10, 10]
    with pytest.raises(TypeError, match="unexpected keyword"):  # before anything is sent
        tallies.add.call(bye=1)
    assert found["tallies"] == tallies
    assert find_actors("tallies", left) == tallies
    assert left.actors()["one"].add.call_one().get(WAIT_S) == 8
    with pytest.raises(MeshNameError, match="no actors are named 'tally'; did you mean tallies"):
        found["tally"]

    left.kill([0])
    when(lambda: unhandled)
    assert (unhandled[0].mesh_name, unhandled[0].ranks) == ("tallies", (0,))
    assert tallies.slice(dp=1).add.call_one(0).get(WAIT_S) == 10


def test_actors_whose_owner_lives_are_found_and_stay_its_own(left: Any) -> None:
    procs = this_host().spawn_procs(name="owned")
    counter = procs.spawn("owned", Counter, 3)
    program = """
        import sys, meshbook
        mesh = meshbook.attach(sys.argv[1])
        from meshbook.actors.runtime.registry import local_registry
        print(mesh.actors()["owned"].add.call_one(2).get(20), len(local_registry().owned))
    """
    mesh = counter._ref.procs_ref.mesh
    done = run_python(program, mesh)
    assert done.stdout == "5 0\n", done.stderr
    procs.stop().get(WAIT_S)
