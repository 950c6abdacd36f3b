"""The parameters of a pipeline's blocks: sharded over the stages at rest, whole on their stage while it computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshbook.placement import shard_spans
from meshbook.rank.tensors.feeding import own_shard


class StageParameters:
    """The parameters of each stage's blocks. They are moved as bytes, those of all dtypes in one collective."""

    def __init__(self, stages: Sequence[Sequence[nn.Module]], mesh: DeviceMesh) -> None:
        """Shard the parameters of these blocks over a mesh of one axis, in place.

        Args:
            stages: the blocks of each stage.
        """
        self._mesh, self._size, self._stage = mesh, mesh.size(), mesh.get_local_rank()
        self._stages, self._blocks = stages, stages[self._stage]
        for block in (block for blocks in stages for block in blocks):
            _shard_block(block, mesh)

    @functools.cached_property  # with the first forward: until then a loader may put other parameters in their place
    def _by_stage(self) -> list[list[DTensor]]:
        return [
            cast("list[DTensor]", list({id(one): one for block in blocks for one in block.parameters()}.values()))
            for blocks in self._stages
        ]

    def gather(self) -> list[dict[str, torch.Tensor]]:
        """Return the whole parameters of each of this stage's blocks, by name. A collective."""
        own = self._by_stage[self._stage]
        sent = [[parameter.to_local().detach() for parameter in parameters] for parameters in self._by_stage]
        pieces = self._exchange(sent, [[self._shard_bytes(one, stage) for one in own] for stage in range(self._size)])
        whole = {}
        for at, parameter in enumerate(own):
            shards = [pieces[stage][at] for stage in range(self._size if parameter.dim() else 1)]
            tensor = torch.cat(shards).view(parameter.dtype).view(parameter.shape)
            whole[id(parameter)] = tensor.requires_grad_(parameter.requires_grad)
        return [{name: whole[id(one)] for name, one in block.named_parameters()} for block in self._blocks]

    def give_back(self, gathered: Sequence[dict[str, torch.Tensor]]) -> None:
        """Add the gradients of gathered parameters to those of the shards on each stage. A collective."""
        found: dict[int, torch.Tensor | None] = {}
        for block, tensors in zip(self._blocks, gathered, strict=True):
            for name, one in block.named_parameters():
                found[id(one)], tensors[name].grad = tensors[name].grad, None
        trainable = [[one for one in parameters if one.requires_grad] for parameters in self._by_stage]
        device, own = self._mesh.device_type, []
        for parameter in trainable[self._stage]:
            gradient = found[id(parameter)]
            own.append(
                torch.zeros(parameter.shape, dtype=parameter.dtype, device=device) if gradient is None else gradient
            )
        has_gradient = [found[id(parameter)] is not None for parameter in trainable[self._stage]]
        flags = torch.tensor(has_gradient, dtype=torch.uint8, device=device)
        pieces = self._exchange(
            [[flags, *(self._shard_of(one, stage) for one in own)] for stage in range(self._size)],
            [[len(ones), *(self._shard_bytes(one, self._stage) for one in ones)] for ones in trainable],
        )
        for parameters, (has, *shards) in zip(trainable, pieces, strict=True):
            for parameter, flag, shard in zip(parameters, has.tolist(), shards, strict=True):
                if flag:
                    local = parameter.to_local()
                    _add_gradient(parameter, shard.clone().view(parameter.dtype).view(local.shape))

    def _exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        """Send tensors to each stage, and return those that each sent here, as bytes.

        Args:
            sizes: how many bytes each tensor has that a stage sends here.
        """
        parts = [[tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors] for tensors in sent]
        flat = torch.cat([part for to_stage in parts for part in to_stage])
        arrived = flat.new_empty(sum(map(sum, sizes)))
        from_stages, to_stages = [sum(each) for each in sizes], [sum(map(len, to_stage)) for to_stage in parts]
        dist.all_to_all_single(arrived, flat, from_stages, to_stages, group=self._mesh.get_group())
        return [
            list(torch.split(piece, list(each)))
            for piece, each in zip(torch.split(arrived, from_stages), sizes, strict=True)
        ]

    def _shard_bytes(self, parameter: DTensor, stage: int) -> int:
        """Return how many bytes of a parameter a stage has at rest."""
        if not parameter.dim():
            return parameter.element_size()
        start, stop = shard_spans(len(parameter), self._size)[stage]
        return (stop - start) * math.prod(parameter.shape[1:]) * parameter.element_size()

    def _shard_of(self, whole: torch.Tensor, stage: int) -> torch.Tensor:
        return whole if not whole.dim() else whole[slice(*shard_spans(len(whole), self._size)[stage])]


def _shard_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Let each parameter be a DTensor that is sharded along dim 0; one that is a single number is on every stage."""
    made: dict[int, nn.Parameter] = {}
    for submodule in block.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                placements = [Shard(0) if parameter.dim() else Replicate()]
                local = own_shard(parameter.detach(), mesh, placements)
                device = "meta" if local.is_meta else mesh.device_type
                dtensor = DTensor.from_local(
                    local.to(device, copy=True), mesh, placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
                made[id(parameter)] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
            submodule._parameters[name] = made[id(parameter)]


def _add_gradient(parameter: DTensor, local: torch.Tensor) -> None:
    gradient = DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
