"""The submodules of a module on the ranks, as the notebook's process sees them: names, classes, modes and tensors.

What is changed here that the ranks would not follow is refused: a forward there would go on without it, and not say so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from meshbook.errors import UsageError
from meshbook.rank.tensors.resident_module import ELSEWHERE, Modes


class PartOnRanks(nn.Module):
    """A module, or a part of one, whose code and attributes are on the ranks. Its tensors are those of the ranks."""

    _kind: type[nn.Module] = nn.Module  # its class there, or the first base of it that is known here
    _on_ranks: Mapping[str, Any] = {}  # attributes there, besides tensors and submodules; ELSEWHERE: not known here

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" or isinstance(value, (nn.Module, nn.Parameter)) or self._has_on_ranks(name):
            self._refuse(f"{name!r} would be set here only")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self._on_ranks:
            raise AttributeError(
                f"{name!r} of this module is on the ranks, and can be neither read nor called here: have forward use "
                "it there, with an argument that says when, or keep here what the factory makes it of (a "
                "configuration). meshbook.module_to_mesh(module, mesh) runs the module's code here"
            )
        return super().__getattr__(name)

    def __delattr__(self, name: str) -> None:
        if self._has_on_ranks(name):
            self._refuse(f"{name!r} would be deleted here only")
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse(f"{name!r} would be added here only")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._refuse(f"{name!r} would be added here only")

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        self._refuse(f"{name!r} would be added here only")

    def __getitem__(self, at: Any) -> Any:
        if not issubclass(self._kind, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            raise TypeError(f"{self._kind.__name__!r} object is not subscriptable")
        return self._modules[at] if issubclass(self._kind, nn.ModuleDict) else [*self._modules.values()][at]

    def __len__(self) -> int:
        if not issubclass(self._kind, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            raise TypeError(f"object of type {self._kind.__name__!r} has no len()")
        return len(self._modules)

    def __bool__(self) -> bool:
        return True

    def _has_on_ranks(self, name: str) -> bool:
        there = ("_on_ranks", "_parameters", "_buffers", "_modules")
        return any(name in self.__dict__.get(kind, ()) for kind in there)

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(
            f"{reason}, and the module that computes is on the ranks. Change it before it is distributed, or in its "
            "factory; give forward as an argument what differs between calls; change numbers of tensors in place, "
            "p.copy_(...). meshbook.module_to_mesh(module, mesh) runs the module's code here, where this works"
        )


class Submodule(PartOnRanks):
    """A part of a module on the ranks. `isinstance` says what it is there."""

    def __init__(self, kind: type[nn.Module], on_ranks: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(_kind=kind, _on_ranks=on_ranks)

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        return self._kind

    def __getattr__(self, name: str) -> Any:
        if (value := self._on_ranks.get(name, ELSEWHERE)) != ELSEWHERE:
            return value
        method = inspect.getattr_static(self._kind, name, None)
        if inspect.isfunction(method) and self._kind.__module__.startswith("torch.nn."):  # such as reset_parameters
            return method.__get__(self)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("only the whole module can be called here: its parts are on the ranks")

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a hook of a part would be here only, and never be called")

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook


def add_parts(
    root: PartOnRanks, parts: Sequence[tuple[str, Sequence[tuple[str, str]], bool, Mapping[str, Any]]]
) -> None:
    """Give a module its submodules, by the description of the ranks: parents come first."""
    for name, classes, training, on_ranks in parts:
        kind = next(filter(None, (_class_here(*names) for names in classes)), nn.Module)
        part = root
        if name:
            parent, _, last = name.rpartition(".")
            part = root.get_submodule(parent)._modules[last] = Submodule(kind, on_ranks)
        else:
            root.__dict__.update(_kind=kind, _on_ranks={at: on_ranks[at] for at in on_ranks if at != "forward"})
        part.training = training


def _class_here(module: str, qualified_name: str) -> type[nn.Module] | None:
    found: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def modes_of(root: nn.Module) -> Modes:
    """Return whether a module trains and, if some of its parts are in the other mode, their names."""
    others = tuple(name for name, part in root.named_modules() if part.training != root.training)
    return (root.training, others) if others else root.training
