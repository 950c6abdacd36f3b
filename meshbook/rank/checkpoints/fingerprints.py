"""Fingerprints of tensors and values, by which a save sees what differs between ranks. Every byte counts."""

from __future__ import annotations

import functools
import hashlib
import io
from typing import Any

import numpy
import torch

from meshbook.rank.previews.digests import digest_plain
from meshbook.rank.state.memory_digests import ROW_BYTES, ROW_WORDS, WEIGHTS, digest, hash_sums

# Rows that a GPU sums up at a time: 64 MiB, as large as each of the products that are in its memory then.
_DEVICE_ROWS = 4096


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
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype}{tuple(tensor.shape)}:{_digest(flat) if flat.device.type == 'cpu' else device_digest(flat)}"


def _digest(flat: torch.Tensor) -> str:
    # Not `.numpy()`: after that the user's storage could not be resized.
    return digest(numpy.from_dlpack(flat).view(numpy.uint8)).hex() if flat.numel() else ""


def device_digest(flat: torch.Tensor) -> str:
    """Return what `_digest` would of a copy in CPU memory, of which the device makes the sums."""
    if not flat.numel():
        return ""
    if flat.storage_offset() % 8:
        flat = flat.clone()  # words begin at a multiple of 8
    num_rows = flat.numel() // ROW_BYTES
    end = num_rows * ROW_BYTES
    weights, sums = _device_weights(flat.device), []
    for chunk in torch.split(flat[:end].view(torch.int64).reshape(num_rows, ROW_WORDS), _DEVICE_ROWS):
        mixed = chunk ^ ((chunk >> 32) & 0xFFFF_FFFF)  # the words have no sign
        sums.append((mixed * weights).sum(1))
    return hash_sums(flat.numel(), torch.cat(sums).cpu().numpy().view(numpy.uint64), flat[end:].cpu().numpy()).hex()


@functools.cache
def _device_weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(WEIGHTS.view(numpy.int64)).to(device)
