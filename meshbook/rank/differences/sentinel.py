"""Watches a rank's training for the first number that is not finite, and for gradients that explode.

**While all is well** it costs a sum of each outermost module's outputs, of each collective's inputs, of some
gradients, and their norms as often as some thousandths of the time allow. Modules within it have no hooks.

**On a hit** the outermost module's call is run again from its record (`rerun`), before the optimizer changes the
parameters, and names the operation. A model whose forward has collectives (FSDP2, tensor parallelism) cannot be run
again by one rank; of those each leaf module is watched (`leaves`).

**Who began it.** A rank whose own calls have no bad operation got the numbers by a collective, and says nothing. The
one that has tells the first collective that carried them on.

Main thread only, but for `report`. On a GPU the sums are read once for each update, before it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import message_of
from meshbook.rank.differences import compiled, losses, numbers, rerun
from meshbook.rank.differences.explosions import GradientNorms
from meshbook.rank.differences.hooks import TrainingHooks
from meshbook.rank.differences.leaves import LeafWatch
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.remote_ops import PlaceNames, RemoteOps
from meshbook.rank.differences.rerun import BadOperation, ModuleCall, ModuleStack
from meshbook.rank.differences.watched_inputs import CollectiveInputs
from meshbook.rank.differences.wording import ModuleNames, with_text, without_wrappers
from meshbook.rank.process_groups.group_health import Observer
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.rank.tensors.engine import CurrentOp
from meshbook.wire.messages import NumberFinding, SentinelReport

# Calls of outermost modules that are kept since the last update: micro batches, or the parts of a model.
_MAX_CALLS = 8
_MAX_OUTPUTS = 4
# A gradient of outputs that is larger is not kept until the update: it would be the memory of the logits again.
_MAX_KEPT_BYTES = 64 << 20
_MAX_FINDINGS = 20


class Sentinel:
    """The sentinel of one rank; `arm` installs its hooks, `disarm` removes them."""

    def __init__(
        self,
        rank: int,
        namespace: Mapping[str, Any],
        ring: CollectiveRing,
        observers: list[Observer],
        notify: Callable[[str], None],
        cell_title: Callable[[str], str | None],
    ) -> None:
        """
        Args:
            notify: shows a sentence under the running cell.
            cell_title: returns "cell 12" for the file of a cell.
        """
        self._rank, self._names, self._ring = rank, ModuleNames(namespace), ring
        self._observers, self._notify, self._places = observers, notify, PlaceNames(cell_title)
        self._main_thread = threading.get_ident()
        self._inputs = CollectiveInputs(rank)
        self._norms = GradientNorms()
        self._hooks = TrainingHooks(self)
        self._findings: list[NumberFinding] = []
        self._num_updates = 0
        self._current: ModuleCall | None = None
        self._leaves: LeafWatch | None = None  # of the current call
        self._calls: deque[ModuleCall] = deque(maxlen=_MAX_CALLS)
        self._stack: ModuleStack | None = None  # while a call is run again
        self._pending: NumberFinding | None = None  # found, and not yet reported
        self._with_collectives: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # of the running call
        self._is_quiet = False  # what is bad now has been reported, or came from elsewhere

    @property
    def is_armed(self) -> bool:
        return self._hooks.are_installed

    def arm(self) -> None:
        if not self.is_armed:
            self._hooks.install()
            self._observers.append(self._inputs)

    def disarm(self) -> None:
        if self.is_armed:
            self._hooks.remove()
            self._observers.remove(self._inputs)
            self._forget_step()

    def call_ended(self) -> None:
        """Report what was found and not reported yet: the user's cell is over."""
        failure = self._hooks.failure
        if failure is not None and self.is_armed:
            self.disarm()
            self._notify(f"the sentinel has failed, and is off ({type(failure).__name__}: {message_of(failure)})")
        elif self.is_armed:
            self._current = self._leaves = None
            self._hooks.end_watching_only()  # an interrupt may have left it
            self._check_outputs()
            self._report_pending()
            self._forget_step()
            self._with_collectives.clear()
            self._places.remote_op = None

    def watch_batch(self, current_op: Callable[[], CurrentOp | None]) -> AbstractContextManager[Any]:
        """Return what watches a batch of operations on remote tensors while it is entered."""
        if not self.is_armed or self._hooks.failure is not None:
            return nullcontext()
        self._inputs.clear()
        self._places.remote_op = current_op
        return RemoteOps(current_op, self._may_watch_operation, self._num_collectives, self._found_remote)

    def report(self) -> SentinelReport:
        """Return what was found. Any thread."""
        return SentinelReport(self.is_armed, tuple(self._findings), self._num_updates)

    # ---- forward

    def before_forward(self, module: nn.Module, args: Any) -> None:
        if self._current is not None:
            if self._leaves is not None:
                self._leaves.enter(module, args)
            return
        if self._stack is not None:
            self._stack.enter(module)
            return
        if (
            isinstance(module, DistributedDataParallel)  # what it wraps is a model without collectives
            or self._hooks.is_in_backward  # of a checkpoint of activations, which are computed again
            or threading.get_ident() != self._main_thread
            or (isinstance(module, torch.fx.GraphModule) and compiled.is_called_by_torch(_frame_of_caller()))
        ):
            return
        if self._pending is not None and not torch.is_grad_enabled():
            self._report_pending()
        place = numbers.place_of(numbers.user_frame(_frame_of_caller()))
        self._current = ModuleCall.that_begins(module, place, self._num_collectives())
        if self._may_have_collectives(module):
            self._leaves = LeafWatch(module, args, self._num_collectives, self._inputs, self._hooks.guarded)
        else:
            self._hooks.watch_only(module)

    def _may_have_collectives(self, module: nn.Module) -> bool:
        known = self._with_collectives.get(module)
        if known is None:
            known = any(isinstance(parameter, DTensor) for parameter in module.parameters())
            self._with_collectives[module] = known
        return known

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any = None) -> None:
        call = self._current
        if call is None:
            if self._stack is not None:
                self._stack.leave()
            return
        if module is not call.module:
            if self._leaves is not None:
                self._leaves.leave(module, outputs)
            return
        leaves, self._leaves, self._current = self._leaves, None, None
        self._hooks.end_watching_only()
        call.leaves = leaves
        call.args, call.kwargs, call.last_node = args, kwargs, rerun.next_node()
        call.has_collectives = self._num_collectives() != call.first_collective
        call.versions = rerun.versions_of((args, kwargs))
        for at, output in enumerate(numbers.tensors_in(outputs)):
            part = numbers.part_here(output)
            if at >= _MAX_OUTPUTS or part is None:
                continue
            call.totals.append(numbers.total(part))
            if output.requires_grad and not output.is_leaf and part.nbytes <= _MAX_KEPT_BYTES and leaves is None:
                output.register_hook(functools.partial(call.gradients.__setitem__, at))  # type: ignore[no-untyped-call]
        self._calls.append(call)
        if leaves is not None and not self._is_quiet:
            if leaves.is_over and numbers.kinds(numbers.tensors_in((args, kwargs))) - {"-inf"}:
                self._found(call, BadOperation("", "", "input", call.place, "", None))
            self._found(call, leaves.found)
            if leaves.is_from_elsewhere:
                self._is_quiet = True
        if call.totals and not call.totals[0].is_cuda:
            self._check_outputs()

    def _check_outputs(self) -> None:
        """Read the sums of outputs; of a call with bad ones, find the operation."""
        for call in self._calls:
            totals, call.totals = call.totals, []
            if self._is_quiet or all(map(numbers.is_finite, totals)) or call.leaves is not None:
                continue
            self._found(call, self._explain_outputs(call))

    def _explain_outputs(self, call: ModuleCall) -> BadOperation | None:
        if numbers.kinds(numbers.tensors_in((call.args, call.kwargs))) - {"-inf"}:
            return BadOperation("", "", "input", call.place, "", None)
        for name, parameter in call.module.named_parameters():
            if numbers.kinds([parameter]):
                return BadOperation(name, "", "parameter", call.place, "", None)
        return self._run_again(call, backward=False)

    # ---- backward, and the update

    def before_backward(self, loss: torch.Tensor) -> None:
        if self._stack is not None or self._is_quiet or self._pending is not None or loss.numel() != 1 or loss.is_cuda:
            return
        part = numbers.part_here(loss)
        if part is None or numbers.is_finite(part):
            return
        for call in self._calls:  # log-probabilities may be -inf
            if operation := self._run_again(call, backward=False):
                self._found(call, operation)
                return
        inside = [(call.first_node, call.last_node) for call in self._calls]
        operation = losses.operation_in(loss, lambda node: any(first <= node < last for first, last in inside))
        place = numbers.place_of(numbers.user_frame(_frame_of_caller()))
        self._found(None, operation or BadOperation("", "", "loss", None, "", None), place)

    def before_update(self, optimizer: Any, *_: Any) -> None:
        if self._stack is not None or threading.get_ident() != self._main_thread:
            return
        self._num_updates += 1
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._num_updates == 1 and compiled.is_any() and not self._have_seen(parameters):
            self._notify(compiled.BLIND_SPOT)
        self._check_outputs()
        is_finite = self._norms.check(parameters)
        if not is_finite and not self._is_quiet and self._pending is None:
            self._explain_gradients(parameters)
        exploding = self._norms.exploding if is_finite else None
        if exploding is not None:
            self._explain_explosion(exploding[0], exploding[1], exploding[2])
        was_bad = self._pending is not None or not is_finite
        self._report_pending()
        if not was_bad:
            self._is_quiet = False
        self._forget_step()

    def _have_seen(self, parameters: Sequence[Any]) -> bool:
        """Whether a module that was called has one of these parameters."""
        updated = set(map(id, parameters))
        return any(id(parameter) in updated for call in self._calls for parameter in call.module.parameters())

    def _explain_gradients(self, parameters: Sequence[Any]) -> None:
        for call in self._calls:
            leaves: LeafWatch | None = call.leaves
            if leaves is not None and leaves.is_from_elsewhere:
                self._is_quiet = True
                return
            operation = self._run_again(call, backward=True) if leaves is None else leaves.found
            if operation is None and numbers.kinds(call.gradients.values()):
                operation = BadOperation("", "", "loss", None, "", None)
            if operation is not None:
                self._found(call if operation.phase != "loss" else None, operation, call.place)
                return
        bad = [parameter for parameter in parameters if parameter.grad is not None and numbers.kinds([parameter.grad])]
        if self._inputs.first_bad() is None and self._inputs.has_any:  # what this rank gave was finite
            self._is_quiet = True
            return
        name = self._names.name_parameter(bad[0], [call.module for call in self._calls]) if bad else ""
        self._found(None, BadOperation(name, "", "gradient", None, "", None), self._inputs.place_of_first_bad())

    def _explain_explosion(self, parameter: Any, norm: float, usual: float) -> None:
        """Tell of a gradient that is far above its usual norm, unless it was this only on another rank."""
        local = None
        for call in self._calls:
            with _Tracking(self, call):
                found = rerun.gradients_here(call)
            if found:
                local = float(torch.stack([each.detach().float().norm() for each in found if each is not None]).norm())
                if local < usual * 2:
                    return
        name = self._names.name_parameter(parameter, [call.module for call in self._calls])
        step = self._step()
        text = f"gradient explodes: step {step}, rank {self._rank}, {name}: norm {norm:.2g}, usually {usual:.2g}"
        if local is not None:
            text += f"; of this rank's own batch {local:.2g}"
        self._add(NumberFinding("explosion", text, step, name, "", "gradient", ""))

    # ---- telling

    def _found(
        self, call: ModuleCall | None, operation: BadOperation | None, place: Place | None = None, *, line: str = ""
    ) -> None:
        if operation is None or self._pending is not None or self._is_quiet:
            return
        module = ""
        if call is not None:
            inner = without_wrappers(operation.module)
            module = ".".join(filter(None, [self._names.name_module(call.module), inner]))
            place = operation.place or call.place
        self._pending = NumberFinding(
            "non-finite",
            "",
            self._step(),
            module if call is not None else operation.module,
            operation.op,
            operation.phase,
            line or self._places.name(place),
            operation.dtype,
            operation.input_max,
        )

    def _may_watch_operation(self) -> bool:
        return self._current is None and self._stack is None and self._pending is None and not self._is_quiet

    def _found_remote(self, operation: BadOperation, line: str, has_collectives: bool) -> None:
        """Note an operation on remote tensors, unless its bad numbers came from another rank."""
        if has_collectives and self._inputs.first_bad() is None:
            self._is_quiet = True
        else:
            self._found(None, operation, line=line)

    def _report_pending(self) -> None:
        """Print what was found, with the collective that carried it on."""
        found, self._pending = self._pending, None
        if found is None:
            return
        self._is_quiet = True
        self._add(with_text(found, self._rank, self._inputs.first_bad()))

    def _add(self, finding: NumberFinding) -> None:
        if len(self._findings) < _MAX_FINDINGS:
            self._findings.append(finding)
            self._notify(finding.text)

    def _forget_step(self) -> None:
        self._calls.clear()
        self._inputs.clear()

    # ---- looking

    def _run_again(self, call: ModuleCall, *, backward: bool) -> BadOperation | None:
        with _Tracking(self, call) as stack:
            return rerun.first_bad_operation(call, stack, backward=backward)

    def _num_collectives(self) -> int:
        last = self._ring.last
        return 0 if last is None else last.seq

    def _step(self) -> int | None:
        step = self._places.step()
        return self._num_updates if step is None and not self._places.are_remote else step


class _Tracking:
    """While a call is run again, the hooks tell a `ModuleStack` which module runs, and check nothing."""

    def __init__(self, sentinel: Sentinel, call: ModuleCall) -> None:
        self._sentinel, self._call = sentinel, call

    def __enter__(self) -> ModuleStack:
        stack = self._sentinel._stack = ModuleStack(self._call.module)
        return stack

    def __exit__(self, *_: object) -> None:
        self._sentinel._stack = None


def _frame_of_caller() -> Any:
    return sys._getframe(3)  # of what called the hook, which is guarded
