"""Kinds of objects that have a state: how it is read from them, and goes back."""

from __future__ import annotations

from typing import Any

import torch

# What torch.compile and checkpoints of activations put into names of modules and parameters; state dicts leave it out.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def kind_of(value: Any) -> str:
    """Return "module", "optimizer", "tensor", "generator", "stateful", or "value".

    "stateful" are other objects with `state_dict` and `load_state_dict`: schedulers, scalers, samplers, loaders. A
    "value" has no state of its own: it is replaced as a whole.
    """
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, torch.Generator):
        return "generator"
    is_stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return "stateful" if is_stateful and not isinstance(value, type) else "value"


def has_state_dict(value: Any) -> bool:
    """Whether an object that is no module has its state by `state_dict`."""
    return kind_of(value) in ("optimizer", "stateful")


def is_loadable(value: Any) -> bool:
    """Whether an object has a state beside which a pickle can name it: `modules.state_of` returns it."""
    return kind_of(value) not in ("tensor", "value")


def has_identity(value: Any) -> bool:
    """Whether a state is loaded into the object: a copy is no substitute where several names use it."""
    return kind_of(value) != "value"


def clean_name(name: str) -> str:
    """Return the name of a module or a parameter without the parts that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
