"""How one layer is cut over ranks: torch's styles, and those of Hugging Face's models that torch does not have.

The words are those of Hugging Face's tables (`_tp_plan`), and three more for the transposed Linears of GPT-2 (`Conv1D`
of transformers).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

COLWISE, ROWWISE, PER_HEAD, EXPERTS = "colwise", "rowwise", "replicated_with_grad_allreduce", "moe_tp_experts"
EMBEDDING_ROWWISE = "embedding_rowwise"
GATHERED = ("colwise_gather_output", "colwise_rep")  # the second is its name in earlier versions
CONV1D_COLWISE, CONV1D_ROWWISE, CONV1D_PACKED = "conv1d_colwise", "conv1d_rowwise", "conv1d_packed_colwise"


@dataclass(frozen=True)
class CutStyle:
    """A way to cut a layer.

    Attributes:
        make: returns torch's style; is called with the module that the layer is a child of.
        code: an expression that makes the same, for a script.
        dims: those of its weight and its bias that are cut; None: whole.
        kinds: names of the classes that can be cut so; empty: any.
    """

    make: Callable[[nn.Module], ParallelStyle]
    code: str
    dims: tuple[int | None, int | None] = (None, None)
    kinds: tuple[str, ...] = ()

    def cut_dim(self, parameter: torch.Tensor) -> int | None:
        """The dim of a parameter that is cut; None: none is."""
        return self.dims[0] if parameter.dim() > 1 else self.dims[1]


def with_partial_gradient(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the same tensor, of whose gradient each rank has a part; their sum is what flows on."""
    if _computes_plainly():
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of the ranks' tensors. May overwrite its argument where there are no gradients."""
    if _computes_plainly():
        return _sum_of_ranks(tensor, mesh.get_group())
    whole = DTensor.from_local(tensor, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local()


def _computes_plainly() -> bool:
    """Whether nothing asks for DTensors: gradients do, and so does the compiler, which would not pass collectives."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _PerHead(ParallelStyle):
    """A norm over each head: its weights are whole, and each rank's gradients are a part of their sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for submodule in module.modules():
            _replace_parameters(submodule, device_mesh, lambda _: Replicate())

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            own = inputs[0]
            # The dim before the last is one of heads or positions; which does not matter to a norm over the last.
            return DTensor.from_local(own, device_mesh, [Shard(own.dim() - 2)], run_check=False), *inputs[1:]

        def after(module: nn.Module, inputs: Any, output: Any) -> Any:
            return output.to_local()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


class _OwnPart(ParallelStyle):
    """Base of styles whose module computes with plain tensors, of which it sees this rank's part."""

    def placement_of(self, parameter: torch.Tensor) -> Placement:
        raise NotImplementedError

    def part_of_whole(self, parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return what this rank computes with of a parameter that is whole on each rank."""
        raise NotImplementedError

    def inputs(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
        raise NotImplementedError

    def output(self, module: nn.Module, args: Any, output: Any, mesh: DeviceMesh) -> Any:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replace_parameters(module, device_mesh, self.placement_of)
        forward = module.forward

        def own(parameter: nn.Parameter | None) -> torch.Tensor | None:
            if not isinstance(parameter, DTensor):
                return parameter
            if parameter.placements == (Replicate(),):
                return self.part_of_whole(parameter.to_local(grad_placements=[Partial()]), device_mesh)
            return parameter.to_local()

        def forward_with_parts(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.inputs(module, args, kwargs, device_mesh)
            whole = dict(module._parameters)
            parts: Any = {name: own(parameter) for name, parameter in whole.items()}
            try:  # around it, and not in hooks: torch calls none after a Stop
                module._parameters.update(parts)
                return self.output(module, args, forward(*args, **kwargs), device_mesh)
            finally:
                module._parameters.update(whole)

        module.forward = forward_with_parts
        return module


class _Conv1D(_OwnPart):
    """A Linear whose weight is transposed (in, out). Its bias is whole.

    Args:
        is_rowwise: it takes a part of the inputs; else it gives a part of the outputs.
        is_packed: it gives several outputs beside each other, each of which is cut. Its weight stays whole: parts of it
            would not lie together in any rank's shard.
    """

    def __init__(self, *, is_rowwise: bool = False, is_packed: bool = False) -> None:
        super().__init__()
        self._is_rowwise, self._is_packed = is_rowwise, is_packed

    def placement_of(self, parameter: torch.Tensor) -> Placement:
        if self._is_packed or parameter.dim() == 1:
            return Replicate()
        return Shard(0) if self._is_rowwise else Shard(1)

    def part_of_whole(self, parameter: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self._is_rowwise:  # the bias, of which the sum over ranks has one
            return parameter * (mesh.get_local_rank() == 0)
        outputs = 1 if not self._is_packed else parameter.shape[-1] // self._width
        beside = parameter.reshape(*parameter.shape[:-1], outputs, mesh.size(), -1)  # type: ignore[arg-type]
        return beside.select(-2, mesh.get_local_rank()).flatten(-2)

    def inputs(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
        return (args if self._is_rowwise else (with_partial_gradient(args[0], mesh), *args[1:])), kwargs

    def output(self, module: nn.Module, args: Any, output: Any, mesh: DeviceMesh) -> Any:
        return summed(output, mesh) if self._is_rowwise else output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._width = module.weight.shape[0]  # type: ignore[index]
        return super()._apply(module, device_mesh)


class _Experts(_OwnPart):
    """Experts over the ranks: each rank has some of them, and computes those tokens that are for these.

    A module of transformers with parameters (experts, ...), called with tokens, and the experts and weights of each
    token. It leaves out tokens for the number that no expert has, here those for the experts of other ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module._is_expert_parallel = True  # type: ignore[assignment]
        return super()._apply(module, device_mesh)

    def placement_of(self, parameter: torch.Tensor) -> Placement:
        return Shard(0)

    def inputs(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        _, hidden, index, weights = bound.args
        count: int = module.num_experts  # type: ignore[assignment]
        index = index - mesh.get_local_rank() * count
        is_own = (index >= 0) & (index < count)
        hidden, weights = with_partial_gradient(hidden, mesh), with_partial_gradient(weights, mesh)
        return (hidden, index.masked_fill(~is_own, count), weights.masked_fill(~is_own, 0.0)), {}

    def output(self, module: nn.Module, args: Any, output: Any, mesh: DeviceMesh) -> Any:
        if torch.is_grad_enabled() and not output.requires_grad:  # no token is for this rank's experts
            hidden, _, weights = args
            parts = [hidden, weights, *(one for one in module._parameters.values() if one is not None)]
            output = output + sum(0.0 * part.reshape(-1)[:1].sum() for part in parts)
        return summed(output, mesh)


class _LatentKeys(ParallelStyle):
    """The first layer of keys and values of DeepSeek's attention, whole on each rank.

    The last `rope_dim` of its outputs go into all heads: each rank has the gradient of its own.
    """

    def __init__(self, rope_dim: int) -> None:
        super().__init__()
        self._rope_dim = rope_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def after(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            latent, rope = output[..., : -self._rope_dim], output[..., -self._rope_dim :]
            return torch.cat([latent, with_partial_gradient(rope, device_mesh)], -1)

        module.register_forward_hook(after)
        return module


def _replace_parameters(module: nn.Module, mesh: DeviceMesh, placement_of: Callable[[torch.Tensor], Placement]) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            cut = distribute_tensor(parameter.detach(), mesh, [placement_of(parameter)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


@contextmanager
def plain_layers(module: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> Iterator[None]:
    """Context, without gradients, in which Linears and embeddings that are cut compute with plain tensors.

    Only gradients need DTensors there, and their Python takes longer than the products of one token.

    Args:
        styles: of the module's layers, by their names.
    """
    group = mesh.get_group()

    def columns(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, _local(layer.weight), None if layer.bias is None else _local(layer.bias))

    def gathered_columns(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(_of_all_ranks(columns(layer, x), group).unbind(), -1)

    def rows(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        result = _sum_of_ranks(F.linear(x, _local(layer.weight)), group)
        return result if layer.bias is None else result + _local(layer.bias)

    def rows_of_table(layer: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        table = _local(layer.weight)
        ids = ids - group.rank() * len(table)
        is_elsewhere = (ids < 0) | (ids >= len(table))
        own = F.embedding(ids.masked_fill(is_elsewhere, 0), table).masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)
        return _sum_of_ranks(own, group)

    forwards: dict[str, tuple[type[nn.Module], Callable[..., torch.Tensor]]] = {
        COLWISE: (nn.Linear, columns),
        ROWWISE: (nn.Linear, rows),
        EMBEDDING_ROWWISE: (nn.Embedding, rows_of_table),
        **dict.fromkeys(GATHERED, (nn.Linear, gathered_columns)),
    }
    hooks_before = []
    try:
        for name, style in styles.items():
            layer: Any = module.get_submodule(name)
            kind, forward = forwards.get(style, (None, None))
            if type(layer) is kind and forward is not None and _computes_as_torch(layer, style, group.size()):
                hooks_before.append((layer, layer._forward_pre_hooks, layer._forward_hooks))
                layer._forward_pre_hooks, layer._forward_hooks = OrderedDict(), OrderedDict()
                vars(layer)["forward"] = partial(forward, layer)
        yield
    finally:
        for layer, pre_hooks, hooks in hooks_before:
            layer._forward_pre_hooks, layer._forward_hooks = pre_hooks, hooks
            vars(layer).pop("forward", None)


def _computes_as_torch(layer: Any, style: str, size: int) -> bool:
    """Whether a layer of torch's, cut in this style over so many ranks, does what its class and the style say only."""
    # A hook more than torch's style has is the user's.
    if not len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1 or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and layer.num_embeddings % size == 0
    has_whole_bias = isinstance(layer.bias, DTensor) and layer.bias.placements == (Replicate(),)  # for FSDP2
    return style == ROWWISE or not has_whole_bias


def _of_all_ranks(own: torch.Tensor, group: Any) -> torch.Tensor:
    found = own.new_empty((group.size(), *own.shape))
    dist.all_gather(list(found.unbind()), own, group=group)
    return found


# Bytes of a tensor up to which its sum is faster from an all-gather: gloo's all-reduce sends several messages for each
# of that. Measured on 2 and 4 ranks of one machine: 256 KiB.
_GATHERED_BYTES = 128 << 10


def _sum_of_ranks(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of the ranks' tensors, the same bits on each of them. May overwrite its argument."""
    own = own.contiguous()
    if own.device.type == "cpu" and own.nbytes <= _GATHERED_BYTES:
        return _of_all_ranks(own, group).sum(0)
    dist.all_reduce(own, group=group)
    return own


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def cuts_experts(module: nn.Module) -> bool:
    """Whether the experts of this module can be dealt to ranks: it is one of those that transformers deals so."""
    count = getattr(module, "num_experts", None) if hasattr(module, "_is_expert_parallel") else None
    parameters = [one for one in module._parameters.values() if one is not None]
    takes = inspect.signature(type(module).forward).parameters
    return len(takes) == 4 and bool(parameters) and all(one.shape[0] == count for one in parameters)


_LAYERS = ("Linear", "Embedding")
_OURS = "cut_styles.STYLES[{!r}].make(model.get_submodule(name.rpartition('.')[0]))"
STYLES: dict[str, CutStyle] = {
    COLWISE: CutStyle(lambda _: ColwiseParallel(), "ColwiseParallel()", (0, 0), _LAYERS),
    ROWWISE: CutStyle(lambda _: RowwiseParallel(), "RowwiseParallel()", (1, None), _LAYERS),
    **{
        name: CutStyle(
            lambda _: ColwiseParallel(output_layouts=Replicate()),
            "ColwiseParallel(output_layouts=Replicate())",
            (0, 0),
            _LAYERS,
        )
        for name in GATHERED
    },
    "rowwise_split_input": CutStyle(
        lambda _: RowwiseParallel(input_layouts=Replicate()),
        "RowwiseParallel(input_layouts=Replicate())",
        (1, None),
        _LAYERS,
    ),
    EMBEDDING_ROWWISE: CutStyle(
        lambda _: RowwiseParallel(input_layouts=Replicate()),
        "RowwiseParallel(input_layouts=Replicate())",
        (0, None),
        _LAYERS,
    ),
    PER_HEAD: CutStyle(lambda _: _PerHead(), "SequenceParallel(sequence_dim=2, use_local_output=True)"),
    EXPERTS: CutStyle(lambda _: _Experts(), _OURS.format(EXPERTS), (0, 0)),
    "mla_kv_a_proj": CutStyle(lambda attention: _LatentKeys(attention.qk_rope_head_dim), _OURS.format("mla_kv_a_proj")),  # type: ignore[arg-type]
    CONV1D_COLWISE: CutStyle(lambda _: _Conv1D(), _OURS.format(CONV1D_COLWISE), (1, 0), ("Conv1D",)),
    CONV1D_ROWWISE: CutStyle(lambda _: _Conv1D(is_rowwise=True), _OURS.format(CONV1D_ROWWISE), (0, None), ("Conv1D",)),
    CONV1D_PACKED: CutStyle(lambda _: _Conv1D(is_packed=True), _OURS.format(CONV1D_PACKED), (1, 0), ("Conv1D",)),
}
