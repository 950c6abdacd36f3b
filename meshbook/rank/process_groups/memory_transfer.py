"""Sends and receives memory of the host over the world group, in pieces.

A rank that is lost or has left the cell ends these waits as it ends any collective's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_MAX_PIECE_BYTES = 1 << 30  # of one send


def send_memory(memory: torch.Tensor, to: int) -> None:
    """Send a flat tensor of bytes to a rank. Blocks until it is received."""
    for piece in split_memory([memory]):
        dist.send(piece, to)


def receive_memory(memory: torch.Tensor, source: int) -> None:
    """Receive what `send_memory` sends into a tensor of the same length. Blocks."""
    for piece in split_memory([memory]):
        dist.recv(piece, source)


def split_memory(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat tensors in pieces of a size that one send takes; empty ones are left out."""
    return [piece for one in memory if len(one) for piece in torch.split(one, _MAX_PIECE_BYTES)]
