"""The hooks of a sentinel in torch: on all modules, all optimizers of torch.optim, and `Tensor.backward`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Watcher(Protocol):
    """What is called. What it raises ends the hooks, and not the user's step."""

    def before_forward(self, module: nn.Module, args: Any) -> None: ...

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any = None) -> None:
        """After an exception torch passes no `kwargs`, but None in their place."""

    def before_backward(self, loss: torch.Tensor) -> None: ...

    def before_update(self, optimizer: Any, *_: Any) -> None: ...


class TrainingHooks:
    """The hooks of one watcher. Main thread.

    Attributes:
        is_in_backward: `Tensor.backward` runs.
        failure: what the watcher has raised; nothing is called after that.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._handles: list[Any] = []
        self._on_modules: list[Any] = []  # those of the handles that are for all modules; [] within `only_on`
        self._original_backward: Any = None
        self.is_in_backward = False
        self.failure: Exception | None = None

    @property
    def are_installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        self.failure, self.is_in_backward = None, False
        self._before_forward = self.guarded(self._watcher.before_forward)
        self._after_forward = self.guarded(self._watcher.after_forward)
        self._handles = [register_optimizer_step_pre_hook(self.guarded(self._watcher.before_update))]
        self.watch_all()
        original = self._original_backward = torch.Tensor.backward
        before_backward = self.guarded(self._watcher.before_backward)

        @functools.wraps(original)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before_backward(tensor)
            self.is_in_backward = True
            try:
                return original(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self.is_in_backward = False

        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]

    def watch_all(self) -> None:
        """Call the watcher for every module, from the next one that begins."""
        if not self._on_modules:
            self._on_modules = [
                torch_module.register_module_forward_pre_hook(self._before_forward),
                torch_module.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            ]

    def watch_only(self, module: nn.Module) -> None:
        """Until `watch_all`, call the watcher for this module alone, which has begun: at its end.

        Modules within it are called as fast as without hooks.
        """
        self._remove_from_modules()
        handle = module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        self._on_modules = [handle]

    def end_watching_only(self) -> None:
        """After `watch_only`, at the end of that module or later."""
        self._remove_from_modules()
        self.watch_all()

    def _remove_from_modules(self) -> None:
        for handle in self._on_modules:
            handle.remove()
        self._on_modules = []

    def remove(self) -> None:
        self._remove_from_modules()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.Tensor.backward = self._original_backward  # type: ignore[method-assign]

    def guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that does not raise, and that is not called any more after a failure."""

        def run(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():  # dynamo traces hooks, too; this one leaves nothing in the graph
                return
            if self.failure is not None:
                return
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self.failure = error

        return run
