"""Copies of a rank's state in CPU memory, from which a thread writes while training goes on.

The buffers are kept for the next save: memory that the process has not touched before takes several times as long.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object


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
        devices = set()
        try:
            for item in plan.items:
                if item.type is WriteItemType.BYTE_IO:
                    continue
                source = find_state_dict_object(dict(tensors), item.index).detach()
                staged[item.index] = self._buffer(item.index, source)
                staged[item.index].copy_(source, non_blocking=True)
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
