"""Drawings of where a tensor lies, and numbers about its numbers."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.mesh_axes import MeshAxes
from meshbook.tensors import display

AXES = MeshAxes.of({"dp": 2, "tp": 2})


def test_parts_are_the_different_boxes_with_all_that_hold_them() -> None:
    parts = display.shard_boxes((6, 4), (Shard(0), Replicate()), AXES)
    assert [(str(part), part.ranks) for part in parts] == [("[0:3, 0:4]", (0, 1)), ("[3:6, 0:4]", (2, 3))]
    parts = display.shard_boxes((6, 4), (Shard(0), Shard(1)), AXES)
    assert [part.ranks for part in parts] == [(0,), (1,), (2,), (3,)]


def test_a_drawing_has_a_box_for_each_part_and_a_cell_for_each_rank() -> None:
    page = display.html_of((6, 4), torch.float32, (Shard(0), Replicate()), AXES)
    tensor, mesh = re.findall(r"<svg.*?</svg>", page)
    assert tensor.count("<rect") == 2
    assert "dim 0 (6) x dim 1 (4)" in tensor
    assert mesh.count("<rect") == 4
    assert "dp=2 x tp=2" in mesh
    fills = [re.findall(r'fill="(#[0-9a-f]{6})" stroke', svg) for svg in (tensor, mesh)]
    assert fills == [list(display.COLOURS[:2]), [display.COLOURS[place] for place in (0, 0, 1, 1)]]
    assert "(6, 4) float32 · dp=2: dim 0 cut, tp=2: whole · 96 B" in page


def test_parts_of_a_sum_scalars_empty_pieces_and_per_rank_tensors_can_be_drawn() -> None:
    partial = display.html_of((6,), torch.int64, (Partial(), Replicate()), AXES)
    assert "parts of a sum" in partial
    assert "stroke-dasharray" in partial
    assert "one number" in display.html_of((), torch.float32, (Replicate(), Replicate()), AXES)
    assert display.html_of((1, 4), torch.float32, (Shard(0), Shard(0)), AXES).count("<title>") == 1
    assert "one on each of 4 ranks" in display.html_of((2,), torch.float32, None, AXES)
    boxes = display.shard_boxes((4,), (Shard(0), Replicate()), AXES)
    assert [(box.ranks, str(box)) for box in boxes] == [((0, 1), "[0:2]"), ((2, 3), "[2:4]")]


@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()]])
def test_stats_are_those_of_the_whole_tensor(mesh22: Mesh, placements: list[object]) -> None:
    x = torch.linspace(-1, 2, 35).reshape(7, 5)
    x[2, 3] = math.nan
    found = meshbook.distribute(x, mesh22, placements).stats()
    kept = x[~x.isnan()]
    assert (found.min, found.max, found.num_nan, found.num_elements) == (-1.0, 2.0, 1, 35)
    assert found.mean == pytest.approx(kept.double().mean().item())
    assert str(found).startswith("min -1, max 2, mean ")


def test_stats_of_parts_of_a_sum_and_of_other_kinds(mesh22: Mesh) -> None:
    total = meshbook.distribute(torch.arange(8.0), mesh22, [Shard(0), Replicate()]).sum()
    assert total.stats().max == 28.0
    assert meshbook.distribute(torch.tensor([True, False, True]), mesh22).stats().mean == pytest.approx(2 / 3)
    assert meshbook.distribute(torch.full((3,), math.nan), mesh22).stats().num_nan == 3


def test_a_tensor_shows_itself_in_html_without_asking_the_ranks(mesh22: Mesh) -> None:
    x = meshbook.distribute(torch.zeros(8, 8), mesh22, [Shard(1), Replicate()])
    x.engine.wait()  # a thread sends what is pending, a little later
    before = x.engine.sender.num_batches
    page = x._repr_html_()
    assert "dp=2: dim 1 cut" in page
    assert x.engine.sender.num_batches == before


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor([1, 2]), "RemoteTensor([1, 2], placements=(S(0)) on dp=2)"),
        (torch.tensor([0.5, 2]).bfloat16(), "RemoteTensor([0.5000, 2.0000], dtype=torch.bfloat16, placements=(S(0))"),
        (torch.zeros(4000), "RemoteTensor(shape=(4000,), placements=(S(0)) on dp=2)"),
        (torch.zeros(4000).int(), "RemoteTensor(shape=(4000,), dtype=torch.int32, placements=(S(0)) on dp=2)"),
    ],
)
def test_what_is_printed_names_a_dtype_once_where_torch_does(mesh2: Mesh, tensor: torch.Tensor, text: str) -> None:
    assert repr(meshbook.distribute(tensor, mesh2, sharding_spec=["dp"])).startswith(text)
