"""What the ranks' outputs are as one tensor, by their shapes alone. No ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from meshbook.rank.tensors.results import output_placement


@pytest.mark.parametrize(
    ("shape", "rows", "placement"),
    [
        ((4, 8), {4}, Shard(0)),
        ((12, 8), {4}, Shard(0)),  # each token of a text
        ((2, 8), {4}, Shard(0)),  # pairs
        ((0, 8), {0}, Shard(0)),
        ((6, 8), {4, 6}, Shard(0)),  # the rows of one of two inputs
        ((), {4}, Partial("avg")),
        ((2, 4, 8), set(), Replicate()),
    ],
)
def test_outputs_are_rows_or_pieces_or_groups_of_rows_or_a_mean(
    shape: tuple[int, ...], rows: set[int], placement: object
) -> None:
    assert output_placement(torch.empty(shape), rows) == placement


@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 8), (6, 4), (12, 4, 8)])
def test_an_output_whose_dim_0_cannot_be_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="have it give rows first"):
        output_placement(torch.empty(shape), {4})
