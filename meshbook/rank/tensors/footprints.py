"""What one rank needs for a step of a module: bytes and floating-point operations, counted without data.

The module runs once on fake tensors, with one rank's rows and the parts of its layers that one rank would have, so
that nothing is allocated and nothing is sent. Counted are the distinct storages that autograd saves.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from meshbook.errors import PlacementError
from meshbook.rank.tensors import building
from meshbook.rank.tensors.blocks import find_blocks
from meshbook.rank.tensors.cut_checks import copy_without_data
from meshbook.rank.tensors.cut_styles import (
    COLWISE,
    CONV1D_COLWISE,
    CONV1D_PACKED,
    CONV1D_ROWWISE,
    EXPERTS,
    ROWWISE,
    STYLES,
)
from meshbook.rank.tensors.tensor_parallel import TensorCut, find_cut


@dataclass(frozen=True)
class TensorShape:
    """A tensor of a sample, without its data."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class BlockFootprint:
    """One of the repeated blocks, on one rank. All in bytes."""

    parameter_bytes: int
    activation_bytes: int = 0  # saved for backward, its input included
    input_bytes: int = 0


@dataclass
class Footprint:
    """What one rank computes and holds, of layers that are cut over tp, before anything is sharded."""

    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    blocks: list[BlockFootprint]
    activation_bytes: int = 0  # saved for backward
    output_bytes: int = 0  # of floating-point outputs
    flops: float = 0.0  # of forward and backward
    reduced_bytes: list[int] = field(default_factory=list)  # each tensor that is summed over tp in a step


def measure_footprint(
    source: building.Source,
    sample: Any,
    num_shards: int,
    tp: int,
    tp_plan: Mapping[str, str] | None,
    dtype: str | None,
    casts_parameters: bool,
) -> Footprint:
    """Count what a step needs on one rank.

    Args:
        sample: (args, kwargs) of the module, with a TensorShape for each tensor of the whole batch.
        num_shards: how many parts the batch is cut into.
        tp: over how many ranks layers are cut.
        dtype: what it computes in, if not in the parameters' dtype.
        casts_parameters: parameters are cast where they are gathered (FSDP2); otherwise by autocast.

    Raises:
        PlacementError: rows or layers that cannot be cut evenly.
        Exception: what the module raises for the sample.
    """
    rng_state = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module's own come when it runs
            module = _without_memory(source) if isinstance(source, nn.Module) else source()
            for experts in module.modules():
                if hasattr(experts, "_is_expert_parallel"):
                    experts.forward = functools.partial(_forward_through_one_expert, experts, experts.num_experts)  # type: ignore[arg-type]
            if tp > 1:
                _keep_own_part(module, find_cut(module, tp, tp_plan))
            args, kwargs = pytree.tree_map(
                lambda leaf: _fake_rows(leaf, num_shards) if isinstance(leaf, TensorShape) else leaf, sample
            )
            return _count(module, args, kwargs, None if dtype is None else getattr(torch, dtype), casts_parameters)
    finally:
        torch.set_rng_state(rng_state)


def _without_memory(module: nn.Module) -> nn.Module:
    module = copy_without_data(module)
    _replace_tensors(module, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    return module


def _replace_tensors(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace parameters and buffers; `Module.to` cannot exchange fake ones."""
    made: dict[int, Any] = {}
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new = make(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
                tensors[name] = made[id(tensor)]


def footprint_or_reason(*args: Any) -> Footprint | str:
    """Return `measure_footprint`, or why this plan cannot be."""
    try:
        return measure_footprint(*args)
    except PlacementError as error:
        return str(error)


def _fake_rows(leaf: TensorShape, num_shards: int) -> torch.Tensor:
    shape = leaf.shape
    if shape and num_shards > 1:
        if shape[0] % num_shards:
            raise PlacementError(
                f"the sample has {shape[0]} rows, and {shape[0]} = {shape[0] // num_shards} x {num_shards} + "
                f"{shape[0] % num_shards} cannot be cut evenly"
            )
        shape = (shape[0] // num_shards, *shape[1:])
    return torch.zeros(shape, dtype=getattr(torch, leaf.dtype))


def _keep_own_part(module: nn.Module, cut: TensorCut) -> None:
    """Give each cut layer the shape of one rank's part."""
    for name, attributes in cut.heads.items():
        for attribute, value in attributes.items():
            setattr(module.get_submodule(name), attribute, value)
    for name, style in cut.styles.items():
        layer = module.get_submodule(name)
        for parameter_name, parameter in list(layer.named_parameters(recurse=False)):
            dim = 1 if isinstance(layer, nn.Embedding) and style == COLWISE else STYLES[style].cut_dim(parameter)
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] = -(-shape[dim] // cut.size)
                part = torch.empty(shape, dtype=parameter.dtype)
                layer.register_parameter(parameter_name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if style in ("colwise_gather_output", "colwise_rep"):
            layer.register_forward_hook(lambda _, inputs, output: torch.cat([output] * cut.size, -1))
        if style == "rowwise_split_input":
            layer.register_forward_pre_hook(lambda _, inputs: inputs[0].chunk(cut.size, -1)[:1])
        if style in (ROWWISE, "rowwise_split_input", "embedding_rowwise", CONV1D_ROWWISE, EXPERTS):
            layer.register_forward_hook(lambda layer, inputs, output: _note(layer, output))
        elif style in (COLWISE, CONV1D_COLWISE, CONV1D_PACKED):
            layer.register_forward_hook(lambda layer, inputs, output: _note(layer, inputs[0]))


def _forward_through_one_expert(
    module: Any, num_experts: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute as many rows as experts of transformers do on one rank, all by one expert.

    Which rows an expert has depends on data, and torch can count grouped products for bfloat16 only.

    Args:
        num_experts: of all ranks.
    """
    first, last = [
        matrix[0] if module.is_transposed else matrix[0].t()
        for matrix in (module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj)
    ]
    rows = index.numel() * module.num_experts // num_experts
    up = hidden.repeat_interleave(index.shape[-1], 0)[:rows] @ first
    down = (module._apply_gate(up) if module.has_gate else module.act_fn(up)) @ last
    weighted: torch.Tensor = down * weights.reshape(-1, 1)[:rows]
    return hidden + weighted.sum(0)


def _note(layer: nn.Module, reduced: torch.Tensor) -> None:
    layer._meshbook_reduced = reduced.numel() * reduced.element_size()  # type: ignore[assignment]


def _count(module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype | None, casts: bool) -> Footprint:
    parameters = list(module.parameters())
    blocks = find_blocks(module)
    found = Footprint(
        parameter_bytes=sum(map(_bytes, parameters)),
        trainable_bytes=sum(_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        buffer_bytes=sum(map(_bytes, module.buffers())),
        blocks=[BlockFootprint(sum(map(_bytes, block.parameters()))) for block in blocks],
    )
    if casts and dtype is not None:
        _replace_tensors(
            module, lambda tensor: tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
        )
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
            (args, kwargs),
        )
    not_counted = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    with contextlib.ExitStack() as stack:
        flop_counter = stack.enter_context(FlopCounterMode(display=False))
        stack.enter_context(_watch_activations(blocks, found, not_counted))
        if dtype is not None and not casts:
            stack.enter_context(torch.autocast("cpu", dtype=dtype))
        result = module(*args, **kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs = [output for output in outputs if output.is_floating_point()]
        found.output_bytes = sum(output.numel() * 4 for output in outputs)
        differentiable = [output for output in outputs if output.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(output) for output in differentiable])
    found.flops = float(flop_counter.get_total_flops())
    reduced = (getattr(submodule, "_meshbook_reduced", None) for submodule in module.modules())
    found.reduced_bytes = [size for size in reduced if size]
    return found


@contextlib.contextmanager
def _watch_activations(blocks: list[nn.Module], found: Footprint, not_counted: set[int]) -> Iterator[None]:
    """Add up the storages that autograd saves, by block."""
    seen: set[int] = set()
    kept: list[Any] = []  # so that no other storage gets the same address
    current: list[BlockFootprint] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage._cdata not in not_counted:
            seen.add(storage._cdata)
            kept.append(storage)
            found.activation_bytes += storage.nbytes()
            if current:
                current[-1].activation_bytes += storage.nbytes()
        return tensor

    def enter(block: BlockFootprint) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            block.input_bytes = sum(map(_bytes, inputs))
            current.append(block)

        return hook

    hooks = [
        hook
        for module, block in zip(blocks, found.blocks, strict=True)
        for hook in (
            module.register_forward_pre_hook(enter(block), with_kwargs=True),
            module.register_forward_hook(lambda *_: (current.pop(), None)[1]),
        )
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
