"""Operators of torch's, and a module, that have a fault on one rank. Imported here and by the ranks.

`faulty` makes a new tensor and changes nothing; `change_faultily` has changed its tensor when the fault comes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def trigger_fault(what: str, guilty: int, seed: int) -> None:
    """The fault, on that rank of a mesh; -1: on every rank."""
    if not dist.is_initialized() or guilty not in (-1, dist.get_rank()):
        return
    if what == "raise":
        raise ValueError(f"the seeded fault {seed}")
    if what == "stop":
        print(f"held {seed}", flush=True)
        time.sleep(1000)
    elif what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def press_at(call: int, guilty: int = -1) -> None:
    """SIGINT to this process, if it is that rank, at the call of that number from here on: as a function of Python's
    begins, or one of C's has ended, where Python delivers signals. 0 takes it back."""
    if guilty not in (-1, dist.get_rank() if dist.is_initialized() else -1):
        return

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal call
        if event in ("call", "c_return"):
            call -= 1
            if call == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count if call else None)


@torch.library.custom_op("faults::faulty", mutates_args=())
def faulty(x: torch.Tensor, what: str, guilty: int, seed: int) -> torch.Tensor:
    trigger_fault(what, guilty, seed)
    return x + 1


@faulty.register_fake
def _(x: torch.Tensor, what: str, guilty: int, seed: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("faults::change_faultily", mutates_args={"x"})
def change_faultily(x: torch.Tensor, what: str, guilty: int, seed: int) -> None:
    x.add_(1)
    trigger_fault(what, guilty, seed)


@change_faultily.register_fake
def _(x: torch.Tensor, what: str, guilty: int, seed: int) -> None:
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A module that has the fault it is armed with, once.

_armed: list[tuple[str, str, int, int]] = []


def arm(place: str, what: str, guilty: int, seed: int) -> None:
    """The next pass by that place of a `Net` on this rank has the fault; "": none has."""
    _armed[:] = [(place, what, guilty, seed)] if place else []


def _trigger_if_armed(place: str) -> None:
    if _armed and _armed[0][0] == place:
        (_, *fault) = _armed.pop()
        trigger_fault(*fault)  # type: ignore[arg-type]


class _FaultyIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _trigger_if_armed("inside forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _trigger_if_armed("inside backward")
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _trigger_if_armed("before forward")
        inside: torch.Tensor = _FaultyIdentity.apply(self.up(x).tanh())
        found: torch.Tensor = self.down(inside)
        _trigger_if_armed("after forward")
        return found
