"""Whether a module whose layers are cut over ranks computes what the whole one does: outputs and gradients, once.

That a Linear called `up` feeds one called `down` is a guess from names. What lies between them may not bear the cut (a
norm over the whole width, a softmax over it), and would give wrong numbers without an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshbook.rank.tensors.compiled_blocks import without_compiler

# How far outputs and gradients may differ, relative to their largest element: rounding in another order.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass
class CutCheck:
    """One module that is cut, and a copy without data from before."""

    name: str
    module: nn.Module
    reference: nn.Module
    mesh: DeviceMesh

    @classmethod
    def prepare(cls, name: str, module: nn.Module, mesh: DeviceMesh) -> CutCheck:
        """Return the check of a module that is about to be cut."""
        return cls(name or type(module).__name__, module, copy_without_data(module), mesh)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute what the module is called with both ways, without dropout. Every rank of the axis calls this.

        Raises:
            RuntimeError: they differ, or the cut module cannot run.
        """
        error = None
        # What is saved for backward here is not for the checkpoint of the block around this module.
        own_saved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.enable_grad(), own_saved, evaluation(self.module), evaluation(self.reference):
            whole = self._compute(self.reference, args, kwargs, whole=True)
            try:
                cut = self._compute(self.module, args, kwargs, whole=False)
            except (RuntimeError, ValueError, TypeError) as raised:
                error, cut = raised, whole
        if error is not None:
            raise RuntimeError(
                f"{self.name} cannot run on a part of its heads or width: {_first_line(error)}. Where it names "
                f"the whole width, let -1 stand for it; or say which layers are cut, without these: {_HINT}"
            ) from error
        off = largest_difference(cut, whole)
        largest = torch.tensor([off], device=self.mesh.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.mesh.get_group())  # so that all ranks raise, or none
        if largest.item() > 1.0:
            raise RuntimeError(
                f"{self.name} gives other numbers when its layers are cut over tp={self.mesh.size()}: outputs or "
                f"gradients are {largest.item():.0f} times further off than rounding. Something between them works on "
                f"the whole width; say which layers are cut, without these: {_HINT}"
            )

    def _compute(self, module: nn.Module, args: Any, kwargs: Any, *, whole: bool) -> list[torch.Tensor | None]:
        """Return outputs, and the gradients of inputs and parameters, whole on each rank.

        Of inputs, that of the first, and those of others that have one: rotary embeddings have none.
        """
        inputs: list[torch.Tensor] = []

        def own_copy(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)  # such as a cache, which a forward writes to
            own = leaf.detach().clone()
            if own.is_floating_point() and (not inputs or leaf.requires_grad):
                inputs.append(own.requires_grad_())
            return own

        args, kwargs = pytree.tree_map(own_copy, (args, kwargs))
        parameters: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        if whole:
            parameters = {
                name: _whole(parameter).requires_grad_(parameter.requires_grad)
                for name, parameter in parameters.items()
            }
            tensors = {**parameters, **dict(self.module.named_buffers())}
            result = torch.func.functional_call(module, tensors, args, kwargs)
        else:
            result = type(module).forward(module, *args, **kwargs)  # without its hooks: FSDP2 has gathered it already
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        sources = [*inputs, *parameters.values()]
        sources = [source for source in sources if source.requires_grad]
        differentiable = [output for output in outputs if output.requires_grad]
        gradients: Sequence[torch.Tensor | None] = ()
        if differentiable:
            # Slopes that differ from element to element: a sum would hide what cancels out.
            slopes = [_slopes(output) for output in differentiable]
            gradients = torch.autograd.grad(differentiable, sources, slopes, allow_unused=True)
        found = [*outputs, *gradients]
        return [None if tensor is None else _whole(tensor) for tensor in found]


_HINT = 'meshbook.Plan(tp=…, tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})'


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _slopes(output: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return numbers.mul_(0.7).sin_().reshape(output.shape).to(output.dtype)


def largest_difference(cut: Sequence[torch.Tensor | None], whole: Sequence[torch.Tensor | None]) -> float:
    """Return how far the tensors differ at most, in units of what is allowed."""
    dtypes = {tensor.dtype for tensor in whole if tensor is not None and tensor.is_floating_point()}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    tolerance = max((_TOLERANCES.get(dtype, 1e-3) for dtype in dtypes), default=0.0)
    largest = max((_largest(tensor) for tensor in whole if tensor is not None), default=0.0)
    found = 0.0
    for own, other in zip(cut, whole, strict=True):
        if own is None or other is None or own.shape != other.shape:
            found = max(found, 0.0 if own is other else float("inf"))
        elif own.numel() and own.is_floating_point():
            # A gradient may be zero but for rounding, as that of a key's bias is.
            allowed = tolerance * max(_largest(other), 1e-2 * largest, 1e-30)
            found = max(found, (own.double() - other.double()).abs().max().item() / allowed)
    return found


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() and tensor.is_floating_point() else 0.0


@contextlib.contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in eval mode, and after which each part of it is in its own again."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextlib.contextmanager
def run_with_first_call(checks: Sequence[CutCheck]) -> Iterator[list[str]]:
    """Run each check with what its module is first called with, while this lasts; yield the names of those that ran."""
    ran: list[str] = []
    hooks = []
    for check in checks:

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], check: CutCheck = check) -> None:
            if check.name not in ran:
                ran.append(check.name)
                check.run(args, kwargs)

        hooks.append(check.module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        with without_compiler() if checks else contextlib.nullcontext():
            yield ran
    finally:
        for hook in hooks:
            hook.remove()


def copy_without_data(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)
