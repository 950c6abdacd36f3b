"""Where a checkpoint's state goes, by kind of name: what does not fit, where tensors are read to, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.tensor import DTensor

from meshbook.errors import CheckpointError
from meshbook.rank.checkpoints.named_state import (
    NamedState,
    Path,
    key_of,
    namings,
    read_optimizer,
    read_state,
)
from meshbook.rank.state.kinds import kind_of
from meshbook.rank.state.random_states import set_random_states
from meshbook.wire.messages import SavedName

Entries = Mapping[Path, TensorStorageMetadata | None]


class Problem(NamedTuple):
    """Something of a checkpoint that does not fit."""

    category: str
    text: str


@dataclass
class Target:
    """One name that is restored.

    Attributes:
        tensors: where to read tensors to, by path.
        values: what was read, by path; filled in by the reader.
        value_paths: which values are wanted.
        own_paths: what the name holds now; what the checkpoint has beside these does not fit.
        saved_paths: what the checkpoint has and the name has to hold.
        bound_names: names that are bound anew.
    """

    name: str
    namespace: MutableMapping[str, Any]
    problems: list[Problem] = field(default_factory=list)
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    value_paths: list[Path] = field(default_factory=list)
    own_paths: set[Path] = field(default_factory=set)
    saved_paths: set[Path] = field(default_factory=set)
    bound_names: tuple[str, ...] = ()

    def compare_values(self) -> list[Problem]:
        """Return what of the values read does not fit."""
        return []

    def apply(self) -> None:
        """Give the object its state; tensors were read."""
        raise NotImplementedError

    def check_tensor(self, path: Path, entry: TensorStorageMetadata | None, tensor: torch.Tensor) -> None:
        """Note how a tensor here differs from the checkpoint's, if it does."""
        key = key_of(path)
        if entry is None:
            self.problems.append(Problem("of another kind", f"{key} is a tensor here and a value in the checkpoint"))
        elif entry.size != tensor.shape:
            here, there = tuple(tensor.shape), tuple(entry.size)
            self.problems.append(Problem("of another shape", f"{key} is {here} here and {there} in the checkpoint"))
        elif entry.properties.dtype != tensor.dtype:
            text = f"{key} is {tensor.dtype} here and {entry.properties.dtype} in the checkpoint"
            self.problems.append(Problem("of another dtype", text))

    def find_unwritable(self) -> list[Problem]:
        """Return the tensors into which nothing can be read."""
        found = [key_of(path) for path, tensor in self.tensors.items() if _is_expanded(tensor)]
        text = "is expanded (elements share memory), and cannot be written to; put"
        return [Problem("not to be restored", f"{key} {text} {key}.clone() in its place") for key in found]

    def missing(self, path: Path) -> None:
        self.problems.append(Problem("missing in the checkpoint", key_of(path)))


def _is_expanded(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))


def make_target(
    saved: SavedName, namespace: MutableMapping[str, Any], entries: Entries, device: torch.device
) -> Target:
    """Return where a saved name goes; its `problems` say what does not fit. Changes nothing.

    Raises:
        CheckpointError: it cannot be restored at all.
    """
    name, kind = saved.name, saved.kind
    if kind == "rng":
        return _RngTarget(name, namespace, value_paths=[(name,)])
    is_bound = name in namespace
    if kind == "value":
        if is_bound and kind_of(namespace[name]) not in ("value", "stateful"):
            raise CheckpointError(f"it is a {kind_of(namespace[name])} here and a plain value in the checkpoint")
        return _ValueTarget(name, namespace, value_paths=[(name,)], bound_names=(name,))
    if not is_bound and kind != "tensor":
        raise CheckpointError(f"no such name is bound here; run the cell that makes the {kind}")
    if is_bound and kind_of(namespace[name]) != kind:
        raise CheckpointError(f"it is a {kind_of(namespace[name])} here and a {kind} in the checkpoint")
    if kind == "tensor":
        return _tensor_target(name, namespace, entries, device)
    if kind == "generator":
        return _GeneratorTarget(name, namespace, value_paths=[(name,)])
    if kind == "optimizer":
        return _optimizer_target(name, namespace, entries)
    current = read_state(name, namespace)
    if kind == "module":
        return _module_target(current, namespace, entries)
    return _stateful_target(current, namespace, entries)


# ---------------------------------------------------------------------------------------------------------------------


class _RngTarget(Target):
    def apply(self) -> None:
        set_random_states(self.values[self.name,])


class _ValueTarget(Target):
    def apply(self) -> None:
        self.namespace[self.name] = self.values[self.name,]


class _GeneratorTarget(Target):
    def apply(self) -> None:
        self.namespace[self.name].set_state(self.values[self.name,])


class _TensorTarget(Target):
    def apply(self) -> None:
        if self.bound_names:
            self.namespace[self.name] = self.tensors[self.name,]


def _tensor_target(name: str, namespace: MutableMapping[str, Any], entries: Entries, device: torch.device) -> Target:
    path = (name,)
    target = _TensorTarget(name, namespace)
    entry = entries[path]
    if name in namespace:
        target.tensors[path] = namespace[name]
        target.check_tensor(path, entry, namespace[name])
        return target
    if entry is None:
        raise CheckpointError("its entry in .metadata is not a tensor's")
    if len(entry.chunks) > 1:
        raise CheckpointError("it was sharded, and no such name is bound here; run the cell that makes it")
    target.tensors[path] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    target.bound_names = (name,)
    return target


class _ModuleTarget(Target):
    def apply(self) -> None:
        # The parameters hold it already; this calls the hooks of modules that keep their state in another form.
        state = {path[1]: each for path, each in (self.tensors | self.values).items()}
        if state:
            set_model_state_dict(self.namespace[self.name], state)


def _module_target(current: NamedState, namespace: MutableMapping[str, Any], entries: Entries) -> Target:
    target = _ModuleTarget(current.name, namespace, tensors=current.tensors, value_paths=list(current.values))
    target.own_paths = {*current.tensors, *current.values}
    target.saved_paths = set(entries)
    for path, tensor in current.tensors.items():
        if path in entries:
            target.check_tensor(path, entries[path], tensor)
        else:
            target.missing(path)
    for path in current.values:
        if path not in entries:
            target.missing(path)
    return target


@dataclass
class _OptimizerTarget(Target):
    names: dict[Any, str] = field(default_factory=dict)  # of its parameters
    namings: list[dict[Any, str]] = field(default_factory=list)  # what else these can be called

    def compare_values(self) -> list[Problem]:
        saved = [sorted(group["params"]) for group in self.values[self.name, "param_groups"]]
        names = {name for group in saved for name in group}
        self.names = next((one for one in self.namings if set(one.values()) == names), self.names)
        groups = self.namespace[self.name].param_groups
        here = [sorted(self.names[parameter] for parameter in group["params"]) for group in groups]
        if saved == here:
            return []
        all_saved, all_here = {name for group in saved for name in group}, {name for group in here for name in group}
        problems = [Problem("missing in the checkpoint", f"{self.name}: {one}") for one in sorted(all_here - all_saved)]
        problems += [Problem("in the checkpoint only", f"{self.name}: {one}") for one in sorted(all_saved - all_here)]
        sizes = f"groups of {[len(group) for group in here]} here and of {[len(group) for group in saved]} there"
        return problems or [Problem("of another kind", f"{self.name} has its parameters in other groups: {sizes}")]

    def apply(self) -> None:
        optimizer = self.namespace[self.name]
        numbers: dict[str, int] = {}
        groups = []
        for group, saved in zip(optimizer.param_groups, self.values[self.name, "param_groups"], strict=True):
            for parameter in group["params"]:
                numbers[self.names[parameter]] = len(numbers)
            groups.append({**saved, "params": [numbers[self.names[parameter]] for parameter in group["params"]]})
        state: dict[int, dict[str, Any]] = {}
        for path, each in (self.tensors | self.values).items():
            if path[1] == "state":
                _set_nested(state.setdefault(numbers[path[2]], {}), path[3:], each)
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _optimizer_target(name: str, namespace: MutableMapping[str, Any], entries: Entries) -> Target:
    """A state that the optimizer does not have yet is made as the checkpoint has it.

    Its parameters are called as the checkpoint calls them: a larger module may hold the model by now.
    """
    possible = namings(namespace[name], name, namespace)
    saved = {path[2] for path in entries if path[1] == "state"}
    names = next((one for one in possible if saved <= set(one.values())), possible[0])
    current = NamedState(name, "optimizer", namespace[name])
    read_optimizer(current, names)
    parameters = {name: parameter for parameter, name in names.items()}
    target = _OptimizerTarget(name, namespace, names=names, namings=possible)
    for path, entry in entries.items():
        if path[1] == "state" and path[2] not in parameters:
            continue  # of a parameter that this rank does not have; `compare_values` compares the names
        if entry is None:
            target.value_paths.append(path)
            continue
        existing, parameter = current.tensors.get(path), parameters[path[2]]
        if existing is not None and existing.shape == entry.size and existing.dtype == entry.properties.dtype:
            target.tensors[path] = existing
        elif entry.size == parameter.shape:
            target.tensors[path] = torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
        elif existing is not None and existing.shape != entry.size:
            target.check_tensor(path, entry, existing)
        elif isinstance(parameter, DTensor) and len(entry.size) > 0:
            text = f"{key_of(path)} is not there yet, and its layout not known; take one step of the optimizer first"
            target.problems.append(Problem("not to be restored", text))
        else:
            device = parameter.device if len(entry.size) > 0 else torch.device("cpu")
            target.tensors[path] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    return target


class _StatefulTarget(Target):
    def compare_values(self) -> list[Problem]:
        state, here = self._state(), self.namespace[self.name].state_dict()
        if not isinstance(state, dict) or not isinstance(here, dict) or not here:
            return []
        problems = [Problem("missing in the checkpoint", f"{self.name}.{key}") for key in here if key not in state]
        return problems + [Problem("in the checkpoint only", f"{self.name}.{key}") for key in state if key not in here]

    def apply(self) -> None:
        self.namespace[self.name].load_state_dict(self._state())

    def _state(self) -> Any:
        if (self.name,) in self.values:
            return self.values[self.name,]
        state: dict[str, Any] = {}
        for path, each in (self.tensors | self.values).items():
            _set_nested(state, path[1:], each)
        return state


def _stateful_target(current: NamedState, namespace: MutableMapping[str, Any], entries: Entries) -> Target:
    target = _StatefulTarget(current.name, namespace)
    for path, entry in entries.items():
        existing = current.tensors.get(path)
        if entry is None:
            target.value_paths.append(path)
        elif isinstance(existing, DTensor):
            target.tensors[path] = existing
            target.check_tensor(path, entry, existing)
        elif len(entry.chunks) > 1:
            text = f"{key_of(path)} was sharded, and is not there as a DTensor"
            target.problems.append(Problem("not to be restored", text))
        else:
            device = existing.device if existing is not None else torch.device("cpu")
            target.tensors[path] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
            if existing is not None:
                target.check_tensor(path, entry, existing)
    return target


def _set_nested(state: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, {})
    state[path[-1]] = value
