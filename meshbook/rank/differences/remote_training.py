"""Watches training that a notebook does on remote tensors: the backward of modules, and the steps of optimizers.

A bad gradient is reported when it is found. While a GradScaler scales, which skips such steps, it is held until a step
is taken with it, and forgotten if none is. Within a step nothing is looked at but what it has changed, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from meshbook.rank.differences import numbers
from meshbook.rank.differences.kept_calls import KeptCalls, has_bad_gradient
from meshbook.rank.differences.remote_ops import PlaceNames
from meshbook.rank.differences.rerun import BadOperation
from meshbook.rank.differences.skipped_steps import SkippedSteps
from meshbook.rank.differences.wording import with_skipped
from meshbook.wire.messages import NumberFinding


class Findings(Protocol):
    """The sentinel."""

    @property
    def is_looking(self) -> bool:
        """Whether nothing was found yet."""

    def look(self, step_inputs: Sequence[torch.Tensor] = ()) -> None:
        """Look at the operations that have run, and have not been looked at.

        Args:
            step_inputs: what an optimizer's step reads, which begins.
        """

    def take(self, found: NumberFinding | None) -> None:
        """Report a finding; None: another rank has it, and this one is silent."""


class RemoteTraining:
    """A `watching.TrainingWatcher`."""

    def __init__(
        self,
        findings: Findings,
        calls: KeptCalls,
        places: PlaceNames,
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        """
        Args:
            guarded: returns a function that does not raise.
        """
        self._findings, self._calls, self._places = findings, calls, places
        self.backward_ended, self.gradients_given = guarded(self._backward_ended), guarded(self._gradients_given)
        self.step_begins, self.step_ended = guarded(self._step_begins), guarded(self._step_ended)
        self.scaling = guarded(self._scaling)
        self._of_backward: list[NumberFinding | None] = []  # found, and its operation has not come yet
        self._held: list[NumberFinding | None] = []  # until a step is taken with it
        self._in_step: tuple[Sequence[Any], Sequence[Any]] | None = None  # its gradients and parameters
        self._scale: float | None = None  # of a scaler of the notebook, while it scales
        self._skipped = SkippedSteps()

    @property
    def is_holding(self) -> bool:
        """Whether operations are not to be looked at: in a step, or while a finding is held."""
        return self._in_step is not None or bool(self._held)

    @property
    def is_scaling(self) -> bool:
        """Whether a scaler of the notebook scales."""
        return self._scale is not None

    def note(self, found: NumberFinding | None) -> None:
        """Report a finding, or hold it; None: another rank has it."""
        if not self.is_scaling:
            self._findings.take(found)
        elif not self._held:
            self._held.append(found)

    def batch_ended(self) -> None:
        self._in_step = None  # a step that was stopped has no end

    # ---- watching.TrainingWatcher, whose methods are these, guarded

    def _backward_ended(self, parameters: Mapping[str, torch.Tensor], input_gradients: Sequence[Any]) -> None:
        self._of_backward.clear()
        self._findings.look()
        if not self._findings.is_looking or self.is_holding:
            return
        gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        given = [*gradients, *(gradient for gradient in input_gradients if gradient is not None)]
        if not numbers.are_finite(given) and numbers.kinds(given):
            found = self._calls.explain_gradients(list(parameters.values()))
            if found is not None and found.phase != "gradient":  # which names the parameter itself
                first = next((name for name in reversed(list(parameters)) if has_bad_gradient(parameters[name])), "")
                found = msgspec.structs.replace(found, parameter=first)
            self._of_backward.append(found)
        elif self._calls.have_given_away:
            self._of_backward.append(self._calls.explain_given_away())
        self._calls.keep(lambda call: not call.has_gradients())

    def _gradients_given(self) -> None:
        for each in self._of_backward:
            found = each
            if found is not None:
                line = self._places.name_remote()
                known = "" if found.line == line else found.line
                place = ", ".join(filter(None, [known, line and f"backward at {line}"]))
                found = msgspec.structs.replace(found, line=place)
            if self._findings.is_looking and not self.is_holding:
                self.note(found)
        self._of_backward.clear()

    def _step_begins(self, gradients: Sequence[Any], parameters: Sequence[Any]) -> None:
        self._findings.look(gradients)
        if self._held and not numbers.are_finite(gradients) and numbers.kinds(gradients):
            self._findings.take(self._held[0])
        self._held.clear()
        self._in_step = gradients, parameters

    def _step_ended(self) -> None:
        if self._in_step is None:
            return
        (gradients, parameters), self._in_step = self._in_step, None
        if self._findings.is_looking and not numbers.are_finite(parameters) and numbers.kinds(parameters):
            phase, op = ("gradient", "") if numbers.kinds(gradients) else ("remote", "a step of the optimizer")
            if phase == "gradient" and self._calls.are_from_elsewhere:
                self._findings.take(None)
                return
            operation = BadOperation("", op, phase, None, "", None)
            self._findings.take(self._calls.describe(None, operation, line=self._places.name_remote()))

    def _scaling(self, scale: float | None) -> None:
        self._findings.look()
        last, self._scale = self._scale, scale
        if scale is not None or last is None:
            return
        if not self._held:
            self._skipped.taken()
        elif (skipped := self._skipped.skipped(lambda: last)) is not None:
            self._findings.take(with_skipped(self._held[0], skipped))
        self._held.clear()
