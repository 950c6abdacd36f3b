"""Sends and receives of a device's tensors on gloo: through the CPU's memory.

gloo's collectives copy CUDA tensors themselves. Its sends and receives take any address for one of the CPU's memory,
fail with "Bad address", and close the connection (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def send(group: Any, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Any:
    """Run `ProcessGroup.send`; return the operation in flight, which keeps the copy alive."""
    return group.send([tensor.cpu() for tensor in tensors], dst, tag)


def recv(group: Any, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Any:
    """Run `ProcessGroup.recv`; return the operation in flight."""
    return _receive(lambda buffers: group.recv(buffers, src, tag), tensors)


def recv_anysource(group: Any, tensors: Sequence[torch.Tensor], tag: int) -> Any:
    """Run `ProcessGroup.recv_anysource`; return the operation in flight."""
    return _receive(lambda buffers: group.recv_anysource(buffers, tag), tensors)


# By the ProcessGroup methods that they replace.
ON_GLOO: dict[str, Callable[..., Any]] = {"recv": recv, "recv_anysource": recv_anysource, "send": send}


def _receive(start: Callable[[list[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> Any:
    buffers = [tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu") for tensor in tensors]
    work = start(buffers)
    copies = [(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True) if tensor is not buffer]
    return _Received(work, copies) if copies else work


class _Received:
    """A receive, which fills its tensors when it is waited for; other methods are those of gloo's operation."""

    def __init__(self, work: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self, *timeout: Any) -> bool:
        """Wait for the data, and enqueue the copy on the current stream.

        Raises:
            RuntimeError: the connection was closed, or the time is up.
        """
        self._work.wait(*timeout)
        while self._copies:
            tensor, buffer = self._copies.pop()
            with torch.no_grad():
                tensor.copy_(buffer)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
