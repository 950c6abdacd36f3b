"""Which placements an operation's inputs are brought to first, by the table of rules. No ranks, no DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from meshbook.mesh_axes import MeshAxes
from meshbook.rank.tensors import placement_rules as rules
from meshbook.tensors.specs import SpecTable, TensorSpec

aten = torch.ops.aten
AXES = MeshAxes.of({"dp": 2})
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def spec(shape: tuple[int, ...], placement: Any, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return SpecTable(None).intern(shape, dtype, (placement,))


@pytest.mark.parametrize(
    ("function", "args", "placement", "needed"),
    [
        (aten.cumsum.default, (0,), S0, R),
        (aten.cumsum.default, (-1,), S1, R),
        (aten.cumsum.default, (1,), S0, None),
        (aten.cumsum.default, (0,), P, R),
        (aten.flip.default, ([1, 0],), S0, R),
        (aten.roll.default, ([1],), S0, R),
        (aten.roll.default, ([1], [1]), S0, None),
        (aten.argmax.default, (), S0, R),
        (aten.argmax.default, (1,), S0, None),
        (aten.kthvalue.default, (1, 1), S0, R),
        (aten.any.default, (), P, R),
        (aten.any.default, (), S0, None),
        (aten.relu.default, (), S0, None),
    ],
)
def test_an_operation_along_a_dim_that_is_cut_sees_all_of_it(
    function: Any, args: Any, placement: Any, needed: Any
) -> None:
    moves = rules.moves_for_op(function, (None, *args), [spec((4, 6), placement)], AXES)
    assert moves == (() if needed is None else ((0, (needed,)),))


def test_a_convolution_keeps_rows_apart_and_its_weight_whole() -> None:
    image, weight = spec((4, 3, 8, 8), S0), spec((3, 3, 3, 3), S0)
    assert rules.moves_for_op(aten.convolution.default, (), [image, weight], AXES) == ((1, (R,)),)
    one_row = spec((1, 3, 8, 8), S0)  # a rank would have none
    assert rules.moves_for_op(aten.convolution.default, (), [one_row, spec((3, 3, 3, 3), R)], AXES) == ((0, (R,)),)


def test_a_rank_without_rows_takes_part_in_safe_operations_only() -> None:
    one_row = [spec((1, 6), S0)]
    assert rules.moves_for_op(aten.relu.default, (None,), one_row, AXES) == ()
    assert rules.moves_for_op(aten.softmax.int, (None, 1), one_row, AXES) == ((0, (R,)),)


def test_indices_are_whole_where_the_weights_rows_are_cut() -> None:
    weight, indices = spec((10, 4), S0), spec((6,), S0, torch.int64)
    assert rules.moves_for_op(aten.embedding.default, (), [weight, indices], AXES) == ((1, (R,)),)
    assert rules.moves_for_op(aten.embedding.default, (), [spec((10, 4), S1), indices], AXES) == ()


def test_integers_that_are_added_to_products_are_whole_and_so_are_complex_numbers_that_are_multiplied() -> None:
    for dtype, moves in ((torch.int64, ((1, (R,)),)), (torch.float32, ())):
        operands = [spec((4, 4), R, dtype), spec((4, 4), S1, dtype), spec((4, 4), R, dtype)]
        assert rules.moves_for_op(aten.addmm.default, (), operands, AXES) == moves
    for dtype, moves in ((torch.complex64, ((0, (R,)),)), (torch.float32, ())):
        assert rules.moves_for_op(aten.prod.dim_int, (None, 1), [spec((4, 4), S1, dtype)], AXES) == moves


def test_terms_of_a_sum_are_added_first_and_whole_tensors_stay() -> None:
    assert rules.reduce_partial([spec((4,), P), spec((4,), R), spec((4,), S0)]) == ((0, (R,)),)
    assert rules.replicate([spec((4,), P), spec((4,), R), spec((4,), S0)], 1) == ((0, (R,)), (2, (R,)))
