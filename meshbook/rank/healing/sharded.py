"""Which of the user's names hold something that is cut into parts for the ranks that there are."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshbook.rank.previews.digests import PLAIN_TYPES

# Objects that are looked at. What refers to more of them (a large data set) has no DTensors after these.
_MAX_OBJECTS = 1_000_000
# Objects through which every other one can be reached.
_NOT_FOLLOWED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)


def find_sharded(
    namespace: Mapping[str, Any], names: Iterable[str], size_dependent: Collection[str]
) -> dict[str, list[str]]:
    """Return the reply to `FindSharded`."""
    names = [name for name in names if name in namespace]
    return {
        "sharded": _names_with_dtensors(namespace, names),
        "stale": [name for name in names if name in size_dependent and _is_plain(namespace[name])],
    }


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a few of them."""
    if isinstance(value, (tuple, list)):
        return all(type(item) in PLAIN_TYPES for item in value)
    return type(value) in PLAIN_TYPES


def _names_with_dtensors(namespace: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names of DTensors, and of what refers to one: a model, an optimizer, an object that has some."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return []
    found, without = [], set[int]()
    for name in names:
        if isinstance(namespace[name], _NOT_FOLLOWED):
            continue
        seen = _walk(namespace[name], tensors.DTensor, without)
        if seen is None:
            found.append(name)
        else:
            without |= seen
    return found


def _walk(value: Any, kind: type, without: set[int]) -> set[int] | None:
    """Return the objects that a value refers to, by id; None: an instance of a class is among them.

    Args:
        without: objects that refer to none.
    """
    pending, seen = [value], {id(value)}
    while pending and len(seen) + len(without) < _MAX_OBJECTS:
        one = pending.pop()
        if isinstance(one, kind):
            return None
        for inner in gc.get_referents(one):
            key = id(inner)
            if key not in seen and key not in without and gc.is_tracked(inner) and not isinstance(inner, _NOT_FOLLOWED):
                seen.add(key)
                pending.append(inner)
    return seen
