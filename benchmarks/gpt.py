"""The GPT that training is measured with, and its step as people write it for one process, for DTensors and for FSDP2.

Imported by ranks too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(width, -1)
        )
        weights = F.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Any, places: Any) -> Any:
        x = self.tokens(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(7)
    x = torch.randint(0, VOCABULARY, (batch, length), generator=numbers)
    y = torch.randint(0, VOCABULARY, (batch * length,), generator=numbers)
    return x, y, torch.arange(length)


def remote_data(mesh: Any, batch: int, length: int, *, is_cut: bool = True) -> tuple[torch.Tensor, ...]:
    """The same on a mesh: the batch is cut over its axis "dp", or whole on every rank, as the places are."""
    import meshbook

    x, y, places = data(batch, length)
    cut = (meshbook.distribute(tensor, mesh, sharding_spec=["dp"] if is_cut else []) for tensor in (x, y))
    return *cut, meshbook.distribute(places, mesh, sharding_spec=[])


def train_step(model: Any, optimizer: Any, x: Any, y: Any, places: Any) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, places).reshape(-1, VOCABULARY), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def remote_step(
    to_ranks: Callable[[nn.Module], nn.Module], width: int, layers: int, length: int, given: tuple[Any, ...]
) -> Callable[[], Any]:
    """Return the step of a GPT whose module was brought to the ranks, on data that they have."""
    torch.manual_seed(0)
    model = to_ranks(GPT(width, layers, length))
    optimizer = adamw(model)
    return lambda: train_step(model, optimizer, *given)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


# ---------------------------------------------------------------------------------------------------------------------
# On ranks


def plain_step(
    rank: int, world_size: int, device: Any, width: int, layers: int, batch: int, length: int
) -> Callable[[], Any]:
    """Plain tensors and one flat all_reduce: as fast as SPMD code gets without tricks."""
    torch.manual_seed(0)
    model = GPT(width, layers, length).to(device)
    x, y, places = (tensor.to(device) for tensor in data(batch, length))
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    optimizer = adamw(model)

    def step() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, places).reshape(-1, VOCABULARY), y)
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        flat /= world_size
        at = 0
        for parameter in model.parameters():
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))  # type: ignore[union-attr]
            at += parameter.numel()
        optimizer.step()
        return loss.detach()

    return step


def dtensor_step(mesh: Any, width: int, layers: int, batch: int, length: int) -> Callable[[], Any]:
    """The same program on DTensors, gradients brought to their parameters' placements once."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    model = GPT(width, layers, length)

    def redistribute_grad(parameter: Any) -> None:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements, async_op=True)

    for part in model.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                there = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=None)
                part._parameters[name] = nn.Parameter(there)
                part._parameters[name].register_post_accumulate_grad_hook(redistribute_grad)  # type: ignore[union-attr]
    x, y, places = data(batch, length)
    there = [
        distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
        for tensor, placement in ((x, Shard(0)), (y, Shard(0)), (places, Replicate()))
    ]
    optimizer = adamw(model)
    return lambda: train_step(model, optimizer, *there)


def fsdp_step(mesh: Any, rank: int, width: int, layers: int, batch: int, length: int) -> Callable[[], Any]:
    """FSDP2 by hand: every block sharded by itself, the rest as one."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = GPT(width, layers, length)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, y, places = data(batch, length)
    x, y = x.chunk(mesh.size())[rank], y.chunk(mesh.size())[rank]
    optimizer = adamw(model)
    return lambda: train_step(model, optimizer, x, y, places)


class Stage(nn.Module):
    """A stage's share of a GPT's blocks; before them the first one has the embeddings, after them the last the head."""

    def __init__(self, model: GPT, stage: int, num_stages: int) -> None:
        super().__init__()
        first, stop = (at * len(model.blocks) // num_stages for at in (stage, stage + 1))
        self.blocks = model.blocks[first:stop]
        self.before = nn.ModuleList([model.tokens, model.places] if stage == 0 else [])
        self.after = nn.Sequential(*([model.norm, model.head] if stage == num_stages - 1 else []))

    def forward(self, x: Any) -> Any:
        if self.before:
            tokens, places = self.before
            x = tokens(x) + places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.after(x)


def pipeline_step(mesh: Any, rank: int, width: int, layers: int, batch: int, length: int) -> Callable[[], Any]:
    """GPipe by hand, with as many microbatches as strategy="pp" takes by itself."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def loss_of(logits: Any, y: Any) -> Any:
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1))

    torch.manual_seed(0)
    part = Stage(GPT(width, layers, length), rank, mesh.size())
    stage = PipelineStage(part, rank, mesh.size(), torch.device("cpu"), group=mesh.get_group())
    schedule = ScheduleGPipe(stage, min(batch, 4 * mesh.size()), loss_of)
    x, y, _ = data(batch, length)
    optimizer = adamw(part)

    def step() -> Any:
        optimizer.zero_grad()
        losses: list[Any] = []
        schedule.step(*([x] if rank == 0 else []), target=y.view(batch, length), losses=losses, return_outputs=False)
        optimizer.step()
        return losses

    return step
