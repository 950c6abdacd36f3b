"""The hooks of a sentinel in torch: on modules, optimizers of torch.optim, scalers and `torch.autograd.backward`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshbook.rank.differences import compiled


class Watcher(Protocol):
    """What is called. What it raises ends the hooks, and not the user's step."""

    def before_forward(self, module: nn.Module, args: Any) -> None: ...

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any = None) -> None:
        """After an exception torch passes no `kwargs`, but None in their place."""

    def before_backward(self, loss: torch.Tensor) -> None: ...

    def before_update(self, optimizer: Any, *_: Any) -> None: ...

    def before_scaling(self, losses: Any) -> None:
        """A GradScaler scales losses, and may skip the step of their gradients."""

    def scaling_ends(self, scaler: Any) -> None:
        """A GradScaler is about to be updated, after the steps, or after skipping them."""


class TrainingHooks:
    """The hooks of one watcher after the other. Main thread.

    Those for all modules are made once, for all watchers: code that is compiled while they are there is compiled anew
    for others.

    Attributes:
        is_in_backward: `torch.autograd.backward` runs, which `Tensor.backward` calls.
        failure: what the watcher has raised; nothing is called after that.
    """

    def __init__(self) -> None:
        self._watcher: Any = None  # the last Watcher
        self._on_steps: Any = None  # the hook of optimizers
        self._on_all: list[tuple[dict[int, Any], int, Any]] = []  # the entries of the hooks for all modules
        self._after_forward = self._guarded(lambda: self._watcher.after_forward)
        self._on_one: Any = None  # the hook of `watch_only`
        self._original_backward: Any = None
        self._of_scalers: Any = None  # the original methods of GradScaler
        self.is_in_backward = False
        self.failure: Exception | None = None

    @property
    def are_installed(self) -> bool:
        return self._on_steps is not None

    def install(self, watcher: Watcher) -> None:
        self._watcher, self.failure, self.is_in_backward = watcher, None, False
        if not self._on_all:
            before_forward = self._guarded(lambda: self._watcher.before_forward)
            on_modules = [
                torch_module.register_module_forward_pre_hook(before_forward),
                torch_module.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            ]
            self._on_all = [entry for handle in on_modules for entry in _entries_of(handle)]
        self._watch_all(True)
        self._on_steps = register_optimizer_step_pre_hook(self.guarded(watcher.before_update))
        original = self._original_backward = torch.autograd.backward
        before_backward = self.guarded(watcher.before_backward)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, torch.Tensor):
                before_backward(tensors)
            self.is_in_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.is_in_backward = False

        torch.autograd.backward = backward
        self._install_on_scalers(self.guarded(watcher.before_scaling), self.guarded(watcher.scaling_ends))
        warnings.filterwarnings("ignore", compiled.HOOKS_WARNING)

    def _install_on_scalers(self, before_scaling: Callable[..., None], scaling_ends: Callable[..., None]) -> None:
        original_scale, original_update = self._of_scalers = torch.amp.GradScaler.scale, torch.amp.GradScaler.update

        @functools.wraps(original_scale)
        def scale(self: Any, outputs: Any) -> Any:
            if self.is_enabled():
                before_scaling(outputs)
            return original_scale(self, outputs)

        @functools.wraps(original_update)
        def update(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_enabled():
                scaling_ends(self)
            original_update(self, *args, **kwargs)

        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
        torch.amp.GradScaler.update = update  # type: ignore[method-assign]

    def watch_only(self, module: nn.Module) -> None:
        """Until `end_watching_only`, call the watcher for this module alone, which has begun: at its end.

        Modules within it are called as fast as without hooks.
        """
        self._watch_all(False)
        self._on_one = module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)

    def end_watching_only(self) -> None:
        """After `watch_only`, at the end of that module or later."""
        if self._on_one is not None:
            self._on_one.remove()
            self._on_one = None
            self._watch_all(True)

    def _watch_all(self, is_watched: bool) -> None:
        for hooks, key, value in self._on_all:
            if is_watched:
                hooks[key] = value
            else:
                hooks.pop(key, None)

    def remove(self) -> None:
        self.end_watching_only()
        self._watch_all(False)
        self._on_steps.remove()
        self._on_steps = None
        warnings.filters[:] = [each for each in warnings.filters if not _is_about_hooks(each)]  # type: ignore[index]
        torch.autograd.backward = self._original_backward
        torch.amp.GradScaler.scale, torch.amp.GradScaler.update = self._of_scalers  # type: ignore[method-assign]

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that does not raise, and that is not called any more after a failure: it returns None."""
        return self._guarded(lambda: hook)

    def _guarded(self, hook_now: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # dynamo traces hooks, too; this one leaves nothing in the graph
                return None
            if self.failure is not None:
                return None
            try:
                return hook_now()(*args, **kwargs)
            except Exception as error:
                self.failure = error
                return None

        return run


def _is_about_hooks(warning_filter: Any) -> bool:
    return getattr(warning_filter[1], "pattern", "") == compiled.HOOKS_WARNING


def _entries_of(handle: Any) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Yield where torch has a hook, with what: the dictionary, the key, the value."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        if (hooks := reference()) is not None and handle.id in hooks:
            yield hooks, handle.id, hooks[handle.id]
