"""Axes, points and slices, and what is said of those that do not fit."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import MeshbookError, MeshShapeError
from meshbook.mesh_axes import MAX_RANKS, MeshAxes

NAMES = ("pp", "dp", "tp", "ep")
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
meshes = shapes.map(lambda shape: MeshAxes.of(dict(zip(NAMES, shape, strict=False))))
grid_22 = MeshAxes.of({"dp": 2, "tp": 2})


# ---------------------------------------------------------------------------------------------------------------------
# Ways to ask for one


def test_a_number_alone_is_one_axis_called_rank():
    mesh = MeshAxes.of(4)
    assert (mesh.names, mesh.shape, mesh.ranks, mesh.size) == (("rank",), (4,), (0, 1, 2, 3), 4)


def test_named_axes_keep_their_order():
    mesh = MeshAxes.of({"tp": 2, "dp": 3})
    assert mesh.axes == {"tp": 2, "dp": 3}
    assert list(mesh.axes) == ["tp", "dp"]
    assert mesh.ranks == tuple(range(6))


def test_nodes_and_gpus_per_node_are_the_axes_node_and_gpu():
    assert MeshAxes.of(nodes=2, gpus_per_node=3).axes == {"node": 2, "gpu": 3}
    assert MeshAxes.of(nodes=2).axes == {"node": 2, "gpu": 1}
    assert MeshAxes.of(gpus_per_node=2).axes == {"node": 1, "gpu": 2}


def test_pytorchs_spelling_makes_the_same_mesh():
    assert MeshAxes.of(shape=(2, 2), mesh_dim_names=("dp", "tp")) == grid_22
    assert MeshAxes.of(shape=[2, 2], mesh_dim_names=["dp", "tp"]) == grid_22
    assert MeshAxes.of(shape=(4,)).names == ("rank",)
    assert MeshAxes.of(shape=4) == MeshAxes.of(4)
    assert MeshAxes.of(shape=(2, 2)).names == ("axis0", "axis1")


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_is_an_int_of_one_or_more(size):
    with pytest.raises(MeshShapeError, match=r"axis dp has size .*; a size is an int of 1 or more"):
        MeshAxes.of({"dp": size})
    with pytest.raises(MeshShapeError):
        MeshAxes.of(shape=size)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        *(
            (arguments, "give a mesh its size in one way")
            for arguments in (
                {},
                {"axes": 4, "nodes": 2},
                {"axes": 4, "shape": (4,)},
                {"shape": (4,), "gpus_per_node": 4},
                {"axes": 4, "mesh_dim_names": ("dp",)},
            )
        ),
        *(({"axes": axes}, "a number or a dict of axes") for axes in ("4", 2.0, True, [2, 2])),
        *(({"axes": {name: 2}}, "cannot name an axis") for name in ("", "2x", "d p", "for", 3)),
        ({"shape": (2, 2), "mesh_dim_names": ("dp",)}, r"2 sizes \(2, 2\) but 1 name \('dp',\)"),
        ({"shape": (2, 2), "mesh_dim_names": ("dp", "dp")}, r"axis dp is there twice in \(dp, dp\)"),
        ({"axes": {}}, "at least one axis"),
        ({"axes": {"dp": 10**6, "tp": 10**6}}, r"dp=1000000 \* tp=1000000 need 1,000,000,000,000 ranks"),
    ],
)
def test_what_makes_no_mesh_is_refused_with_the_reason(arguments, complaint):
    with pytest.raises(MeshShapeError, match=complaint):
        MeshAxes.of(**arguments)


def test_a_mesh_may_have_the_most_ranks_that_are_allowed():
    assert MeshAxes.of(MAX_RANKS).size == MAX_RANKS


def test_a_mesh_cannot_be_changed():
    with pytest.raises(AttributeError):
        grid_22.shape = (4,)  # type: ignore[misc]


def test_equal_meshes_are_interchangeable():
    assert {grid_22: 1}[MeshAxes.of({"dp": 2, "tp": 2})] == 1
    assert grid_22 != MeshAxes.of({"dp": 2, "pp": 2})


# ---------------------------------------------------------------------------------------------------------------------
# Points and ranks


def test_the_last_axis_runs_fastest():
    mesh = MeshAxes.of({"dp": 2, "tp": 3})
    assert [mesh.point(rank) for rank in (0, 1, 3)] == [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}]
    assert mesh.grid() == [[0, 1, 2], [3, 4, 5]]


@given(meshes)
def test_a_rank_and_its_point_say_the_same(mesh):
    points = itertools.product(*map(range, mesh.shape))
    for rank, place in zip(mesh.ranks, points, strict=True):
        assert tuple(mesh.point(rank).values()) == place
        assert mesh.rank_at(**mesh.point(rank)) == rank
        assert mesh.ranks[mesh.index(rank)] == rank


def test_an_axis_of_size_one_need_not_be_named():
    mesh = MeshAxes.of({"pp": 1, "dp": 2})
    assert mesh.rank_at(dp=1) == 1


def test_a_point_must_be_one_rank():
    with pytest.raises(MeshShapeError, match=r"dp=1, tp=0 names one rank of dp=2,tp=2; tp is not given"):
        grid_22.rank_at(dp=1)


def test_a_negative_place_counts_from_the_end():
    assert grid_22.rank_at(dp=-1, tp=-2) == 2


def test_an_unknown_rank_is_answered_with_those_there_are():
    with pytest.raises(MeshShapeError, match=r"^rank 7 is not in this mesh of 4 ranks \(0-3\)$"):
        MeshAxes.of(4).point(7)
    with pytest.raises(MeshShapeError, match=r"^ranks 0,2 are not in this mesh of 2 ranks \(1,3\)$"):
        grid_22.slice(tp=1).check_ranks((2, 0, 1))


def test_ranks_are_given_back_sorted_and_once():
    assert MeshAxes.of(4).check_ranks([3, 1, 3]) == (1, 3)


def test_no_ranks_are_refused():
    with pytest.raises(MeshShapeError, match=r"no ranks are chosen of this mesh of 4 ranks"):
        MeshAxes.of(4).check_ranks([])


def test_a_mesh_error_is_also_a_value_error():
    assert issubclass(MeshShapeError, ValueError)
    assert issubclass(MeshShapeError, MeshbookError)


# ---------------------------------------------------------------------------------------------------------------------
# Slices


def test_an_int_drops_its_axis_and_a_slice_keeps_it():
    mesh = MeshAxes.of({"dp": 2, "tp": 4})
    assert mesh.slice(dp=1) == MeshAxes(("tp",), (4,), (4, 5, 6, 7))
    assert mesh.slice(tp=slice(0, 2)) == MeshAxes(("dp", "tp"), (2, 2), (0, 1, 4, 5))
    assert mesh.slice(tp=slice(None, None, 2)).ranks == (0, 2, 4, 6)
    assert mesh.slice(dp=0, tp=slice(1, 2)) == MeshAxes(("tp",), (1,), (1,))
    assert mesh.slice() == mesh


def test_a_slice_knows_the_points_of_its_own_axes():
    part = MeshAxes.of({"dp": 2, "tp": 2}).slice(tp=1)
    assert part.ranks == (1, 3)
    assert part.point(3) == {"dp": 1}
    assert part.rank_at(dp=1) == 3
    assert 3 in part
    assert 2 not in part


def test_a_single_point_is_a_mesh_without_axes():
    point = grid_22.slice(dp=1, tp=0)
    assert (point.names, point.shape, point.ranks, point.size) == ((), (), (2,), 1)
    assert point.point(2) == {}
    assert point.rank_at() == 2
    assert point.grid() == 2
    with pytest.raises(MeshShapeError, match="there is no axis 'dp': this mesh is the single rank 2"):
        point.slice(dp=0)


@given(meshes, st.data())
def test_groups_along_an_axis_part_the_mesh(mesh, data):
    axis = data.draw(st.sampled_from(mesh.names))
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
    for group in groups:
        assert len(group) == mesh.size_of(axis)
        others = [{name: at for name, at in mesh.point(rank).items() if name != axis} for rank in group]
        assert all(point == others[0] for point in others)
        assert [mesh.point(rank)[axis] for rank in group] == list(range(len(group)))


@given(meshes, st.data())
def test_a_slice_holds_exactly_the_ranks_at_its_places(mesh, data):
    which: dict[str, int | slice] = {}
    for name, size in mesh.axes.items():
        bound = st.none() | st.integers(-size, size)
        part = data.draw(st.none() | st.integers(-size, size - 1) | st.builds(slice, bound, bound))
        if part is not None:
            which[name] = part
    places = [
        range(size)[part] if isinstance(part := which.get(name, slice(None)), slice) else (part % size,)
        for name, size in mesh.axes.items()
    ]
    if not all(places):
        with pytest.raises(MeshShapeError, match="leaves nothing"):
            mesh.slice(**which)
        return
    expected = tuple(mesh.rank_at(**dict(zip(mesh.names, point, strict=True))) for point in itertools.product(*places))
    part = mesh.slice(**which)
    assert part.ranks == expected
    assert part.names == tuple(name for name in mesh.names if not isinstance(which.get(name), int))
    assert math.prod(part.shape) == part.size


def test_an_unknown_axis_is_answered_with_the_one_that_was_meant():
    with pytest.raises(MeshShapeError, match=r"there is no axis 'dpp' in the mesh dp=2,tp=2; did you mean dp\?"):
        grid_22.slice(dpp=0)
    with pytest.raises(MeshShapeError, match=r"there is no axis 'zzz' .*; its axes are dp, tp"):
        grid_22.size_of("zzz")


def test_a_place_beyond_the_axis_is_answered_with_its_size():
    with pytest.raises(MeshShapeError, match=r"dp=2 is out of range: axis dp has size 2 \(0-1\)"):
        grid_22.slice(dp=2)
    with pytest.raises(MeshShapeError, match=r"dp=-3 is out of range"):
        grid_22.slice(dp=-3)


@pytest.mark.parametrize("part", [1.0, "0", None, True, [0]])
def test_a_place_is_an_int_or_a_slice(part):
    with pytest.raises(MeshShapeError, match="neither an int nor a slice"):
        grid_22.slice(dp=part)


def test_a_slice_that_leaves_nothing_is_refused():
    with pytest.raises(MeshShapeError, match=r"dp=2:4 leaves nothing of axis dp, which has size 2"):
        grid_22.slice(dp=slice(2, 4))


def test_a_slice_that_turns_the_order_around_is_refused():
    with pytest.raises(MeshShapeError, match=r"dp=::-1 has step -1; ranks keep their order"):
        grid_22.slice(dp=slice(None, None, -1))
    with pytest.raises(MeshShapeError, match="has a bound that is not an int"):
        grid_22.slice(dp=slice("a", None))


def test_indexing_goes_along_the_first_axis():
    mesh = MeshAxes.of({"dp": 3, "tp": 2})
    assert mesh.select(0) == mesh.slice(dp=0)
    assert mesh.select(slice(1, 3)) == mesh.slice(dp=slice(1, 3))
    assert mesh.select((1, slice(1, None))) == mesh.slice(dp=1, tp=slice(1, None))
    with pytest.raises(MeshShapeError, match="3 indices for a mesh of 2 axes"):
        mesh.select((0, 0, 0))
    with pytest.raises(MeshShapeError, match="dp=3 is out of range"):
        mesh.select(3)


# ---------------------------------------------------------------------------------------------------------------------
# Other names for the same ranks


def test_flattening_keeps_the_ranks_in_grid_order():
    mesh = MeshAxes.of({"dp": 2, "tp": 2}).slice(tp=slice(1, 2))
    assert mesh.flatten("replica") == MeshAxes(("replica",), (2,), (1, 3))
    assert mesh.flatten().names == ("rank",)


def test_renaming_changes_names_only():
    assert grid_22.rename(dp="replica") == MeshAxes(("replica", "tp"), (2, 2), (0, 1, 2, 3))
    assert grid_22.rename(dp="tp", tp="dp").names == ("tp", "dp")
    with pytest.raises(MeshShapeError, match="axis tp is there twice"):
        grid_22.rename(dp="tp")
    with pytest.raises(MeshShapeError, match="there is no axis 'pp'"):
        grid_22.rename(pp="x")


@given(meshes, st.data())
def test_splitting_undoes_flattening(mesh, data):
    open_axis = data.draw(st.none() | st.sampled_from(mesh.names))
    sizes = {name: -1 if name == open_axis else size for name, size in mesh.axes.items()}
    assert mesh.flatten("all").split("all", **sizes) == mesh


def test_splitting_leaves_the_other_axes_where_they_are():
    mesh = MeshAxes.of({"host": 2, "gpu": 4}).split("gpu", dp=2, tp=-1)
    assert mesh.axes == {"host": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "tp": 3}, r"axis rank=8 cannot be split into dp=2 \* tp=3 = 6"),
        ({"dp": 3, "tp": -1}, r"axis rank=8 cannot be split into dp=3 \* tp=-1: 8 is not a multiple of 3"),
        ({"dp": -1, "tp": -1}, "only one size may be -1, but dp and tp are"),
        ({"dp": 0, "tp": 8}, "axis dp has size 0"),
        ({}, "is split into named sizes"),
    ],
)
def test_a_split_that_does_not_multiply_up_shows_the_sum(sizes, message):
    with pytest.raises(MeshShapeError, match=message):
        MeshAxes.of(8).split("rank", **sizes)
