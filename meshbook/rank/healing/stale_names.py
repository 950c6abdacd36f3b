"""Which of the user's names have plain values that were computed from the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshbook.rank.previews.digests import PLAIN_TYPES


def find_stale(namespace: Mapping[str, Any], names: Iterable[str], size_dependent: Collection[str]) -> list[str]:
    """Return the names of plain values among those that cells compute from the number of ranks."""
    return [name for name in names if name in size_dependent and name in namespace and _is_plain(namespace[name])]


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a few of them."""
    if isinstance(value, (tuple, list)):
        return all(type(item) in PLAIN_TYPES for item in value)
    return type(value) in PLAIN_TYPES
