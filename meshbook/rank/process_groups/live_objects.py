"""The objects of a class that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any


def instances_of(*kinds: type) -> Iterator[Any]:
    """Yield all objects of these classes and of those derived from them."""
    is_kind: dict[type, bool] = {}  # tested once per class: a process has some hundred thousand objects
    for candidate in gc.get_objects():
        found = type(candidate)
        if found not in is_kind:
            is_kind[found] = issubclass(found, kinds)
        if is_kind[found]:
            yield candidate
