"""A rank's part of a tensor that is read: written to where the controller wants it, in its memory."""

from __future__ import annotations

from math import prod

import torch

from meshbook.errors import TransferError
from meshbook.wire import messages
from meshbook.wire.buffers import filling


def write(room: messages.Room, rank: int, value: torch.Tensor) -> bool:
    """Write this rank's box of the whole; False: it cannot be done from here, and the value has to be sent."""
    spans = room.boxes[rank]
    shape = [stop - start for start, stop in spans]
    if not value.numel() == prod(shape) > 0:
        return False
    strides = [prod(room.shape[dim + 1 :]) for dim in range(len(room.shape))]
    size = value.element_size()
    start = size * sum(start * stride for (start, _), stride in zip(spans, strides, strict=True))
    end = size * (1 + sum((stop - 1) * stride for (_, stop), stride in zip(spans, strides, strict=True)))
    if prod(room.shape) * size != room.place.nbytes:
        return False
    try:
        with filling(room.place, start, end) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype).view(room.shape)
            whole[tuple(slice(*span) for span in spans)].copy_(value.reshape(shape))
            return True
    except TransferError:  # the controller is on another machine, or does not wait any more
        return False
