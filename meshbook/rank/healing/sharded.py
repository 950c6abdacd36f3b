"""Which of the user's names hold something that is cut into parts for the ranks that there are."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshbook.rank.previews.digests import PLAIN_TYPES

# Objects that are looked at for one name. What refers to more of them (a large data set) has no DTensors after these.
_MAX_OBJECTS = 100_000
# Objects through which every other one can be reached.
_NOT_FOLLOWED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)


def find_sharded(
    namespace: Mapping[str, Any], names: Iterable[str], size_dependent: Collection[str]
) -> dict[str, list[str]]:
    """Return the reply to `FindSharded`."""
    names = [name for name in names if name in namespace]
    return {
        "sharded": [name for name in names if _has_dtensor(namespace[name])],
        "stale": [name for name in names if name in size_dependent and _is_plain(namespace[name])],
    }


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a few of them."""
    if isinstance(value, (tuple, list)):
        return all(type(item) in PLAIN_TYPES for item in value)
    return type(value) in PLAIN_TYPES


def _has_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, or refers to one: a model, an optimizer, an object that has some."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return False
    kind: type = tensors.DTensor
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _MAX_OBJECTS:
        found = pending.pop()
        if isinstance(found, kind):
            return True
        for inner in gc.get_referents(found):
            if id(inner) not in seen and gc.is_tracked(inner) and not isinstance(inner, _NOT_FOLLOWED):
                seen.add(id(inner))
                pending.append(inner)
    return False
