"""Axes and selections as they are typed, and what is said of those that do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import MeshShapeError
from meshbook.mesh_axes import MeshAxes
from meshbook.selections import parse_axes, parse_selection

NAMES = ("pp", "dp", "tp", "ep")
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
meshes = shapes.map(lambda shape: MeshAxes.of(dict(zip(NAMES, shape, strict=False))))
grid_22 = MeshAxes.of({"dp": 2, "tp": 2})


def test_axes_are_read_as_they_are_typed():
    assert parse_axes("dp=2,tp=2") == grid_22
    assert parse_axes(" dp = 2 , tp=2 ") == grid_22
    assert parse_axes("dp=2 tp=2") == grid_22
    assert parse_axes("4") == MeshAxes.of(4)


@given(meshes)
def test_axes_read_back_as_they_are_shown(mesh):
    assert parse_axes(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["dp", "dp=", "=2", "dp=two", "dp=2,4", "dp=-2", "2,2"])
def test_axes_that_cannot_be_read_are_shown_how_to_write_them(text):
    with pytest.raises(MeshShapeError, match="write them like dp=2,tp=2"):
        parse_axes(text)


def test_nothing_is_not_axes():
    with pytest.raises(MeshShapeError, match="no axes are named; write them like"):
        parse_axes("  ")


def test_an_axis_is_named_once_in_a_text():
    with pytest.raises(MeshShapeError, match="axis dp is there twice"):
        parse_axes("dp=2,dp=2")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("*", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("[0, 2-3]", (0, 2, 3)),
        ("3 1", (1, 3)),
        ("dp=0", (0, 1, 2, 3)),
        ("dp=0,tp=0-1", (0, 1)),
        ("dp=0 tp=1", (1,)),
        ("dp = 1, tp = 0", (4,)),
        ("tp=0,2-3", (0, 2, 3, 4, 6, 7)),
        ("tp=0,3,dp=1", (4, 7)),
        ("tp=all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("dp=1,tp=*", (4, 5, 6, 7)),
    ],
)
def test_a_selection_names_ranks_or_places(text, ranks):
    assert parse_selection(MeshAxes.of({"dp": 2, "tp": 4}), text) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", r"rank 8 is not in this mesh of 8 ranks \(0-7\)"),
        ("0-99999999999999", r"rank 99999999999999 is not in this mesh"),
        ("dpp=0", r"there is no axis 'dpp' .*did you mean dp\?"),
        ("dp=2", r"dp=2 is out of range: axis dp has size 2 \(0-1\)"),
        ("dp=0-99999999999999", "dp=99999999999999 is out of range"),
        ("dp=x", "dp=x does not name places on an axis; write it like dp=0 or dp=0,2-3"),
        ("dp=", "does not name places on an axis"),
        ("dp=1-0", "does not name places on an axis"),
        ("dp=0,dp=1", "axis dp is chosen twice in 'dp=0,dp=1'; write dp=0,1 for two places"),
        ("0,dp=1", "'0,dp=1' mixes ranks and axes"),
        ("two", "'two' is not a list of ranks; write it like 0 or 0,2-3"),
        ("3-1", "runs backwards; write 1-3"),
    ],
)
def test_a_selection_that_fits_nothing_says_what_would(text, message):
    with pytest.raises(MeshShapeError, match=message):
        parse_selection(MeshAxes.of({"dp": 2, "tp": 4}), text)


def test_a_selection_of_a_slice_speaks_of_the_slice():
    part = MeshAxes.of({"dp": 2, "tp": 2}).slice(tp=1)
    assert parse_selection(part, "dp=1") == (3,)
    assert parse_selection(part, "1,3") == (1, 3)
    with pytest.raises(MeshShapeError, match=r"rank 2 is not in this mesh of 2 ranks \(1,3\)"):
        parse_selection(part, "1-3")
