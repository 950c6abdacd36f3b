"""The leaf modules of one call that has collectives, looked at one by one: one rank cannot run it again alone.

What a leaf makes of good inputs, with good parameters, is found by running the leaf again. What comes to a leaf bad
began in the code of the module around it, or was brought by a collective to which this rank gave good numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshbook.rank.differences import numbers, rerun
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.rerun import BadOperation, ModuleStack
from meshbook.rank.differences.watched_inputs import CollectiveInputs


class LeafWatch:
    """Watches the modules within the call of `root`, and the gradients that come back to their outputs.

    Attributes:
        found: the first bad operation of this rank's own.
        is_from_elsewhere: bad numbers came by a collective to which this rank gave good ones.
    """

    def __init__(
        self,
        root: nn.Module,
        args: Any,
        num_collectives: Callable[[], int],
        inputs: CollectiveInputs,
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        """
        Args:
            args: of the call.
            num_collectives: returns how many collectives this rank has begun.
            guarded: returns a hook that does not raise.
        """
        self._names = {id(module): name for name, module in root.named_modules()}
        self._num_collectives, self._inputs = num_collectives, inputs
        self._is_fsdp = any(isinstance(module, FSDPModule) for module in root.modules())
        self._inputs.watches_results = not self._is_fsdp  # of FSDP2's own it is known what they carry
        self._guarded = guarded
        # modules that run, their arguments, collectives before them
        self._stack: list[tuple[nn.Module, Any, int]] = [(root, args, num_collectives())]
        # When numbers were last seen to be finite: the collectives begun until then, and how often others' had come.
        self._last_good = num_collectives(), inputs.num_received
        self._is_again = False  # a module runs again, to find its operation
        self._last_gradient: tuple[nn.Module, Any, torch.Tensor] | None = None  # the last good one
        self.found: BadOperation | None = None
        self.is_from_elsewhere = False

    @property
    def is_over(self) -> bool:
        return self.found is not None or self.is_from_elsewhere

    @property
    def has_gradients(self) -> bool:
        return self._last_gradient is not None or self.is_over

    def enter(self, module: nn.Module, args: Any) -> None:
        if self._is_again:
            return
        self._stack.append((module, args, self._num_collectives()))

    def leave(self, module: nn.Module, outputs: Any) -> None:
        """Look at a module that has ended; of an exception `outputs` is None."""
        if self._is_again:
            return
        while self._stack:
            ended, args, _ = self._stack.pop()
            if ended is module:
                break
        else:
            return
        if module._modules or self.is_over:
            return
        place = numbers.place_of(numbers.user_frame(sys._getframe(1)))
        for output in numbers.tensors_in(outputs):
            part = numbers.part_here(output)
            if part is None:
                continue
            if not numbers.is_finite(numbers.total(part)) and numbers.kinds([output]) - {"-inf"}:
                self._explain(module, args, place)
                return
            if output.requires_grad and not output.is_leaf:
                output.register_hook(  # type: ignore[no-untyped-call]
                    self._guarded(functools.partial(self._gradient_came, module, args, place))
                )
        self._last_good = self._num_collectives(), self._inputs.num_received

    def _explain(self, module: nn.Module, args: Any, place: Place | None) -> None:
        path = self._names.get(id(module), "")
        bad = [name for name, parameter in module.named_parameters(recurse=False) if numbers.kinds([parameter])]
        if bad and self._is_fsdp and self._inputs.first_bad() is None:
            self.is_from_elsewhere = True  # it was gathered from another rank
        elif bad:
            self.found = BadOperation(f"{path}.{bad[0]}", "", "parameter", place, "", None)
        elif not numbers.kinds(numbers.tensors_in(args)):
            self.found = self._run_again(module, args, None) or BadOperation(path, "", "forward", place, "", None)
        elif self._came_by_collective():
            self.is_from_elsewhere = True
        else:
            around = self._names.get(id(self._stack[-1][0]), "") if self._stack else ""
            self.found = self._run_around() or BadOperation(around, "", "forward", place, "", None)

    def _gradient_came(self, module: nn.Module, args: Any, place: Place | None, gradient: torch.Tensor) -> None:
        if self.is_over:
            return
        part = numbers.part_here(gradient)
        if part is None:
            return
        if numbers.is_finite(numbers.total(part)) or not numbers.kinds([gradient]):
            self._last_good = self._num_collectives(), self._inputs.num_received
            self._last_gradient = module, args, gradient
        elif self._have_received():
            self.is_from_elsewhere = True
        elif self._last_gradient is None:
            self.found = BadOperation("", "", "loss", None, "", None)
        elif self._came_by_collective():
            self.is_from_elsewhere = True
        else:
            later, later_args, good = self._last_gradient
            path = self._names.get(id(later), "")
            between = BadOperation(_common(path, self._names.get(id(module), "")), "", "backward", place, "", None)
            self.found = self._run_again(later, later_args, good) or between

    def _came_by_collective(self) -> bool:
        """Whether a collective since numbers were good has given bad ones for good input: of activations, gradients."""
        carriers = [
            op
            for op in self._inputs.carriers_since(self._last_good[0])
            if not (self._is_fsdp and op.startswith(_OF_FSDP))
        ]
        return self._have_received() or (bool(carriers) and self._inputs.first_bad() is None)

    def _have_received(self) -> bool:
        """Whether numbers of others alone have come since numbers were good, and this rank gave good ones."""
        return self._inputs.num_received > self._last_good[1] and self._inputs.first_bad() is None

    def _run_around(self) -> BadOperation | None:
        """Run the module around the leaf again, if it had no collective of its own before it came here."""
        if not self._stack:
            return None
        module, args, before = self._stack[-1]
        has_collectives = any(not (self._is_fsdp and op.startswith(_OF_FSDP)) for op in self._inputs.ops_since(before))
        if has_collectives or any(isinstance(each, FSDPModule) for each in module.modules() if each is not module):
            return None
        return self._run_again(module, args, None)

    def _run_again(self, module: nn.Module, args: Any, gradient: torch.Tensor | None) -> BadOperation | None:
        self._is_again = True
        try:
            found = rerun.first_bad_of(ModuleStack(module), lambda: module.forward(*args), args, gradient)
        finally:
            self._is_again = False
        return _below(self._names.get(id(module), ""), found)


# What FSDP2 runs around a module's forward and backward, beside its activations.
_OF_FSDP = ("all_gather", "reduce_scatter")


def _below(path: str, found: BadOperation | None) -> BadOperation | None:
    if found is None:
        return None
    whole = ".".join(filter(None, [path, found.module]))
    return BadOperation(whole, found.op, found.phase, found.place, found.dtype, found.input_max)


def _common(first: str, second: str) -> str:
    """Return the path of the module that has both."""
    parts: Iterable[tuple[str, str]] = zip(first.split("."), second.split("."), strict=False)
    common = []
    for one, other in parts:
        if one != other:
            break
        common.append(one)
    return ".".join(common)
