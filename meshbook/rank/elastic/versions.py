"""Whether the DTensors under a name are the same, and unchanged, as at some time before."""

from __future__ import annotations

import weakref
from typing import Any

from meshbook.rank.resharding.catalog import walk

# Of each DTensor but gradients, which every step makes anew: itself, and how often its memory was written.
Versions = list[tuple["weakref.ref[Any]", int]]


def versions_of(value: Any) -> Versions:
    return [
        (weakref.ref(tensor), tensor._local_tensor._version) for path, tensor in walk(value, "") if path[-1] != "grad"
    ]


def is_unchanged(value: Any, versions: Versions) -> bool:
    now = versions_of(value)
    return len(now) == len(versions) and all(
        one() is other() and count == before for (one, count), (other, before) in zip(now, versions, strict=True)
    )
