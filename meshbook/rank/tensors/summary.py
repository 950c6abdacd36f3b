"""What can be said of a rank's piece of a tensor in five numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


def summary(tensor: Any) -> tuple[int, int, float, float, float]:
    """Of this rank's piece: elements, NaNs, and the sum, least and greatest of the others (0, inf, -inf of none).

    Every rank takes part: parts of a sum are summed first. Sums are in double precision.
    """
    if isinstance(tensor, DTensor):
        if any(place.is_partial() for place in tensor.placements):
            whole = [Replicate() if place.is_partial() else place for place in tensor.placements]
            tensor = tensor.redistribute(placements=whole)
        tensor = tensor.to_local()
    piece = tensor.detach()
    if piece.is_complex():
        piece = piece.abs()
    nans = torch.isnan(piece) if piece.is_floating_point() else None
    num_nans = 0 if nans is None else int(nans.sum())
    kept = piece[~nans] if nans is not None and num_nans else piece
    if not kept.numel():
        return piece.numel(), num_nans, 0.0, float("inf"), float("-inf")
    if kept.dtype is torch.bool:
        kept = kept.to(torch.uint8)
    total = kept.sum(dtype=torch.float64 if kept.device.type == "cpu" else None)
    return piece.numel(), num_nans, float(total), float(kept.min()), float(kept.max())
