"""Write a rank's part of a fetched tensor directly into the controller's memory."""

from __future__ import annotations

from math import prod

import torch

from meshbook.errors import TransferError
from meshbook.wire import messages
from meshbook.wire.buffers import map_for_writing


def write_box(buffer: messages.FetchBuffer, rank: int, value: torch.Tensor) -> bool:
    """Write this rank's box of the complete tensor; return False if it must be sent instead."""
    spans = buffer.boxes[rank]
    shape = [stop - start for start, stop in spans]
    if not value.numel() == prod(shape) > 0:
        return False
    strides = [prod(buffer.shape[dim + 1 :]) for dim in range(len(buffer.shape))]
    size = value.element_size()
    start = size * sum(start * stride for (start, _), stride in zip(spans, strides, strict=True))
    end = size * (1 + sum((stop - 1) * stride for (_, stop), stride in zip(spans, strides, strict=True)))
    if prod(buffer.shape) * size != buffer.memory.nbytes:
        return False
    try:
        with map_for_writing(buffer.memory, start, end) as memory:
            full_tensor = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype).view(buffer.shape)
            full_tensor[tuple(slice(*span) for span in spans)].copy_(value.reshape(shape))
            return True
    except TransferError:  # the controller is on another machine, or no longer waits
        return False
