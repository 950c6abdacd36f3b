"""Gives an object that setup cells have built on a new rank the contents of another rank's, in place.

What refers to the object (a loader to its dataset, a trainer to its configuration, an optimizer to a tensor) then has
these too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshbook.rank.state.digests import is_made_of_attributes
from meshbook.rank.state.kinds import has_identity

_CONTAINERS = (dict, list, set)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


def is_fillable(value: Any) -> bool:
    """Whether an object like this one can be given other contents."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return not isinstance(value, DTensor) and value.layout is torch.strided and not value.is_meta
    if kind in _CONTAINERS:
        return True
    own_pickling = any(name in vars(base) for base in kind.__mro__ if base is not object for name in _PICKLING)
    return (
        not own_pickling
        and not isinstance(value, type)
        and not has_identity(value)
        and hasattr(value, "__dict__")
        and is_made_of_attributes(kind)
    )


class Contents:
    """What is in an object, beside which a pickle can name the object itself."""

    def __init__(self, value: Any) -> None:
        self._needs_grad = isinstance(value, torch.Tensor) and value.requires_grad
        if isinstance(value, torch.Tensor):
            self.held: Any = value.detach()
        else:
            self.held = type(value)(value) if type(value) in _CONTAINERS else dict(vars(value))

    def fill(self, own: Any) -> Any:
        """Give an object these contents, and return it; another one that has them, if it cannot."""
        if isinstance(own, torch.Tensor):
            filled: torch.Tensor = own if _fill_tensor(own, self.held) else self.held
            return filled.requires_grad_(self._needs_grad) if filled.is_leaf else filled
        if isinstance(own, list):
            own[:] = self.held
        elif isinstance(own, set):
            own.clear()
            own.update(self.held)
        else:
            _fill_dict(own if isinstance(own, dict) else vars(own), self.held)
        return own


def _fill_dict(own: dict[Any, Any], held: dict[Any, Any]) -> None:
    """Give a dict these items. A tensor stays the same object: workers of a loader may share its memory."""
    kept = {
        key: own[key]
        for key, value in held.items()
        if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor) and _fill_tensor(own[key], value)
    }
    own.clear()
    own.update({**held, **kept})


def _fill_tensor(own: torch.Tensor, held: torch.Tensor) -> bool:
    if own is held:
        return True
    if not is_fillable(own) or own.shape != held.shape or own.dtype != held.dtype or own.device != held.device:
        return False
    with torch.no_grad():
        own.copy_(held)
    return True
