"""The states of this process's random generators, by what users call them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

TORCH = "torch's random state"
_CUDA = "CUDA's random state"
_PYTHON = "Python's random state"
_NUMPY = "NumPy's random state"
NAMES = (TORCH, _CUDA, _PYTHON, _NUMPY)


def random_states() -> dict[str, Any]:
    states: dict[str, Any] = {TORCH: torch.get_rng_state(), _PYTHON: random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states[_CUDA] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        states[_NUMPY] = sys.modules["numpy"].random.get_state()
    return states


def set_random_state(name: str, state: Any) -> None:
    if name == TORCH:
        torch.set_rng_state(state)
    elif name == _CUDA:
        torch.cuda.set_rng_state(state)
    elif name == _PYTHON:
        random.setstate(state)
    elif "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state)
