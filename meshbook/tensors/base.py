"""The base of `RemoteTensor`: what code below it knows of one."""

from __future__ import annotations

from operator import attrgetter

import torch

from meshbook.tensors.engine import TensorEngine
from meshbook.tensors.specs import TensorHandle, TensorSpec


class MeshTensor(torch.Tensor):
    """A torch.Tensor whose data is on the ranks: a handle with a spec, and through it the engine."""

    _handle: TensorHandle
    _spec: TensorSpec = property(attrgetter("_handle.spec"))  # type: ignore[assignment]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def engine(self) -> TensorEngine:
        """The engine that sends its operations."""
        found: TensorEngine = self._spec.engine
        return found
