"""A mesh that a test has broken is not handed on, and the test that broke it fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from meshbook.controller.mesh import Mesh
from tests.budget import WAIT_S, when
from tests.shared import SharedMesh

pytestmark = pytest.mark.usefixtures("starts_meshes")


@pytest.fixture
def shared() -> Iterator[SharedMesh]:
    shared = SharedMesh({"dp": 2})
    yield shared
    shared.close()


def kill_a_rank(mesh: Mesh) -> None:
    os.kill(mesh.execute(os.getpid)[1], signal.SIGKILL)
    when(lambda: mesh.session.lost == (1,))


def lose_a_rank_unnoticed(mesh: Mesh) -> None:
    mesh.run("if rank == 1: __import__('os')._exit(3)", wait=False, echo=False).exception(WAIT_S)


@pytest.mark.parametrize("break_it", [kill_a_rank, lose_a_rank_unnoticed, Mesh.stop])
def test_a_broken_mesh_fails_its_test_and_the_next_one_gets_another(
    shared: SharedMesh, break_it: Callable[[Mesh], None]
) -> None:
    mesh = shared.get()
    break_it(mesh)
    with pytest.raises(pytest.fail.Exception, match="this test has left the shared mesh broken"):
        shared.check()
    assert shared.get() is not mesh
    assert shared.get().run("rank", echo=False).values[1] == 1


def test_a_mesh_that_works_is_kept_also_after_an_error_in_a_cell(shared: SharedMesh) -> None:
    mesh = shared.get()
    with pytest.raises(Exception, match="ValueError"):
        mesh.run("if rank == 1: raise ValueError\ndist.barrier()", echo=False)
    shared.check()
    assert shared.get() is mesh


def test_a_lost_rank_is_no_error_of_the_test_that_heals_it(shared: SharedMesh) -> None:
    mesh = shared.get()
    kill_a_rank(mesh)
    mesh.heal()
    shared.check()
    assert shared.get() is mesh
