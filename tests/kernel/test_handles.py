"""Handles in the controller's namespace: they come, make way and go."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.session import Session
from meshbook.kernel.handles import PRESET, HandleNamespace
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import Outcome, OutcomeGroup

pytestmark = pytest.mark.usefixtures("starts_kernels")


def mesh(*names: str) -> Mesh:
    """A mesh of two ranks as far as names go: nobody answers behind it."""
    grid = MeshAxes.of(2)
    session = _Session(axes=grid, name="m", ended=None, lost=(), info=SimpleNamespace(names=names))
    return Mesh.of(cast(Session, session), grid)


class _Session(SimpleNamespace):
    """Compared and hashed as the one that it is."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Side:
    """A namespace with handles, and what the user was warned of."""

    def __init__(self, **users: Any) -> None:
        self.namespace: dict[str, Any] = dict(users)
        self.warned: list[str] = []
        self.names = HandleNamespace(self.namespace, {}, self.warned.append)
        self.mesh = mesh()
        self.names.switch_mesh(self.mesh)

    def bound(self, *names: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.names.update(self.mesh.session, (OutcomeGroup(ranks, Outcome("ok", bound_names=names)),))

    def deleted(self, *names: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.names.update(self.mesh.session, (OutcomeGroup(ranks, Outcome("ok", deleted_names=names)),))

    def ranks_of(self, name: str) -> tuple[int, ...]:
        held = self.namespace[name]
        assert isinstance(held, RemoteValue)
        return tuple(held._meshbook_ranks)


@pytest.fixture
def side() -> Side:
    return Side()


def test_a_name_that_a_cell_bound_is_a_handle_and_one_that_it_deleted_is_gone(side: Side) -> None:
    side.bound("x")
    assert side.ranks_of("x") == (0, 1)
    side.deleted("x")
    assert "x" not in side.namespace


def test_names_that_are_there_from_the_start_are_handles_and_mesh_is_the_mesh(side: Side) -> None:
    assert all(isinstance(side.namespace[name], RemoteValue) for name in PRESET)
    assert side.namespace["mesh"] is side.mesh
    side.bound("mesh")
    assert side.namespace["mesh"] is side.mesh


def test_a_handle_is_of_the_ranks_that_have_the_name(side: Side) -> None:
    side.bound("x", ranks=(1,))
    assert side.ranks_of("x") == (1,)
    side.bound("x", ranks=(0,))
    assert side.ranks_of("x") == (0, 1)
    side.deleted("x", ranks=(1,))
    assert side.ranks_of("x") == (0,)


def test_a_name_of_the_users_stays_and_the_user_is_told_once() -> None:
    side = Side(lr=0.1)
    side.bound("lr")
    side.bound("lr")
    assert side.namespace["lr"] == 0.1
    assert side.warned == ["lr"]
    side.deleted("lr")
    assert side.namespace["lr"] == 0.1


def test_a_module_that_was_imported_on_both_sides_is_no_conflict() -> None:
    side = Side(math=math)
    side.bound("math")
    assert side.namespace["math"] is math
    assert side.warned == []


def test_when_the_user_deletes_the_own_name_the_ranks_takes_its_place() -> None:
    side = Side(lr=0.1)
    side.bound("lr")
    del side.namespace["lr"]
    side.bound("lr")
    assert side.ranks_of("lr") == (0, 1)


def test_a_handle_that_the_user_copied_makes_way(side: Side) -> None:
    side.bound("x")
    side.namespace["y"] = side.namespace["x"]
    side.bound("y")
    assert str(side.namespace["y"]._meshbook_path) == "y"
    assert side.warned == []


def test_the_same_handle_stays_while_the_name_is_bound_again(side: Side) -> None:
    side.bound("x")
    before = side.namespace["x"]
    side.bound("x")
    assert side.namespace["x"] is before


def test_what_the_shell_put_there_is_never_taken() -> None:
    side = Side(In=[], get_ipython=len)
    side.bound("In", "get_ipython", "exit")
    assert side.namespace["In"] == []
    assert side.namespace["get_ipython"] is len
    assert side.warned == []


def test_another_mesh_brings_its_own_names_and_takes_the_firsts_away(side: Side) -> None:
    side.bound("x")
    other = mesh("z")
    side.names.switch_mesh(other)
    assert "x" not in side.namespace
    assert side.namespace["z"]._meshbook_session is other.session
    assert side.namespace["mesh"] is other
    side.bound("late")  # a cell of the first mesh that ended late
    assert "late" not in side.namespace
    side.names.switch_mesh(side.mesh)
    assert side.ranks_of("x") == side.ranks_of("late") == (0, 1)
    assert "z" not in side.namespace


def test_without_a_mesh_no_handle_is_left(side: Side) -> None:
    side.bound("x")
    side.names.switch_mesh(None)
    assert side.namespace == {}


def test_a_mesh_of_the_users_own_keeps_its_name() -> None:
    own = mesh()
    side = Side(mesh=own)
    assert side.namespace["mesh"] is own


def test_the_completer_is_shown_no_handles() -> None:
    side = Side(lr=0.1)
    side.bound("x")
    assert "lr" in side.names.without_handles()
    assert "x" not in side.names.without_handles()
