"""Fingerprints of tensors and values, by which a save sees what differs between ranks. Every byte counts."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy
import torch

from meshbook.rank.previews.digests import digest_plain
from meshbook.rank.state.memory_digests import digest

# Numbers of 8 bytes in a row of the sums that are made on a GPU.
_ROW = 4096


def serialize(value: Any) -> bytes:
    """Return a value as DCP stores it. Raises what pickling raises."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def fingerprint_value(value: Any, serialized: bytes) -> str:
    """Equal for equal plain values; for others, for equal pickles."""
    return digest_plain(value) or hashlib.blake2b(serialized, digest_size=16).hexdigest()


def fingerprint_tensor(tensor: torch.Tensor) -> str:
    """Return a fingerprint of shape, dtype and content. Waits for the device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype}{tuple(tensor.shape)}:{_digest(flat) if flat.device.type == 'cpu' else _sums(flat)}"


def _digest(flat: torch.Tensor) -> str:
    # Not `.numpy()`: after that the user's storage could not be resized.
    return digest(numpy.from_dlpack(flat).view(numpy.uint8)).hex() if flat.numel() else ""


def _sums(flat: torch.Tensor) -> str:
    """Return the fingerprint of a tensor on a device: of the sums of its rows and of its columns as a matrix."""
    row_bytes = 8 * _ROW
    whole = flat.numel() // row_bytes * row_bytes
    matrix = flat[:whole].view(torch.int64).reshape(-1, _ROW)
    sums = torch.cat([matrix.sum(1), matrix.sum(0)]).cpu().view(torch.uint8)
    return f"{_digest(sums)}{_digest(flat[whole:].cpu())}"
