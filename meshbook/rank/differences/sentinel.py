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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshbook.errors import message_of
from meshbook.rank.differences import compiled, numbers, rerun
from meshbook.rank.differences.explosions import GradientNorms
from meshbook.rank.differences.hooks import TrainingHooks
from meshbook.rank.differences.kept_calls import KeptCalls
from meshbook.rank.differences.leaves import LeafWatch
from meshbook.rank.differences.numbers import Place
from meshbook.rank.differences.overflows import GivenBad
from meshbook.rank.differences.remote_ops import NaNReader, PlaceNames, RemoteOps, RunningOps
from meshbook.rank.differences.remote_training import RemoteTraining
from meshbook.rank.differences.rerun import BadOperation, ModuleCall
from meshbook.rank.differences.skipped_steps import ScaledSteps
from meshbook.rank.differences.watched_inputs import CollectiveInputs
from meshbook.rank.differences.wording import ModuleNames, with_skipped, with_text
from meshbook.rank.process_groups.group_health import Observer
from meshbook.rank.process_groups.ring import CollectiveRing
from meshbook.rank.tensors import watching
from meshbook.wire.messages import NumberFinding, SentinelReport

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
        store: Callable[[], Any],
        hooks: TrainingHooks,
        notify: Callable[[str], None],
        cell_title: Callable[[str], str | None],
    ) -> None:
        """
        Args:
            store: returns what all ranks of the mesh share.
            hooks: that no other sentinel has installed.
            notify: shows a sentence under the running cell.
            cell_title: returns "cell 12" for the file of a cell.
        """
        self._rank, self._names, self._ring = rank, ModuleNames(namespace), ring
        self._observers, self._notify, self._places = observers, notify, PlaceNames(cell_title)
        self._main_thread = threading.get_ident()
        self._inputs = CollectiveInputs(rank, GivenBad(store), self._places.note_remote, hooks.guarded)
        self._norms: WeakKeyDictionary[Any, GradientNorms] = WeakKeyDictionary()  # by optimizer: another model's differ
        self._hooks = hooks
        self._findings: list[NumberFinding] = []
        self._num_updates = 0
        self._current: ModuleCall | None = None
        self._leaves: LeafWatch | None = None  # of the current call
        self._calls = KeptCalls(self._names, self._places, self._inputs, self._step)
        self._pending: NumberFinding | None = None  # found, and not yet reported
        self._with_collectives: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # of the running call
        self._scaled_steps = ScaledSteps()
        self._is_scaling = False  # by a scaler of a cell: bad gradients are no fault until a step is taken with them
        self._bad_optimizers: WeakSet[Any] = WeakSet()  # whose last update of this cell was with bad gradients
        self._is_quiet = False  # what is bad now has been reported, or came from elsewhere
        self._training = RemoteTraining(self, self._calls, self._places, self._hooks.guarded)
        self._nan_reader = NaNReader()
        self._ops: RemoteOps | None = None  # while a batch of operations on remote tensors runs

    @property
    def is_armed(self) -> bool:
        return self._hooks.are_installed

    def arm(self) -> None:
        if not self.is_armed:
            self._hooks.install(self)
            self._observers.append(self._inputs)
            watching.current_watcher = self._training

    def disarm(self) -> None:
        if self.is_armed:
            self._hooks.remove()
            self._observers.remove(self._inputs)
            watching.current_watcher = None
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
            self._calls.keep(lambda call: call.is_remote and call.grad_enabled)  # its backward may come
            self._inputs.clear()
            self._with_collectives.clear()
            self._bad_optimizers.clear()
            self._places.remote_op = self._ops = None
            self._training.batch_ended()

    def watch_batch(self, tensors: RunningOps) -> AbstractContextManager[Any] | None:
        """Return what watches a batch of operations on remote tensors while it is entered."""
        if not self.is_armed or self._hooks.failure is not None:
            return None
        self._inputs.clear()
        self._places.remote_op = tensors.current_op
        self._ops = RemoteOps(
            tensors,
            self._may_watch_operation,
            self._num_collectives,
            self._found_remote,
            self._hooks.guarded,
            self._nan_reader,
        )
        return self._ops

    def report(self) -> SentinelReport:
        """Return what was found. Any thread."""
        return SentinelReport(self.is_armed, tuple(self._findings), self._num_updates)

    # ---- forward

    def before_forward(self, module: nn.Module, args: Any) -> None:
        if self._current is not None:
            if self._leaves is not None:
                self._leaves.enter(module, args)
            return
        if self._calls.stack is not None:
            self._calls.stack.enter(module)
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
        self._current.is_remote = watching.is_in_module
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
            if self._calls.stack is not None:
                self._calls.stack.leave()
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
        self._calls.add(call)
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
            self._found(call, self._calls.explain_outputs(call))

    # ---- backward, and the update

    def before_backward(self, loss: torch.Tensor) -> None:
        if not self._is_scaling:  # else the loss was looked at before it was scaled
            self._look_at_loss(loss)

    def before_scaling(self, losses: Any) -> None:
        self._look_for_overflow()
        for loss in numbers.tensors_in(losses):
            self._look_at_loss(loss)
        self._is_scaling = True

    def scaling_ends(self, scaler: Any) -> None:
        if threading.get_ident() == self._main_thread:
            self._report_pending()
            self._is_scaling = False
            skipped = self._scaled_steps.ended(scaler)
            if skipped is not None and self.is_looking:
                self.take(with_skipped(self._calls.explain_skipped(), skipped))
                self._report_pending()
            self._forget_step()  # which may have been skipped

    def _look_at_loss(self, loss: torch.Tensor) -> None:
        if self._calls.stack is not None or not self.is_looking or loss.numel() != 1 or loss.is_cuda:
            return
        part = numbers.part_here(loss)
        if part is None or numbers.is_finite(part):
            return
        place = numbers.place_of(numbers.user_frame(_frame_of_caller()))
        self._pending = self._calls.explain_loss(loss, place)

    def before_update(self, optimizer: Any, *_: Any) -> None:
        if self._calls.stack is not None or threading.get_ident() != self._main_thread or _skips_by_itself(optimizer):
            return
        self._num_updates += 1
        self._scaled_steps.taken(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._num_updates == 1 and compiled.is_any() and not self._calls.have_seen_model_of(parameters):
            self._notify(compiled.BLIND_SPOT)
        self._check_outputs()
        norms = self._norms.setdefault(optimizer, GradientNorms())
        is_finite = norms.check(parameters)
        if not is_finite:
            self._is_scaling = False  # or no scaler skips this step
        is_bad = not is_finite or self._calls.have_given_away
        if is_bad and self.is_looking:
            self.take(self._calls.explain_given_away() if is_finite else self._calls.explain_gradients(parameters))
        exploding = norms.exploding if is_finite else None
        if exploding is not None and (explosion := self._calls.explain_explosion(*exploding, self._rank)) is not None:
            self._add(explosion)
        was_bad = self._pending is not None or is_bad
        self._report_pending()
        (self._bad_optimizers.add if was_bad else self._bad_optimizers.discard)(optimizer)
        if not self._bad_optimizers:
            self._is_quiet = False
        self._forget_step(parameters)

    def _found(self, call: ModuleCall | None, operation: BadOperation | None, place: Place | None = None) -> None:
        if operation is not None and self.is_looking:
            self._pending = self._calls.describe(call, operation, place)

    def take(self, found: NumberFinding | None) -> None:
        """Note a finding, which is reported at the end of the step or call; None: another rank has it."""
        if found is None:
            self._is_quiet = True
        else:
            self._pending = found

    # ---- training on remote tensors

    @property
    def is_looking(self) -> bool:
        return self._pending is None and not self._is_quiet

    def look(self, step_inputs: Sequence[torch.Tensor] = ()) -> None:
        if self._ops is not None:
            self._ops.look(step_inputs)

    def _may_watch_operation(self) -> bool:
        return self._current is None and self._calls.stack is None and self.is_looking and not self._training.is_holding

    def _found_remote(self, operation: BadOperation, line: str, collectives: tuple[int, int]) -> None:
        """Note an operation on remote tensors, unless its bad numbers came from another rank."""
        before, last = collectives
        is_from_elsewhere = before != last and self._inputs.first_bad(last) is None
        self._training.note(None if is_from_elsewhere else self._calls.describe(None, operation, line=line))

    # ---- telling

    def _report_pending(self) -> None:
        """Print what was found, with the collective that carried it on."""
        self._look_for_overflow()
        found, self._pending = self._pending, None
        if found is None:
            return
        self._is_quiet = True
        self._add(with_text(found, self._rank, self._inputs.first_bad()))

    def _look_for_overflow(self) -> None:
        """Take a sum over ranks that is too large in place of what was found, which follows from it.

        One while a scaler scales is for the scaler, as bad gradients are.
        """
        overflow = self._inputs.first_overflow()
        if overflow is not None and not (self._is_scaling or self._training.is_scaling):
            self._pending = self._calls.describe_overflow(overflow) if overflow.is_reported_here else None
            self._is_quiet = True

    def _add(self, finding: NumberFinding) -> None:
        if len(self._findings) < _MAX_FINDINGS:
            self._findings.append(finding)
            self._notify(finding.text)

    def _forget_step(self, updated: Sequence[Any] = ()) -> None:
        """Forget the calls since the last update, but for those of another optimizer if `updated` are parameters."""
        self._nan_reader.op = ""
        self._calls.keep_those_without(updated)
        self._inputs.clear(self._calls.first_collective)

    def _num_collectives(self) -> int:
        last = self._ring.last
        return 0 if last is None else last.seq

    def _step(self) -> int | None:
        step = self._places.step()
        return self._num_updates if step is None and not self._places.are_remote else step


def _skips_by_itself(optimizer: Any) -> bool:
    """Whether a fused optimizer skips this step, as its scaler says it is to."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())


def _frame_of_caller() -> Any:
    return sys._getframe(3)  # of what called the hook, which is guarded
