"""Pieces of tensors, held against torch's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import tensor as torch_tensor

from meshbook.errors import PlacementError
from meshbook.placement import Partial, Replicate, Shard, check_dim, local_spans, parse_placements, shard_spans


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_are_cut_where_torch_cuts_them(length, num_shards):
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(num_shards)] if length else []
    pieces = [list(range(start, stop)) for start, stop in shard_spans(length, num_shards)]
    assert len(pieces) == num_shards
    assert [piece for piece in pieces if piece] == [chunk for chunk in chunks if chunk]
    assert [number for piece in pieces for number in piece] == list(range(length))


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    st.data(),
)
def test_the_boxes_of_sharded_axes_tile_the_tensor(shape, mesh_shape, data):
    placements = [Shard(data.draw(st.integers(-len(shape), len(shape) - 1))) for _ in mesh_shape]
    seen = torch.zeros(shape, dtype=torch.int64)
    for point in itertools.product(*map(range, mesh_shape)):
        box = local_spans(shape, placements, mesh_shape, point)
        seen[tuple(slice(start, stop) for start, stop in box)] += 1
    assert torch.equal(seen, torch.ones(shape, dtype=torch.int64))


def test_two_axes_may_cut_one_dim_the_outer_one_first():
    spans = [local_spans((10,), (Shard(0), Shard(0)), (2, 2), point) for point in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert spans == [((0, 3),), ((3, 5),), ((5, 8),), ((8, 10),)]


def test_replicas_and_partials_are_of_full_size():
    assert local_spans((4, 6), (Replicate(), Partial("avg")), (2, 2), (1, 1)) == ((0, 4), (0, 6))


def test_a_dim_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(PlacementError, match=r"Shard\(dim=2\) needs dim 2, .* shape \(4, 6\) has dims 0-1"):
        local_spans((4, 6), (Shard(2),), (2,), (0,))
    with pytest.raises(PlacementError, match=r"shape \(\) has no dims"):
        check_dim(0, ())
    assert check_dim(-1, (4, 6)) == 1


def test_there_is_one_placement_for_each_axis():
    with pytest.raises(PlacementError, match=r"1 placements for a mesh of 2 axes \(2, 2\); give one per axis"):
        local_spans((4,), (Shard(0),), (2, 2), (0, 0))


@pytest.mark.parametrize(
    "placements",
    [
        (torch_tensor.Shard(0),),
        (torch_tensor.Replicate(),),
        (torch_tensor.Partial(),),
        (torch_tensor.Shard(1), torch_tensor.Replicate(), torch_tensor.Partial("max")),
        (torch_tensor.Shard(-1), torch_tensor.Shard(0)),
        (),
    ],
)
def test_what_torch_writes_is_read_back(placements):
    ours = parse_placements(repr(placements))
    assert repr(ours) == repr(placements)
    assert parse_placements(", ".join(str(placement) for placement in placements)) == ours


def test_a_placement_that_is_none_of_the_three_is_refused():
    with pytest.raises(PlacementError, match="other than Shard, Replicate and Partial: _StridedShard"):
        parse_placements("(Shard(dim=0), _StridedShard(dim=0, sf=2))")
    with pytest.raises(PlacementError, match=r"Partial\(total\) is not a reduction; use one of sum, avg"):
        parse_placements("Partial(total)")
