"""The initial values of a module that is made on the meta device, and filled once it is distributed.

No rank ever holds all of it. Its values are those that one process would have drawn where each submodule fills its own
tensors, once, by `reset_parameters`, in the order in which `modules()` has them. Any other module must be built
completely on each rank; where that takes more memory than there is, a method `init_weights` fills it, with other
numbers.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

from meshbook.errors import message_of
from meshbook.rank.tensors import dtensor_patches, feeding
from meshbook.rank.tensors.mesh_speed import free_bytes
from meshbook.rank.tensors.schemas import has_tag, written_leaves

_NO_SEED = 0x6D65_7368  # that no factory is likely to set


@dataclass(frozen=True)
class FromMeta:
    """A module on the meta device, and the function that fills it once it is distributed."""

    module: nn.Module
    fill: Callable[[nn.Module, torch.device], None]


def build_on_meta(factory: Callable[[], nn.Module], fits: Callable[[int], bool]) -> FromMeta | None:
    """Return the factory's module on the meta device, if it can be filled from there; None: it must be built whole.

    Args:
        fits: whether each rank has memory for a module of so many bytes. Asked only where that decides.
    """
    observer = _Observer()
    torch.default_generator.manual_seed(_NO_SEED)
    try:
        with torch.device("meta"), observer, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are loaded, and lost on the meta device
            module = factory()
    except Exception:  # it needs values while it is built; a complete build either works or raises its own error
        return None
    if not isinstance(module, nn.Module) or torch.initial_seed() != _NO_SEED:  # it seeds the generator itself
        return None
    parameters = [tensor for _, tensor in module.named_parameters(remove_duplicate=False)]
    tensors = [*parameters, *(tensor for _, tensor in module.named_buffers(remove_duplicate=False))]
    is_tied = len(set(map(id, tensors))) != len(tensors)
    if is_tied or not all(tensor.is_meta and not nn.parameter.is_lazy(tensor) for tensor in tensors):
        return None
    # Models of transformers fill nothing on the meta device, where their resets are all that would be seen.
    fills_later = any(hasattr(submodule, "init_weights") for submodule in module.modules())
    if not fills_later and observer.only_resets_of(module):
        return FromMeta(module, fill_by_resets)
    if not _has_init_weights(module) or observer.fills_beside_init or any(one.dtype == torch.bool for one in tensors):
        return None
    if fits(sum(tensor.numel() * tensor.element_size() for tensor in tensors)):
        return None
    return FromMeta(module, fill_by_init_weights)


def fits_on_all_ranks(num_bytes: int, mesh: DeviceMesh) -> bool:
    """Whether every rank has so much memory for a module that is built whole. Every rank of the mesh takes part."""
    fits = torch.tensor([num_bytes < free_bytes(torch.device("cpu"))], dtype=torch.uint8, device=mesh.device_type)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits.item())


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which modules fill their tensors by `reset_parameters`, and whether anything else fills some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._resets: list[tuple[FrameType, nn.Module]] = []  # the calls of reset_parameters that drew or wrote
        self._filled: dict[int, tuple[nn.Module, Any]] = {}  # by the identity of a storage; it lives while it is here
        self._fills_beside_resets = False
        self.fills_beside_init = False  # something other than reset_parameters and init_weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = list(written_leaves(func, args, kwargs))
        if written or has_tag(func, torch.Tag.nondeterministic_seeded):
            self._note(written)
        return func(*args, **kwargs)

    def _note(self, written: list[Any]) -> None:
        call = _innermost_call("reset_parameters", "_reset_parameters", "init_weights")
        if call is None or call.f_code.co_name != "reset_parameters":
            self._fills_beside_resets = True
            self.fills_beside_init |= bool(written) and call is None
            return
        module = call.f_locals["self"]
        if not self._resets or self._resets[-1][0] is not call:
            self._resets.append((call, module))
        for tensor in written:
            storage = tensor.untyped_storage()
            self._filled[storage._cdata] = module, storage

    def only_resets_of(self, module: nn.Module) -> bool:
        """Whether each submodule has filled all of its own tensors, in one reset, in the order of `modules()`."""
        owners = [submodule for submodule in module.modules() if _own_tensors(submodule)]
        if self._fills_beside_resets or [id(one) for _, one in self._resets] != list(map(id, owners)):
            return False
        if any(isinstance(value, torch.Tensor) for one in module.modules() for value in vars(one).values()):
            return False  # computed once, and not filled again
        return all(
            self._filled.get(tensor.untyped_storage()._cdata, (None,))[0] is submodule
            for submodule in owners
            for tensor in _own_tensors(submodule).values()
        )


def _innermost_call(*names: str) -> FrameType | None:
    """Return the innermost call of a module's method of these names that is under way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in names and isinstance(frame.f_locals.get("self"), nn.Module):
            return frame
        frame = frame.f_back
    return None


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    held = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in held if tensor is not None}


def _has_init_weights(module: nn.Module) -> bool:
    """Whether it has torchtitan's method that fills all of it, which transformers' models have too."""
    method = getattr(module, "init_weights", None)
    if not callable(method):
        return False
    parameters = inspect.signature(method).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


# ---------------------------------------------------------------------------------------------------------------------


def fill_by_resets(module: nn.Module, device: torch.device) -> None:
    """Fill a distributed module: each submodule draws its complete values in turn, and retains its shards."""
    module.to_empty(device=device)
    for submodule in module.modules():
        own_tensors = _own_tensors(submodule)
        if not own_tensors:
            continue
        full_copy = object.__new__(type(submodule))  # a copy; FSDP2's classes would call __init__ for it
        full_copy.__dict__ = dict(submodule.__dict__)
        full_copy._modules = {}
        full_copy._parameters = {name: _empty_parameter(value) for name, value in submodule._parameters.items()}
        full_copy._buffers = {
            name: None if value is None else _empty_on_cpu(value) for name, value in submodule._buffers.items()
        }
        full_copy.reset_parameters()  # type: ignore[operator]
        drawn = _own_tensors(full_copy)
        with torch.no_grad():
            for name, value in own_tensors.items():
                _store_own_shard(value, drawn[name])


def _empty_parameter(parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(_empty_on_cpu(parameter), parameter.requires_grad)


def _empty_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _store_own_shard(target: torch.Tensor, drawn: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        target.to_local().copy_(feeding.own_shard(drawn.detach(), target.device_mesh, target.placements))
    else:
        target.copy_(drawn)


def fill_by_init_weights(module: nn.Module, device: torch.device) -> None:
    """Fill a distributed module by its own `init_weights`.

    Raises:
        ValueError: it fails with tensors that are cut, or leaves one as it was.
    """
    module.to_empty(device=device)
    with torch.no_grad():
        local = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        for tensor in local.values():
            tensor.fill_(_unset(tensor.dtype))
        advice = (
            f"this {type(module).__name__} is too large to be built whole on each rank, so that its init_weights is to "
            "fill it there; save it in a folder and give that, or a mesh of more machines. It"
        )
        try:
            with dtensor_patches.own_rng_tracker(), implicit_replication():
                module.init_weights()  # type: ignore[operator]
        except Exception as error:
            raise ValueError(f"{advice} raised {type(error).__name__}: {message_of(error)}") from error
        for name, tensor in local.items():
            is_unset = tensor.isnan() if math.isnan(unset := _unset(tensor.dtype)) else tensor == unset
            if is_unset.any():
                raise ValueError(f"{advice} leaves {name} as it is")


def _unset(dtype: torch.dtype) -> float:
    """Return a value that no method fills a tensor with."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
