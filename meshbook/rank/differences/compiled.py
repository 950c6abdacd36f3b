"""What torch.compile hides from the sentinel, which sees the calls of modules from outside of compiled code."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_CALLS_MODULES = os.path.join(_TORCH_FOLDER, "nn", "modules", "module.py")

# How torch's warning begins that a compiled module calls hooks twice: the sentinel's are not.
HOOKS_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"

BLIND_SPOT = (
    "the sentinel does not see the model's forward: torch.compile has compiled what calls it, a function or the model "
    "in place (model.compile()). The loss and the gradients are watched; torch.compile(model) is seen whole"
)


def is_any() -> bool:
    """Whether anything is compiled in this process."""
    return bool(getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None))


def is_called_by_torch(frame: Any) -> bool:
    """Whether a module is a part of compiled code, which torch calls in its own way.

    Args:
        frame: of the module's call.
    """
    while frame is not None and frame.f_code.co_filename == _CALLS_MODULES:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER)
