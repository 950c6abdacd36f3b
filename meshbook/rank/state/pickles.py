"""Pickles of states without the contents of their tensors, which are kept beside them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshbook.errors import UsageError


def dump(value: Any, key_of_tensor: Callable[[torch.Tensor], Any], *, advice: str) -> bytes:
    """Pickle a value.

    Args:
        key_of_tensor: returns what is pickled in place of a tensor; called once for each.
        advice: what the user does with a module or optimizer that the value holds.

    Raises:
        UsageError: it holds something that cannot be in a state.
        Exception: what a user's `__reduce__` raises.
    """
    file = io.BytesIO()
    _Pickler(file, key_of_tensor, advice).dump(value)
    return file.getvalue()


def load(pickled: bytes, tensor_of_key: Callable[[Any], torch.Tensor]) -> Any:
    """Return the value of a pickle.

    Args:
        tensor_of_key: returns the tensor that a key stands for; called once for each.
    """
    return _Unpickler(io.BytesIO(pickled), tensor_of_key).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, key_of_tensor: Callable[[torch.Tensor], Any], advice: str) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._key_of_tensor, self._advice = key_of_tensor, advice
        self._keys: dict[int, tuple[str, int, Any]] = {}
        self._met: list[Any] = []  # keeps the ids of objects in use that only the pickle refers to

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._key("tensor", value, value)
        if isinstance(value, torch.Generator):
            return self._key(value.device.type, value, value.get_state())
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            raise UsageError(f"it holds a {type(value).__name__}; {self._advice}")
        if isinstance(value, (dist.ProcessGroup, DeviceMesh)):
            raise UsageError(f"it holds a {type(value).__name__}, which belongs to one process")
        return None

    def _key(self, kind: str, value: Any, tensor: torch.Tensor) -> tuple[str, int, Any]:
        if id(value) not in self._keys:
            self._keys[id(value)] = kind, len(self._met), self._key_of_tensor(tensor)
            self._met.append(value)
        return self._keys[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensor_of_key: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(file)
        self._tensor_of_key = tensor_of_key
        self._made: dict[int, Any] = {}

    def persistent_load(self, key: tuple[str, int, Any]) -> Any:
        kind, number, tensor_key = key
        if number not in self._made:
            tensor = self._tensor_of_key(tensor_key)
            self._made[number] = tensor if kind == "tensor" else _make_generator(kind, tensor)
        return self._made[number]


def _make_generator(device: str, state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator
