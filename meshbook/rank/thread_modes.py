"""What torch has set for the main thread, and how it comes back when a call was interrupted.

A `with torch.no_grad():` that an interrupt ends within its `__enter__` or `__exit__` leaves its mode behind. So does
`FakeTensorMode`, in which DTensor finds out shapes: every operation after it would fail.
"""

from __future__ import annotations

import sys
from typing import Any


class ThreadModes:
    """The modes of this thread as they are now."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            self._grad_enabled = self._torch.is_grad_enabled()
            self._num_dispatch_modes = self._torch._C._len_torch_dispatch_stack()
            self._only_lift_cpu_tensors = self._torch._C._only_lift_cpu_tensors()

    def restore(self) -> None:
        """Set them as they were. What was entered since, and not left, is left."""
        torch = self._torch
        if torch is None:
            return
        torch.set_grad_enabled(self._grad_enabled)
        while torch._C._len_torch_dispatch_stack() > self._num_dispatch_modes:
            torch.utils._python_dispatch._pop_mode()
        torch._C._set_only_lift_cpu_tensors(self._only_lift_cpu_tensors)
