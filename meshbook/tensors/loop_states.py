"""The state of a loop in the notebook's process: what its objects hold here, and which remote tensors they have.

The contents of remote tensors are copied on the ranks; here only their order is remembered. Objects keep their
identity: modules and tensors are loaded in place, whatever has `load_state_dict` by that, lists and dicts by their
contents.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshbook.errors import UsageError, message_of
from meshbook.rank.state import pickles
from meshbook.rank.state.kinds import has_identity, has_state_dict
from meshbook.rank.state.modules import attributes_of, extra_states_of, load_attributes, state_of, tensors_of
from meshbook.tensors.base import MeshTensor
from meshbook.tensors.specs import TensorSpec

_CONTAINERS = (list, dict, set, deque)


def check_things(things: Sequence[Any]) -> None:
    """Check that the state of these objects can be restored in place.

    Raises:
        UsageError: one cannot be; or an optimizer changes parameters that are not among them.
    """
    for thing in things:
        if not has_identity(thing) and not isinstance(thing, _CONTAINERS):
            raise UsageError(
                f"a {type(thing).__name__} cannot be put back in place; give modules, optimizers, schedulers and "
                "whatever else has state_dict and load_state_dict, tensors, torch.Generators, lists, dicts and sets"
            )
    owned = {id(tensor) for thing in things for _, tensor in _tensors_of(thing)}
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer):
            parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
            if count := sum(id(parameter) not in owned for parameter in parameters):
                raise UsageError(
                    f"{count} of the {len(parameters)} parameters that the {type(thing).__name__} changes are of none "
                    "of the modules and tensors given; give their module too: mesh.resilient(model, opt)"
                )


def structure_of(things: Sequence[Any]) -> Any:
    """Return a key that is equal for objects into which the same state can be loaded."""
    return tuple(
        (type(thing), tuple((name, _spec_of(tensor)) for name, tensor in _tensors_of(thing))) for thing in things
    )


def remote_tensors_of(things: Sequence[Any]) -> list[Any]:
    """Return the remote tensors of modules, and those given themselves."""
    return [tensor for thing in things for _, tensor in _tensors_of(thing) if isinstance(tensor, MeshTensor)]


def _tensors_of(thing: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(thing, nn.Module):
        for kind, name, tensor in tensors_of(thing):
            yield f"{kind}:{name}", tensor
    elif isinstance(thing, torch.Tensor):
        yield "", thing


def _spec_of(tensor: torch.Tensor) -> Any:
    return tensor._spec if isinstance(tensor, MeshTensor) else (tuple(tensor.shape), tensor.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Capturing and restoring


@dataclass
class _Gradient:
    """What a leaf has as gradient: nothing; numbers of its own here; or a remote tensor.

    Attributes:
        local: a copy.
        slot: of the remote one, among those of the state.
        held: the remote one, where it is not as the leaf is, so that none like it can be made.
    """

    local: torch.Tensor | None = None
    slot: int | None = None
    held: Any = None


@dataclass
class _TensorState:
    """A tensor of a module, or one that was given itself.

    Attributes:
        local: a copy, of one that is here; None: it is remote.
        slot: of a remote one.
    """

    local: torch.Tensor | None
    slot: int | None
    gradient: _Gradient


@dataclass
class _Pickled:
    """The state of any other object.

    Attributes:
        local: copies of the tensors that are here.
        slots: remote tensors, and their places among those of the state.
    """

    data: bytes
    local: list[torch.Tensor]
    slots: dict[int, Any]

    def load(self) -> Any:
        """Return it, with the remote tensors themselves and with copies of the others."""

        def tensor_of(key: tuple[str, int]) -> Any:
            kind, number = key
            return self.slots[number] if kind == "remote" else _copy_of(self.local[number])

        return pickles.load(self.data, tensor_of)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


# By object, what was captured of it.
LoopState = list[Any]


def capture(things: Sequence[Any]) -> tuple[LoopState, list[Any]]:
    """Return the state of these objects, and the remote tensors whose contents belong to it, each once.

    Raises:
        UsageError: an object cannot be copied.
    """
    capturing = _Capturing()
    state = [capturing.capture(thing) for thing in things]
    return state, capturing.tensors


class _Capturing:
    """
    Attributes:
        tensors: the remote tensors that were met.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._slots: dict[int, int] = {}  # by the id of the tensor on the ranks

    def capture(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            rest = attributes_of(thing), copy.deepcopy(extra_states_of(thing))
            return rest, [self._tensor_state(tensor) for _, tensor in _tensors_of(thing)]
        if isinstance(thing, torch.Tensor):
            return self._tensor_state(thing)
        if isinstance(thing, torch.Generator):
            return thing.get_state()
        try:
            return self._pickled(state_of(thing) if has_state_dict(thing) else thing)
        except Exception as error:  # what a user's state_dict() or __reduce__ raises
            text = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {message_of(error)}"
            raise UsageError(f"the state of the {type(thing).__name__} cannot be copied: {text}") from error

    def slot(self, tensor: Any) -> int:
        if tensor._handle.is_functional_view:
            raise UsageError("a tensor of the state is a view that the ranks hold as a copy; give the tensor itself")
        id: int = tensor._handle.id
        if id not in self._slots:
            self._slots[id] = len(self.tensors)
            self.tensors.append(tensor)
        return self._slots[id]

    def _tensor_state(self, tensor: torch.Tensor) -> _TensorState:
        gradient = self._gradient(tensor) if tensor.is_leaf else _Gradient()
        if isinstance(tensor, MeshTensor):
            return _TensorState(None, self.slot(tensor), gradient)
        return _TensorState(tensor.detach().clone(), None, gradient)

    def _gradient(self, leaf: torch.Tensor) -> _Gradient:
        gradient = leaf.grad
        if gradient is None:
            return _Gradient()
        if not isinstance(gradient, MeshTensor):
            return _Gradient(local=gradient.detach().clone())
        is_alike = isinstance(leaf, MeshTensor) and _is_alike(gradient._spec, leaf._spec)
        return _Gradient(slot=self.slot(gradient), held=None if is_alike else gradient)

    def _pickled(self, value: Any) -> _Pickled:
        local: list[torch.Tensor] = []
        remote: dict[int, Any] = {}

        def key_of(tensor: torch.Tensor) -> tuple[str, int]:
            if isinstance(tensor, MeshTensor):
                slot = self.slot(tensor)
                remote.setdefault(slot, tensor)
                return "remote", slot
            local.append(_copy_of(tensor))
            return "local", len(local) - 1

        advice = "give that itself: mesh.resilient(model, opt, ...)"
        return _Pickled(pickles.dump(value, key_of, advice=advice), local, remote)


def _is_alike(spec: TensorSpec, other: TensorSpec) -> bool:
    return (spec.shape, spec.stride, spec.dtype, spec.placements) == (
        other.shape,
        other.stride,
        other.dtype,
        other.placements,
    )


def targets_of(state: LoopState, things: Sequence[Any]) -> dict[int, Any]:
    """Return the remote tensors that the ranks are to load, by the order in which they were captured; no gradients."""
    targets: dict[int, Any] = {}
    for captured, thing in zip(state, things, strict=True):
        if isinstance(captured, _Pickled):
            targets |= captured.slots
        for one, tensor in _tensor_states(captured, thing):
            if one.slot is not None:
                targets[one.slot] = tensor
    return targets


def gradients_of(state: LoopState, things: Sequence[Any]) -> dict[int, Any]:
    """Return the same of gradients. Those that are no more are made anew, empty: call this when the rest is loaded."""
    return {
        one.gradient.slot: _gradient_to_load(one.gradient, tensor)
        for captured, thing in zip(state, things, strict=True)
        for one, tensor in _tensor_states(captured, thing)
        if one.gradient.slot is not None
    }


def _gradient_to_load(gradient: _Gradient, leaf: Any) -> Any:
    if gradient.held is not None:
        return gradient.held
    present = leaf.grad
    if isinstance(present, MeshTensor) and _is_alike(present._spec, leaf._spec):
        return present
    with torch.no_grad():
        return torch.empty_like(leaf)


def _tensor_states(captured: Any, thing: Any) -> Iterator[tuple[_TensorState, Any]]:
    """Yield what was captured of the tensors of a module, or of a tensor itself, and these."""
    if isinstance(thing, (nn.Module, torch.Tensor)):
        states = captured[1] if isinstance(thing, nn.Module) else [captured]
        yield from zip(states, (tensor for _, tensor in _tensors_of(thing)), strict=True)


def restore(state: LoopState, things: Sequence[Any], gradients: Mapping[int, Any]) -> None:
    """Load what is here into the objects. The ranks have been sent what loads the remote tensors before."""
    for captured, thing in zip(state, things, strict=True):
        for one, tensor in _tensor_states(captured, thing):
            _restore_tensor(one, tensor, gradients)
        if isinstance(thing, nn.Module):
            load_attributes(thing, *captured[0])
        elif isinstance(thing, torch.Tensor):
            continue
        elif isinstance(thing, torch.Generator):
            thing.set_state(captured)
        else:
            value = captured.load()
            thing.load_state_dict(value) if has_state_dict(thing) else _refill(thing, value)


def _restore_tensor(state: _TensorState, tensor: torch.Tensor, gradients: Mapping[int, Any]) -> None:
    gradient = state.gradient
    with torch.no_grad():
        if state.local is not None:
            tensor.copy_(state.local)
        if gradient.slot is not None:
            tensor.grad = gradients[gradient.slot]
        elif tensor.is_leaf:
            tensor.grad = None if gradient.local is None else gradient.local.clone()


def _refill(container: Any, value: Any) -> None:
    if isinstance(container, list):
        container[:] = value
    else:
        container.clear()
        container.extend(value) if isinstance(container, deque) else container.update(value)
