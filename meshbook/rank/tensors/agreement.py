"""All ranks take an optimizer's step, or none does.

The controller sends `begin_step` before the operations of a step, and `end_step` after them. In `begin_step` the ranks
check that all of them have what the step needs: one small all-reduce, on the CPU. If one of them lacks a gradient, no
rank runs the step, and parameters stay unchanged. From the all-reduce to `end_step` interrupts are deferred: a rank
that left in between would leave the others to take the step alone, and the operations are local and short. If the
all-reduce does not complete, aborting the groups ends it.

This module stores which steps were completed, by the controller's serial numbers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from meshbook.rank.tensors import watching
from meshbook.rank.tensors.lowering import wait_local_tensor
from meshbook.rank.tensors.operators import FUNCTIONS

# Completed steps of an engine that are remembered: more than the controller can have in flight.
_MAX_COMPLETED = 4096


class StepRefused(RuntimeError):
    """Another rank cannot take part in this step of an optimizer."""


class StepTracker:
    """The steps of one engine on this rank."""

    def __init__(self) -> None:
        self.completed: deque[int] = deque(maxlen=_MAX_COMPLETED)
        self._interrupt_deferral = contextlib.ExitStack()  # defers interrupts while a step runs

    def begin(self, defer: Callable[[], AbstractContextManager[Any]]) -> None:
        self._interrupt_deferral.close()
        self._interrupt_deferral.enter_context(defer())

    def end(self) -> None:
        """End the deferral of interrupts.

        Raises:
            KeyboardInterrupt: an interrupt arrived meanwhile.
        """
        deferral, self._interrupt_deferral = self._interrupt_deferral, contextlib.ExitStack()
        deferral.close()


# Tracker of the engine whose operations run now: a rank has one thread that runs them.
current_tracker: StepTracker | None = None
defer_interrupts: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def all_ranks_ready(mesh: Any, is_ready: bool) -> bool:
    """Whether all ranks of the mesh are ready. Blocks until all have called this."""
    if mesh is None or mesh.size() == 1:
        return is_ready
    not_ready = torch.tensor([0 if is_ready else 1], dtype=torch.int32)
    groups = [dist.group.WORLD] if mesh.size() == dist.get_world_size() else mesh.get_all_groups()
    for group in groups:
        dist.all_reduce(not_ready, dist.ReduceOp.MAX, group=group)
    return int(not_ready) == 0


def begin_step(tensors: Sequence[torch.Tensor], num_gradients: int, mesh: Any, serial: float) -> None:
    """Begin a step for which this rank has all inputs.

    Args:
        tensors: the gradients, as many parameters, and the optimizer's state.

    Raises:
        StepRefused: another rank has not.
        KeyboardInterrupt: an interrupt arrived before all ranks had replied.
    """
    tracker = current_tracker
    if tracker is not None:
        tracker.begin(defer_interrupts)
    try:
        _wait_for(tensors, mesh)
        if not all_ranks_ready(mesh, True):
            raise StepRefused("another rank could not take part in this step of the optimizer, so no rank has taken it")
    except BaseException:
        if tracker is not None:
            tracker.end()
        raise
    if watching.current_watcher is not None:
        watching.current_watcher.step_begins(tensors[:num_gradients], tensors[num_gradients : 2 * num_gradients])


def _wait_for(tensors: Sequence[torch.Tensor], mesh: Any) -> None:
    """Wait for collectives that are still computing a step's inputs: one that fails in the step would leave half of it.

    Raises:
        RuntimeError: one has failed; the other ranks know that this one is not ready.
    """
    try:
        for tensor in tensors:
            wait_local_tensor(tensor)
    except Exception:
        with contextlib.suppress(Exception):
            all_ranks_ready(mesh, False)
        raise


def end_step(serial: float) -> None:
    """Record a completed step and end the deferral of interrupts.

    Raises:
        KeyboardInterrupt: an interrupt arrived meanwhile.
    """
    if watching.current_watcher is not None:
        watching.current_watcher.step_ended()
    if current_tracker is not None:
        current_tracker.completed.append(int(serial))
        current_tracker.end()


FUNCTIONS["begin_step"] = begin_step
FUNCTIONS["end_step"] = end_step
