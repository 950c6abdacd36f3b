"""Copies of a rank's state in CPU memory, from which a thread writes while training goes on.

The buffers are kept for the next save: memory that the process has not touched before takes several times as long.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

# From this size on C's memcpy copies, which NumPy calls. 256 MiB in pieces of 4 MiB took 0.057 s by torch's `copy_` and
# 0.041 s by memcpy; in pieces above 20 MiB, for which glibc does not read the target's memory first, 0.026 s.
_MEMCPY_BYTES = 1 << 20


class StagingBuffers:
    """The buffers of a rank, by what they hold. One save uses them at a time."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    def stage(self, plan: SavePlan, tensors: Mapping[str, Any], values: Mapping[str, bytes]) -> StagedState:
        """Copy what the plan says of these tensors; they may change as soon as this has returned. Waits for the GPU.

        Raises:
            MemoryError, RuntimeError: there is not enough memory; the buffers are dropped.
        """
        staged: dict[MetadataIndex, torch.Tensor] = {}
        state = dict(tensors)
        devices = set()
        try:
            for item in plan.items:
                if item.type is WriteItemType.BYTE_IO:
                    continue
                source = find_state_dict_object(state, item.index).detach()
                staged[item.index] = self._buffer(item.index, source)
                _copy(source, staged[item.index])
                if source.is_cuda:
                    devices.add(source.device)
            for device in devices:
                torch.cuda.current_stream(device).synchronize()
        except BaseException:
            self._buffers = {}
            raise
        self._buffers = staged  # without those that this state no longer has
        return StagedState(staged, values)

    def _buffer(self, index: MetadataIndex, source: torch.Tensor) -> torch.Tensor:
        """Return a buffer of its own storage, which DCP writes without another copy."""
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
        return buffer


def _copy(source: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy a tensor into a buffer of its shape and dtype; from a GPU without waiting for it."""
    is_plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()
    if not is_plain or source.nbytes < _MEMCPY_BYTES:
        buffer.copy_(source, non_blocking=True)
        return
    # Not `.numpy()` of the source: after that the user's storage could not be resized.
    numpy.copyto(_bytes_of(buffer).numpy(), numpy.from_dlpack(_bytes_of(source)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class StagedState(DefaultSavePlanner):
    """What DCP's writer asks for the data of each item of the plan."""

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor], values: Mapping[str, bytes]) -> None:
        super().__init__()
        self._tensors, self._values = tensors, values

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values()) + sum(map(len, self._values.values()))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[write_item.index.fqn])
        return self._tensors[write_item.index]
