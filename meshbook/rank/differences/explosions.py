"""Norms of gradients over the updates: whether they are finite, and whether they are far above what they used to be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from meshbook.clock import perf_counter
from meshbook.rank.differences import numbers

# The share of the time that norms of all gradients may take; in other updates only some gradients are looked at.
_SHARE = 0.003
# An explosion: so many updates after each other with so many times the median of so many before them.
_FACTOR = 10.0
_NUM_UPDATES = 3
_HISTORY = 16
_FEWEST = 8


class GradientNorms:
    """The norms of one rank's gradients, update by update.

    Attributes:
        exploding: after `check`, of a gradient that has just been found to explode: the parameter with most of it, its
            norm, and what that usually is; else None.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_HISTORY)  # norms of the gradients that are looked at each time
        self._num_large = 0
        self._began_at = perf_counter()
        self._spent_s = 0.0
        self.exploding: tuple[Any, float, float] | None = None

    def check(self, parameters: Sequence[Any]) -> bool:
        """Look at the gradients before an update; return whether they are finite. Waits for a GPU."""
        self.exploding = None
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        # Backward ends with the first parameters: what is bad anywhere has come to them.
        some = _norms_of(with_gradients[:1] + with_gradients[-1:])
        norm = math.hypot(*some.values())
        if not math.isfinite(norm):
            return not numbers.kinds([parameter.grad for parameter in some])
        times = self._times_usual(norm)
        if self._num_large != _NUM_UPDATES and self._spent_s > _SHARE * (perf_counter() - self._began_at):
            return True
        started = perf_counter()
        norms = _norms_of(with_gradients)
        self._spent_s += perf_counter() - started
        total = math.hypot(*norms.values())
        if not math.isfinite(total):
            return not numbers.kinds([parameter.grad for parameter in with_gradients])
        if self._num_large == _NUM_UPDATES:
            self.exploding = max(norms, key=norms.__getitem__), total, total / times
        return True

    def _times_usual(self, norm: float) -> float:
        """Return how many times the usual norm this one is. One that is far above it does not become usual."""
        usual = sorted(self._usual)[len(self._usual) // 2] if len(self._usual) >= _FEWEST else 0.0
        if not usual or norm <= _FACTOR * usual:
            self._num_large = 0
            self._usual.append(norm)
            return 1.0
        self._num_large += 1
        if self._num_large > 2 * _HISTORY:  # reported long ago: this is what it usually is now
            self._num_large = 0
            self._usual.clear()
        return norm / usual


def _norms_of(parameters: Sequence[Any]) -> dict[Any, float]:
    """Return the norm of each parameter's gradient, of those of which this rank has a part."""
    found = [(parameter, numbers.part_here(parameter.grad)) for parameter in parameters]
    parts = [part for _, part in found if part is not None]
    if not parts:
        return {}
    norms = torch.stack([norm.float().cpu() for norm in torch._foreach_norm(parts)]).tolist()
    return dict(zip([parameter for parameter, part in found if part is not None], norms, strict=True))
