"""Summarize a rank's shard of a tensor in five numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.rank.tensors.operators import replicate_partials


def summarize(tensor: Any) -> tuple[int, int, float, float, float]:
    """Return the numbers of elements and NaNs of this rank's shard, and sum, minimum and maximum of the others.

    If there are no others, these are 0, inf and -inf. Every rank takes part, as partial tensors are reduced first. Sums
    are in double precision.
    """
    if isinstance(tensor, DTensor):
        tensor = replicate_partials(tensor).to_local()
    piece = tensor.detach()
    if piece.is_complex():
        piece = piece.abs()
    is_nan = torch.isnan(piece) if piece.is_floating_point() else None
    num_nans = 0 if is_nan is None else int(is_nan.sum())
    valid = piece[~is_nan] if is_nan is not None and num_nans else piece
    if not valid.numel():
        return piece.numel(), num_nans, 0.0, float("inf"), float("-inf")
    if valid.dtype is torch.bool:
        valid = valid.to(torch.uint8)
    total = valid.sum(dtype=torch.float64 if valid.device.type == "cpu" else None)
    return piece.numel(), num_nans, float(total), float(valid.min()), float(valid.max())
