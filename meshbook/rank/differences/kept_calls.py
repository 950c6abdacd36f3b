"""The calls of modules since the last update, and what is found by running them again: where bad numbers began."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from meshbook.rank.differences import losses, numbers, rerun
from meshbook.rank.differences.leaves import LeafWatch
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.overflows import Overflow
from meshbook.rank.differences.remote_ops import PlaceNames
from meshbook.rank.differences.rerun import BadOperation, ModuleCall, ModuleStack
from meshbook.rank.differences.watched_inputs import CollectiveInputs
from meshbook.rank.differences.wording import ModuleNames, with_carrier
from meshbook.rank.state.kinds import clean_name
from meshbook.wire.messages import NumberFinding

# Calls of outermost modules that are kept since the last update: micro batches, or the parts of a model.
_MAX_CALLS = 8


class KeptCalls:
    """The calls of one rank.

    Attributes:
        stack: which module runs, while a call is run again; else None.
    """

    def __init__(
        self, names: ModuleNames, places: PlaceNames, inputs: CollectiveInputs, step: Callable[[], int | None]
    ) -> None:
        """
        Args:
            step: returns the number of the step that runs.
        """
        self._names, self._places, self._inputs, self._step = names, places, inputs, step
        self._calls: deque[ModuleCall] = deque(maxlen=_MAX_CALLS)
        self.stack: ModuleStack | None = None

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter(self._calls)

    def add(self, call: ModuleCall) -> None:
        self._calls.append(call)

    def keep(self, is_kept: Callable[[ModuleCall], bool] = lambda call: False) -> None:
        """Forget all calls but these."""
        kept = list(filter(is_kept, self._calls))
        self._calls.clear()
        self._calls.extend(kept)

    def keep_those_without(self, updated: Sequence[Any]) -> None:
        """Forget all calls, but if some parameters are updated, not those of modules that another optimizer updates."""
        ids = set(map(id, updated))

        def waits(call: ModuleCall) -> bool:
            learns = False
            for parameter in call.module.parameters():
                if id(parameter) in ids:
                    return False
                learns = learns or parameter.requires_grad
            return learns and call.grad_enabled

        self.keep(waits if ids else lambda call: False)

    @property
    def first_collective(self) -> int | None:
        """The number of the last collective before the first of these calls; None: there is no call."""
        return min((call.first_collective for call in self._calls), default=None)

    def parameters(self) -> list[Any]:
        """Return those of the modules that were called."""
        return [parameter for call in self._calls for parameter in call.module.parameters()]

    def have_seen_model_of(self, parameters: Sequence[Any]) -> bool:
        """Whether a module was called that has one of these parameters, or whose gradients a user's own shards have."""
        if not {*map(id, parameters)}.isdisjoint(map(id, self.parameters())):
            return True
        is_of_module = any(self._names.name_parameter(parameter, ()) for parameter in parameters)
        return not is_of_module and any(call.has_gradients() for call in self._calls)

    @property
    def are_from_elsewhere(self) -> bool:
        """Whether bad gradients are of another rank: what this one gave to collectives was finite."""
        return self._inputs.has_any and self._inputs.first_bad() is None

    # ---- findings

    def describe(
        self, call: ModuleCall | None, operation: BadOperation, place: Place | None = None, *, line: str = ""
    ) -> NumberFinding:
        """Return a finding, without its text.

        Args:
            line: in place of the name of `place`.
        """
        module = operation.module
        if call is not None:
            inner = clean_name(operation.module)
            module = ".".join(filter(None, [self._names.name_module(call.module), inner]))
            place = operation.place or call.place
        return NumberFinding(
            "non-finite",
            "",
            None if call is not None and call.is_remote else self._step(),
            module,
            operation.op,
            operation.phase,
            line or self._places.name(place),
            operation.dtype,
            operation.input_max,
        )

    def describe_overflow(self, overflow: Overflow) -> NumberFinding:
        """Return a finding about a sum over ranks, without its text."""
        at = overflow.collective
        place = None if at.line is None else (at.line.file, at.line.line, at.line.function)
        operation = BadOperation("", at.op, "sum over ranks", None, overflow.dtype, None)
        return with_carrier(self.describe(None, operation, place, line=overflow.line), at)

    def explain_outputs(self, call: ModuleCall) -> BadOperation | None:
        if numbers.kinds(numbers.tensors_in((call.args, call.kwargs))) - {"-inf"}:
            return BadOperation("", "", "input", call.place, "", None)
        for name, parameter in call.module.named_parameters():
            if numbers.kinds([parameter]):
                return BadOperation(name, "", "parameter", call.place, "", None)
        return self._run_again(call, backward=False)

    def explain_loss(self, loss: torch.Tensor, place: Place | None) -> NumberFinding:
        """Return where a loss that is not finite began.

        Args:
            place: of its backward.
        """
        for call in self._calls:  # log-probabilities may be -inf
            if operation := self._run_again(call, backward=False):
                return self.describe(call, operation)
        inside = [(call.first_node, call.last_node) for call in self._calls]
        operation = losses.operation_in(loss, lambda node: any(first <= node < last for first, last in inside))
        return self.describe(None, operation or BadOperation("", "", "loss", None, "", None), place)

    def explain_gradients(self, parameters: Sequence[Any]) -> NumberFinding | None:
        """Return where the bad gradients of these parameters began; None: on another rank."""
        carried = self._inputs.first_bad()
        for call in self._calls:
            if call.leaves is not None and call.leaves.is_from_elsewhere:
                return None
            if (found := self._explain_backward(call)) is not None:
                return with_carrier(found, carried)
        if self.are_from_elsewhere:
            return None
        return with_carrier(self._describe_gradient(parameters, self._inputs.place_of_first_bad()), carried)

    def explain_skipped(self) -> NumberFinding | None:
        """Return where the gradients began for which a scaler has skipped a step; None: on another rank."""
        if self.have_given_away:
            return self.explain_given_away()
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        if parameters and not any(map(has_bad_gradient, parameters)):  # else they may be gone already
            return None
        return self.explain_gradients(parameters)

    @property
    def have_given_away(self) -> bool:
        """Whether this rank gave bad gradients to others by a reduction, and has no part of the result itself."""
        given = self._inputs.first_given_away()
        return given is not None and (given.is_of_backward or any(map(has_bad_gradient, self.parameters())))

    def explain_given_away(self) -> NumberFinding:
        """Return where the gradients of `have_given_away` began."""
        given = self._inputs.first_given_away()
        assert given is not None
        at = given.collective
        for call in self._calls:
            if (found := self._explain_backward(call)) is not None:
                return with_carrier(found, at)
        place = None if at.line is None else (at.line.file, at.line.line, at.line.function)
        return with_carrier(self._describe_gradient(self.parameters(), place, given.parameter), at)

    def _explain_backward(self, call: ModuleCall) -> NumberFinding | None:
        """Return the operation of a call that makes gradients bad; None: none of those that are known."""
        leaves: LeafWatch | None = call.leaves
        operation = self._run_again(call, backward=True) if leaves is None else leaves.found
        if operation is None and numbers.kinds(call.gradients.values()):
            operation = BadOperation("", "", "loss", None, "", None)
        if operation is None:
            return None
        return self.describe(call if operation.phase != "loss" else None, operation, call.place)

    def _describe_gradient(
        self, parameters: Iterable[Any], place: Place | None, bad_parameter: Any = None
    ) -> NumberFinding:
        bad = [each for each in parameters if each is bad_parameter or has_bad_gradient(each)]
        name = self._names.name_parameter(bad[-1], [call.module for call in self._calls]) if bad else ""
        return self.describe(None, BadOperation(name, "", "gradient", None, "", None), place)

    def explain_explosion(self, parameter: Any, norm: float, usual: float, rank: int) -> NumberFinding | None:
        """Describe a gradient that is far above its usual norm; None: it was this only on another rank."""
        local = None
        for call in self._calls:
            with self._again(call):
                found = rerun.gradients_here(call)
            if found:
                local = float(torch.stack([each.detach().float().norm() for each in found if each is not None]).norm())
                if local < usual * 2:
                    return None
        name = self._names.name_parameter(parameter, [call.module for call in self._calls])
        step = self._step()
        text = f"gradient explodes: step {step}, rank {rank}, {name}: norm {norm:.2g}, usually {usual:.2g}"
        if local is not None:
            text += f"; of this rank's own batch {local:.2g}"
        return NumberFinding("explosion", text, step, name, "", "gradient", "")

    def _run_again(self, call: ModuleCall, *, backward: bool) -> BadOperation | None:
        with self._again(call) as stack:
            return rerun.first_bad_operation(call, stack, backward=backward)

    @contextmanager
    def _again(self, call: ModuleCall) -> Iterator[ModuleStack]:
        """While a call is run again, the hooks say to `stack` which module runs, and check nothing."""
        self.stack = ModuleStack(call.module)
        try:
            yield self.stack
        finally:
            self.stack = None


def has_bad_gradient(parameter: Any) -> bool:
    """Whether a parameter's gradient is not finite."""
    return parameter.grad is not None and bool(numbers.kinds([parameter.grad]))
