"""The states of this process's random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of the generators "torch", "python", "cuda" and "numpy", of those that are in use."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set generators to states that `random_states` has returned; those that are not among them stay as they are."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
