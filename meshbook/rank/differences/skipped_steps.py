"""Steps that a GradScaler skips one after the other: whether a smaller scale may still cure what it skips them for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.amp.grad_scaler import OptState

# A GradScaler begins with 2**16 and halves it with each step that it skips: the 40th is skipped at 2**-23. With that,
# near the smallest number of float16, gradients of up to 2**39 fit float16: no healthy training comes near.
_NUM_STEPS = 40
_LEAST_SCALE = 2.0**-23


class Skipped(NamedTuple):
    """Steps that no smaller scale would have been taken with."""

    num_steps: int
    scale: float  # with which the last one was skipped


class SkippedSteps:
    """Counts the steps of one optimizer that were skipped since the last one that was taken."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._scale: float | None = None  # when it was last looked at
        self._is_reported = False

    def taken(self) -> None:
        self._num_steps, self._scale, self._is_reported = 0, None, False

    def skipped(self, scale: Callable[[], float]) -> Skipped | None:
        """Count a step; return all, once, if no smaller scale cures them: it is too small by now, or does not fall.

        Args:
            scale: returns that of the step; it is called once in 40 steps, for a GPU is waited for.
        """
        self._num_steps += 1
        if self._num_steps % _NUM_STEPS or self._is_reported:
            return None
        before, self._scale = self._scale, scale()
        self._is_reported = self._scale <= _LEAST_SCALE or (before is not None and self._scale >= before)
        return Skipped(self._num_steps, self._scale) if self._is_reported else None


class ScaledSteps:
    """Which of the steps that cells take by scalers are skipped."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # optimizers that have taken a step since a scaler was updated, by id
        self._of_scalers: WeakKeyDictionary[Any, dict[int, SkippedSteps]] = WeakKeyDictionary()

    def taken(self, optimizer: Any) -> None:
        self._taken.add(id(optimizer))

    def ended(self, scaler: Any) -> Skipped | None:
        """Count the steps of a scaler that is about to be updated; return those of an optimizer that never steps."""
        of_scaler, found = self._of_scalers.setdefault(scaler, {}), None
        for optimizer, state in scaler._per_optimizer_states.items():
            if state["stage"] is not OptState.STEPPED:
                continue
            steps = of_scaler.setdefault(optimizer, SkippedSteps())
            if optimizer in self._taken:
                steps.taken()
            else:
                found = steps.skipped(scaler.get_scale) or found
        self._taken.clear()
        return found
