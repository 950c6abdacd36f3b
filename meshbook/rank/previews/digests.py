"""Digests of values, by which ranks' values are compared without being sent. None: not comparable, or too large."""

from __future__ import annotations

import hashlib
import itertools
import marshal
import sys
from typing import Any, Final

from meshbook.wire.messages import TensorMeta

# Content up to this size is hashed, in 0.1 ms; beyond it, a comparison costs more than it is worth.
MAX_DIGEST_BYTES: Final = 64 << 10
# Limit for nested lists, dicts and sets, 3 ms at most; a flat list of numbers is hashed at once and counts a 50th.
MAX_DIGEST_ITEMS: Final = 4_000

# This version of the format encodes equal values equally; later ones depend on which objects are shared or interned.
_MARSHAL_VERSION: Final = 2

PLAIN_TYPES: Final = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis)})
CONTAINER_TYPES: Final = frozenset({list, tuple, dict, set, frozenset})
NUMBER_TYPES: Final = frozenset({int, float, complex, bool, type(None)})


def digest_bytes(name: str, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8, key=name.encode()[:64]).hexdigest()


def digest_text(name: str, text: str) -> str:
    return hashlib.blake2b(f"{name}:{text}".encode(), digest_size=8).hexdigest()


class _NotDigestible(Exception):
    """Raised for content that is too large to hash, or not plain."""


def digest_plain(obj: Any) -> str | None:
    """Return a hash of the complete value if it consists of plain values; None if it does not, or is large."""
    try:
        content = _normalize(obj, [MAX_DIGEST_ITEMS, 16 * MAX_DIGEST_BYTES])
        return digest_bytes("plain", marshal.dumps(content, _MARSHAL_VERSION))
    # RuntimeError: a user thread modifies it meanwhile, or it contains itself. ValueError: it is nested too deeply
    except (_NotDigestible, RuntimeError, ValueError):
        return None


def _normalize(obj: Any, budget: list[int]) -> Any:
    """Return plain values in a form whose marshalled bytes are equal if the values are.

    Args:
        budget: how many more items, and bytes of strings and numbers, may follow.
    """
    kind = type(obj)
    budget[0] -= 1
    if kind in PLAIN_TYPES:
        budget[1] -= len(obj) if kind in (str, bytes) else obj.bit_length() // 8 if kind is int else 8
        content = obj
    elif kind not in CONTAINER_TYPES:
        raise _NotDigestible
    elif kind in (list, tuple) and len(obj) <= 50 * budget[0] and NUMBER_TYPES.issuperset(map(type, obj)):
        budget[0] -= len(obj) // 50
        content = obj
    elif len(obj) > budget[0]:
        raise _NotDigestible
    else:
        items = itertools.chain.from_iterable(obj.items()) if kind is dict else obj
        parts = [_normalize(item, budget) for item in items]
        if kind in (set, frozenset):  # their order differs between processes
            parts = sorted(marshal.dumps(part, _MARSHAL_VERSION) for part in parts)
        content = (kind.__name__, parts)
    if min(budget) < 0:
        raise _NotDigestible
    return content


def digest_array(obj: Any, kind: type) -> str | None:
    """Return a hash of a small numpy array or scalar; None for others."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
        return None
    if obj.dtype.hasobject or obj.nbytes > MAX_DIGEST_BYTES:
        return None
    return digest_bytes("numpy", f"{obj.dtype.str}{obj.shape}:".encode() + obj.tobytes())


def digest_tensor(local: Any, meta: TensorMeta) -> str | None:
    torch = sys.modules["torch"]
    try:
        if local.layout is not torch.strided or local.is_meta or local.is_quantized:
            return None
        if local.numel() * local.element_size() > MAX_DIGEST_BYTES:
            return None
        flat = local.detach().to("cpu").contiguous().reshape(-1)
        import numpy

        # Not `.numpy()`: after that the user's storage could not be resized.
        content = numpy.from_dlpack(flat.view(torch.uint8)).tobytes() if flat.numel() else b""
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    header = f"{meta.shape}{meta.dtype}{meta.requires_grad}{meta.placements}{meta.local_shape}:"
    return digest_bytes("tensor", header.encode() + content)
