"""One forward, described module by module, so that a controller can tell where ranks begin to differ. No values.

Hooks on all modules describe a module's own parameters and buffers and its inputs before each call, and its outputs
after it. Digests are taken at once, because a later module may overwrite a tensor. Random numbers and buffers are put
back, so that the program goes on as if the forward had not been run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from meshbook.errors import UsageError
from meshbook.rank.differences.rerun import run_quietly
from meshbook.rank.differences.state import buffers_of_own_batches, describe_tensor
from meshbook.rank.differences.wording import ModuleNames
from meshbook.rank.state.modules import local_part
from meshbook.wire.messages import StateDescription, StateEntry


def describe_forward(expression: str, namespace: dict[str, Any]) -> StateDescription:
    """Run an expression that calls modules, such as "model(x)", and describe what they take and give, in their order.

    Raises:
        UsageError: it calls no module.
        Exception: what the expression raises.
    """
    entries = _run(expression, namespace, ()).entries
    if not entries:
        raise UsageError(f"`{expression}` calls no module of torch, so there is nothing to compare")
    return StateDescription({expression: "forward"}, {expression: tuple(entries)})


def tensors_of_forward(
    expression: str, namespace: dict[str, Any], paths: Collection[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Run it once more; return these tensors by path, under the expression, as `tensors_behind` does for a name."""
    return {expression: _run(expression, namespace, paths).kept}


def _run(expression: str, namespace: dict[str, Any], paths: Collection[str]) -> _ForwardLog:
    log = _ForwardLog(ModuleNames(namespace).all_names(), paths)
    handles = [
        register_module_forward_pre_hook(log.before),
        register_module_forward_hook(log.after, with_kwargs=True),
    ]
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(gpus), torch.no_grad(), run_quietly():
            eval(compile(expression, "<forward>", "eval"), namespace)
    finally:
        for handle in handles:
            handle.remove()
        log.restore_buffers()
    return log


class _ForwardLog:
    """What the modules that one thread calls take and give.

    Attributes:
        entries: descriptions, in their order.
        kept: copies of the tensors that were asked for, by path.
    """

    def __init__(self, names: dict[int, str], paths: Collection[str]) -> None:
        self.entries: list[StateEntry] = []
        self.kept: dict[str, torch.Tensor] = {}
        self._names, self._paths = names, paths
        self._thread = threading.get_ident()
        self._num_calls: Counter[int] = Counter()  # by module
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # with a copy of what was in it

    def before(self, module: nn.Module, args: Any) -> None:
        if self._is_left_out(module):
            return
        self._num_calls[id(module)] += 1
        if self._num_calls[id(module)] == 1:
            self._add_state(module)
        self._add("input", module, args)

    def after(self, module: nn.Module, _args: Any, kwargs: Any, outputs: Any) -> None:
        if not self._is_left_out(module):
            self._add("input", module, kwargs, "named ")  # torch has shown them to no hook before
            self._add("output", module, outputs)

    def restore_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)

    def _is_left_out(self, module: nn.Module) -> bool:
        return isinstance(module, DistributedDataParallel) or threading.get_ident() != self._thread

    def _add_state(self, module: nn.Module) -> None:
        """Describe the module's own parameters and buffers."""
        own_buffers = buffers_of_own_batches(module) if module.training else set()
        for name, parameter in module.named_parameters(recurse=False):
            self._add_tensor(f"{self._name(module)}.{name}", parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self._buffers.append((buffer, buffer.clone()))
            own = "statistics of each rank's own batches" if id(buffer) in own_buffers else ""
            self._add_tensor(f"{self._name(module)}.{name}", buffer, own)

    def _add(self, kind: str, module: nn.Module, value: Any, prefix: str = "") -> None:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        number = self._num_calls[id(module)]
        call = f" in call {number}" if number > 1 else ""
        for at, tensor in enumerate(tensors):
            which = f" {at + 1}" if len(tensors) > 1 else ""
            self._add_tensor(f"{prefix}{kind}{which} of {self._name(module)}{call}", tensor)

    def _add_tensor(self, path: str, tensor: torch.Tensor, own: str = "") -> None:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        self.entries.append(describe_tensor(path, tensor, None, own))
        if path in self._paths:
            self.kept[path] = local_part(tensor).clone()

    def _name(self, module: nn.Module) -> str:
        """Return its path; of a module that no name leads to its class, numbered in the order of first calls."""
        if id(module) not in self._names:
            self._names[id(module)] = f"{type(module).__name__} #{len(self._num_calls)}"
        return self._names[id(module)]
