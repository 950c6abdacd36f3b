"""How a rank's sentinel is called from within operations on remote tensors: of modules, and of optimizers' steps.

Ranks work as well without one. Main thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from meshbook.rank.tensors.operators import FUNCTIONS
from meshbook.rank.tensors.templates import CompiledTemplate
from meshbook.rank.tensors.watched_ops import RecordedWatcher
from meshbook.wire.messages import Frame


class TrainingWatcher(Protocol):
    """What is called. It raises nothing."""

    def backward_ended(self, parameters: Mapping[str, torch.Tensor], input_gradients: Sequence[Any]) -> None:
        """A module's backward has ended; its parameters, in the module's order, have their gradients."""

    def gradients_given(self) -> None:
        """The operation that gives these gradients to the notebook runs."""

    def step_begins(self, gradients: Sequence[Any], parameters: Sequence[Any]) -> None:
        """All ranks take an optimizer's step from now on."""

    def step_ended(self) -> None:
        """They have taken it."""

    def scaling(self, scale: float | None, /) -> None:
        """A GradScaler has scaled a loss, and may skip the step; None: it has ended its step."""


# An operation's number in its engine, or, of a recorded step's, the notebook's line; None: that is not known.
Issued = int | Frame | None


class OpsWatcher(Protocol):
    """What runs operations in place of their templates."""

    def run(self, template: CompiledTemplate, inputs: list[Any], floats: Sequence[float], issued: Issued) -> Any:
        """Run an operation and return its result. Raises what the operation does."""

    def of_recorded(self, frames: Sequence[Frame | None]) -> RecordedWatcher:
        """Return what watches a recorded step, whose operations were issued at these lines."""


# The sentinel of this rank, while it is on.
current_watcher: TrainingWatcher | None = None
# What it has the operations of the running batch looked at by.
current_ops: OpsWatcher | None = None
# Whether a module runs of which the notebook has the parameters.
is_in_module = False


def runner() -> Callable[[CompiledTemplate, list[Any], Sequence[float], Issued], Any]:
    """Return what runs operations of this batch: see `OpsWatcher.run`."""
    return run_unwatched if current_ops is None else current_ops.run


def run_unwatched(template: CompiledTemplate, inputs: list[Any], floats: Sequence[float], issued: Issued) -> Any:
    return template.run(inputs, floats)


@contextlib.contextmanager
def in_module() -> Iterator[None]:
    """Run a module's forward or backward, which a sentinel watches by the module's calls, not by operations."""
    global is_in_module
    is_in_module = True
    try:
        with _disable_current_modes():
            yield
    finally:
        is_in_module = False


def backward_ended(parameters: Mapping[str, torch.Tensor], input_gradients: Sequence[Any]) -> None:
    if current_watcher is not None:
        current_watcher.backward_ended(parameters, input_gradients)


def gradients_given() -> None:
    if current_watcher is not None:
        current_watcher.gradients_given()


def set_scaling(scale: float) -> None:
    """Say by which scale a scaler of the notebook scales; negative: it has ended its step."""
    if current_watcher is not None:
        current_watcher.scaling(None if scale < 0 else scale)


FUNCTIONS["set_scaling"] = set_scaling
